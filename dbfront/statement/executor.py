"""Hop 1 of the main job: run one SQL statement and send its AI calls to the models.

``run_statement`` collects, evaluates and replays. The engine runs the user's own statement; unknown
AI calls return NULL and are recorded. All distinct calls are evaluated as one batch, and the engine
runs again, until a run misses no answer. Types, names, row order and NULL logic stay the engine's.
Statements of a simple shape are streamed instead (dbfront/statement/stream_executor.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tierkv.dbfront.accounts.statement_entry import StatementEntry
from tierkv.dbfront.accounts.statistics import AiStats, FilterOrder, StatementProgress, cost_tokens
from tierkv.dbfront.contracts import CallDefaults, TextGenerator
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection, EngineResult
from tierkv.dbfront.explain.plan import STREAM
from tierkv.dbfront.statement.ai_statement import AiStatement, refuse_replay
from tierkv.dbfront.statement.cascade import WHY_NOT_STREAM
from tierkv.dbfront.statement.error_policy import ErrorPolicy
from tierkv.dbfront.statement.explain import explain_statement
from tierkv.dbfront.statement.redo_log import PendingChange
from tierkv.dbfront.statement.results import RowsNotWantedError, client_result, command_tag
from tierkv.dbfront.statement.stream_executor import CannotStreamError, RowSink, StreamedStatement
from tierkv.dbfront.statement.transaction import ClientTransaction
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CancelledByUserError, SqlError, TierKVError
from tierkv.sql.jobs.kv_index_command import IndexedText, indexed_forms
from tierkv.sql.plan.changes import may_change
from tierkv.sql.plan.plan import SqlStatement, StatementPlan
from tierkv.sql.plan.rewrite import RewrittenSql, joined
from tierkv.sql.plan.stream_plan import StreamPlan
from tierkv.sql.settings import FieldReorder
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import StatementKind, classify

_SAMPLED_ROWS = 64
_SAMPLED_SHARE = 8
"""To learn an order, each filter is asked about at most 64 rows, and at most an eighth of all rows.
"""


@dataclass(frozen=True, slots=True)
class StatementContext:
    """The environment of one statement.

    Attributes:
        connection: the session's connection to the engine.
        generator: access to the models.
        transaction: the client's transaction.
        defaults: call defaults of the session.
        policy: see ErrorPolicy.
        clock: clock for statistics.
        refresh_views: fills admin views before a statement reads the views.
        on_progress: called after each round and answer; None to skip.
        on_finished: called with the counters of a statement with AI calls, failed or not.
        stats: counters, filled while the statement runs.
        account: entry in the statistics; None if no statistics are kept.
        execution: ``auto``, ``stream`` or ``replay``.
        sink: receives rows as they are produced; None if the client needs the whole result.
        kv_indexes: the client's KV indexes, for EXPLAIN.
    """

    connection: DuckDbConnection
    generator: TextGenerator
    transaction: ClientTransaction
    defaults: CallDefaults
    policy: ErrorPolicy
    clock: Clock
    refresh_views: Callable[[frozenset[str]], Awaitable[None]]
    on_progress: Callable[[StatementProgress], None] | None = None
    on_finished: Callable[[AiStats], None] | None = None
    stats: AiStats = field(default_factory=AiStats)
    account: StatementEntry | None = None
    execution: str = "auto"
    sink: RowSink | None = None
    kv_indexes: tuple[IndexedText, ...] = ()


async def run_statement(
    statement: SqlStatement, params: Mapping[str, Any], context: StatementContext
) -> StatementResult:
    """Run one statement.

    A statement without AI calls runs on the engine alone.

    Args:
        statement: exactly one statement.
        params: values by parameter name.
        context: environment from the session.

    Raises:
        TierKVError: with SQLSTATE; the changes of a failed write are undone.
    """
    plan = statement.take_plan(context.connection.new_key_base)
    if context.account is not None:
        context.account.planned(plan.kind.value, holds_calls=bool(plan.sites))
        context.account.indexed = indexed_forms(plan, context.kv_indexes)
    await context.refresh_views(plan.admin_views)
    if not plan.sites and plan.explained is None:
        return client_result(plan, await _run_alone(plan, params, context))
    started = context.clock.now()
    try:
        if plan.explained is not None:
            return await explain_statement(plan, plan.explained, params, context, _Replay)
        return await _Replay(plan, params, context).run()
    finally:
        context.stats.wall_s += context.clock.now() - started
        if context.on_finished is not None:
            context.on_finished(context.stats)


async def _run_alone(
    plan: StatementPlan, params: Mapping[str, Any], context: StatementContext
) -> EngineResult:
    """Run a statement without AI calls; a change inside a transaction is recorded."""
    change = await _prepare_change(plan, context.transaction)
    if change is None:
        return await context.connection.run(plan.engine_sql, params, last=True)
    sql = plan.engine_sql
    result = change.unwrap(await context.connection.run(change.wrap(sql), params))
    context.transaction.made(change, sql, params, result)
    return result


async def _prepare_change(
    plan: StatementPlan, transaction: ClientTransaction
) -> PendingChange | None:
    """Prepare the record of a change in the client's transaction; None if nothing changes."""
    if transaction.status != "T":
        return None
    tokens = tokenize(plan.text)
    if not may_change(tokens):
        return None
    change = await transaction.prepare_change(plan.text, tokens, classify(tokens))
    if change is not None and plan.engine_sql.text[:7].upper() == "EXPLAIN":
        return PendingChange(change.text, why_once="EXPLAIN ANALYZE made it")
    return change


class _Replay:
    """Runs one statement with AI calls on DuckDB."""

    def __init__(
        self, plan: StatementPlan, params: Mapping[str, Any], context: StatementContext
    ) -> None:
        self.plan = plan
        self.params = params
        self.context = context
        self.statement = AiStatement(
            plan,
            context.generator,
            context.defaults,
            context.policy,
            context.clock,
            context.stats,
            context.on_progress,
            context.account,
        )

    async def run(self) -> StatementResult:
        """Run the statement in the client's transaction, or else in a transaction of its own."""
        statement = self.statement
        await statement.check_constants()
        if self.context.account is not None:
            await self.context.account.began()
        streamed = await self._streamed()
        if streamed is not None:
            return streamed
        top = await self._top()
        if top is not None:
            return top
        await self._check_first()
        async with self.context.transaction.for_statement():
            if self.plan.collect_sql is not None:
                await self._collect(self.plan.collect_sql)
            stop_after = None if self.plan.writes else self.plan.stop_after_rows
            sql = self.plan.engine_sql if stop_after is not None else await self._ordered_sql()
            rounds = self._rounds(sql, self.plan.writes, stop_after)
            rounds.change = await _prepare_change(self.plan, self.context.transaction)
            result = await statement.until_answered(rounds, may_stop=stop_after is not None)
            if rounds.change is not None:
                transaction, book = self.context.transaction, statement.book
                transaction.made(rounds.change, sql, self.params, result, book)
        statement.report("done")
        return client_result(self.plan, result, statement.notices())

    async def _check_first(self) -> None:
        """Refuse a write that can't run, before any model is asked.

        Writes are collected by a SELECT, which may succeed where the write has too few columns or
        may not write its file.

        Raises:
            SqlError: of class 42.
        """
        plan = self.plan
        if plan.collect_sql is None and plan.kind is not StatementKind.COPY:
            return
        if self.context.transaction.status != "I" or plan.engine_sql.text[:7].upper() == "EXPLAIN":
            return
        explained = joined(("EXPLAIN ", plan.engine_sql))
        try:
            await self.context.connection.run(explained, self.params, self.statement.book)
        except SqlError as error:
            if error.sqlstate.startswith("42"):
                raise

    async def _streamed(self) -> StatementResult | None:
        """Run the statement as a stream; return None if the statement has to be replayed."""
        stream = self._stream_plan()
        if stream is None:
            return None
        try:
            async with self.context.transaction.for_statement():
                run = await self._prepared(stream, opened=True)
                rows = await self._stream_rows(run)
        except CannotStreamError as reason:
            self._refuse_replay(str(reason))
            self.statement.trace.why_not_stream = str(reason)
            return None
        self.statement.trace.executor = STREAM
        self.statement.report("done")
        tag = command_tag(self.plan, run.count)
        return StatementResult(tag, run.columns, rows, self.statement.notices())

    async def _top(self) -> StatementResult | None:
        """Run a SELECT with a LIMIT ordered by answers; compute other outputs for few rows only."""
        plan = self.plan.top
        if plan is None:
            return None
        try:
            async with self.context.transaction.for_statement():
                run = await self._prepared(plan)
                base = await self._top_rows(plan)
                run.based_on(base.columns)
                rows = await run.with_outputs(base.rows)
        except CannotStreamError:
            return None
        self.statement.report("done")
        result = EngineResult(run.columns, rows)
        return client_result(self.plan, result, self.statement.notices())

    async def _top_rows(self, plan: StreamPlan) -> EngineResult:
        rounds = self._rounds(plan.base_sql, False, None)
        try:
            return await self.statement.until_answered(rounds)
        except TierKVError as error:
            if not await self._only_collecting(error, rounds):
                raise
            raise CannotStreamError(error.message) from error

    def _stream_plan(self) -> StreamPlan | None:
        """Return the stream plan if streaming is both possible and useful."""
        plan, context = self.plan, self.context
        if context.execution == "replay":
            self.statement.trace.why_not_stream = "tierkv.execution is replay"
            return None
        if plan.stream is None:
            self._refuse_replay(plan.why_not_stream)
        elif context.execution == "auto":
            # For the whole result, replay is fastest: all prompts are planned together, and
            # context fields are ordered by the statistics of all rows.
            reordered = context.defaults.field_reorder is not FieldReorder.OFF and any(
                "context" in form.row_parameters for form in plan.forms
            )
            cascaded = self.statement.cascade.is_asked
            limited = plan.stream.limit is not None or plan.stream.limit_name
            stops_early = plan.stream.filters and limited
            if cascaded and not stops_early:
                self.statement.trace.why_not_stream = WHY_NOT_STREAM
                return None
            if reordered or not (context.sink is not None or stops_early):
                self.statement.trace.why_not_stream = (
                    "fields of contexts are ordered by all rows"
                    if reordered
                    else "the client takes the whole result"
                )
                return None
        return plan.stream

    def _refuse_replay(self, reason: str) -> None:
        refuse_replay(self.context.execution, reason)

    async def _prepared(self, stream: StreamPlan, *, opened: bool = False) -> StreamedStatement:
        context = self.context
        bounded = stream.with_limits(self.params)
        if bounded is None:
            raise CannotStreamError("its LIMIT is not a number of rows")
        run = StreamedStatement(
            bounded,
            self.params,
            context.connection,
            self.statement,
            max_concurrency=context.defaults.max_concurrency,
        )
        try:
            await (run.open() if opened else run.prepare())
        except CancelledByUserError:
            raise
        except TierKVError as error:
            # The base query was made by the planner; the user's own statement may not fail.
            if not await context.transaction.start_again():
                raise
            raise CannotStreamError(error.message) from error
        return run

    async def _stream_rows(self, run: StreamedStatement) -> list[tuple[Any, ...]]:
        """Pass the rows to the sink; without a sink return the rows."""
        sink, kept = self.context.sink, list[tuple[Any, ...]]()
        try:
            if sink is not None:
                await sink.begin(run.columns)
            async with aclosing(run.rows()) as windows:
                async for rows in windows:
                    if sink is None:
                        kept += rows
                    else:
                        await sink.put(rows)
        except RowsNotWantedError:
            pass
        await self.context.connection.end_rows()
        return kept

    def streams(self) -> bool:
        """Return True if the statement would be streamed."""
        return self._stream_plan() is not None

    def collecting(self, sql: RewrittenSql) -> _DuckDbRounds:
        """Return rounds that only collect calls; ``undo`` reverts their writes."""
        return self._rounds(sql, self.plan.with_writes, None)

    def _rounds(self, sql: RewrittenSql, writes: bool, stop_after: int | None) -> _DuckDbRounds:
        return _DuckDbRounds(self.statement, self.context, sql, self.params, writes, stop_after)

    async def _ordered_sql(self) -> RewrittenSql:
        """Return the statement with its AI filters in the best order, learned from sampled rows."""
        filters = self.plan.filters
        if filters is None or filters.count is None or self.context.policy.dry_run:
            return self.plan.engine_sql
        if not self.context.transaction.may_try:
            return self.plan.engine_sql  # DuckDB aborts a transaction at any error.
        order = FilterOrder(len(filters.filters))
        self.statement.trace.filter_order = order
        rounds = self._rounds(filters.count, False, None)
        try:
            rows = (await self.statement.until_answered(rounds)).rows[0][0]
            sampled = min(_SAMPLED_ROWS, rows // _SAMPLED_SHARE)
            for number, sample in enumerate(filters.samples if sampled else ()):
                before = cost_tokens(self.context.stats)
                rounds = self._rounds(joined((sample, f" LIMIT {sampled}")), False, None)
                passed = (await self.statement.until_answered(rounds)).rows.count((True,))
                cost = cost_tokens(self.context.stats) - before
                order.ran(number, rows=sampled, passed=passed, cost=cost)
        except TierKVError as error:
            if not await self._only_collecting(error, rounds):
                raise
        self.statement.discard_rows()
        return filters.ordered(order.order())

    async def _only_collecting(self, error: TierKVError, rounds: _DuckDbRounds) -> bool:
        """Return True if an error can be ignored: the engine refused a query from this module."""
        if error is not rounds.engine_error or isinstance(error, CancelledByUserError):
            return False
        return await self.context.transaction.start_again()

    async def _collect(self, sql: RewrittenSql) -> None:
        """Collect the answers for a write by running a SELECT with the same calls."""
        rounds = self._rounds(sql, self.plan.with_writes, None)
        try:
            await self.statement.until_answered(rounds)
            await rounds.undo()
        except TierKVError as error:
            # The SELECT serves only to collect calls. The statement itself may succeed where the
            # SELECT fails; otherwise the statement reports its own error.
            if not await self._only_collecting(error, rounds):
                raise
        self.statement.discard_rows()


@dataclass(slots=True)
class _DuckDbRounds:
    """EngineRounds over DuckDB. DuckDB has no savepoints, so undo restarts the transaction.

    Attributes:
        engine_error: last error of the engine, genuine or caused by a missing answer.
        change: the statement's change, if the transaction has to record the change.
    """

    statement: AiStatement
    context: StatementContext
    sql: RewrittenSql
    params: Mapping[str, Any]
    writes: bool
    stop_after: int | None
    engine_error: TierKVError | None = None
    change: PendingChange | None = None
    _rows: int | None = None

    @property
    def behind(self) -> bool:
        """Always False: DuckDB reads the book directly."""
        return False

    async def run(self) -> EngineResult | None:
        """See EngineRounds."""
        self._rows = None
        change = self.change
        try:
            sql = self.sql if change is None else change.wrap(self.sql)
            result = await self.context.connection.run(sql, self.params, self.statement.book)
        except CancelledByUserError:
            raise
        except TierKVError as error:
            # NULL replaces missing answers, so the complete statement may not fail.
            self.engine_error = error
            if not self.statement.book.has_misses:
                raise
            if not await self.context.transaction.start_again():
                error.hint = error.hint or (
                    "It was raised while AI answers were still missing; run the statement outside "
                    "the transaction, or make the expression accept NULL."
                )
                raise
            return None
        self._rows = len(result.rows)
        return result if change is None else change.unwrap(result)

    async def undo(self) -> None:
        """See EngineRounds; a read needs no undo."""
        if not self.writes or self._rows is None:
            return
        if not await self.context.transaction.start_again():
            raise SqlError(
                "this statement's AI calls can't be collected inside a transaction with changes",
                sqlstate="0A000",
                hint="Run it outside the transaction, or compute the answers into a table first.",
            )

    def enough(self) -> bool:
        """See EngineRounds."""
        return self.stop_after is not None and (self._rows or 0) >= self.stop_after
