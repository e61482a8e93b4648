"""Hop 1 of the main job: run one SQL statement whose AI calls go to the models.

``run_statement`` collects, evaluates and replays: the engine runs the user's own statement, unknown
AI calls are answered NULL and noted, all distinct ones are evaluated as one batch, and the engine
runs again until it missed nothing. Types, names, row order and NULL logic stay the engine's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dbfront.ai_statement import AiStatement, ErrorPolicy
from dbfront.call_defaults import CallDefaults
from dbfront.command_tag import client_result
from dbfront.contracts import Column, StatementResult, TextGenerator
from dbfront.engines.duckdb_engine import DuckDbConnection, EngineResult
from dbfront.explain import ai_plan_text
from dbfront.statement_entry import StatementEntry
from dbfront.statistics import AiStats, StatementProgress
from dbfront.transaction import ClientTransaction
from kvcore.clock import Clock
from kvcore.errors import CancelledByUserError, SqlError, TierKVError
from sql.plan import Explain, StatementPlan, plan_statement
from sql.rewrite import RewrittenSql


@dataclass(frozen=True, slots=True)
class StatementContext:
    """Everything a statement is run with.

    Attributes:
        connection: the session's way into the engine.
        generator: the way to the models.
        transaction: the client's transaction.
        defaults: what calls take from the session.
        policy: see ErrorPolicy.
        clock: for statistics.
        refresh_views: fills admin views before a statement reads them.
        on_progress: told after each round and answer; None to skip.
        on_finished: told the counters of a statement with AI calls, failed or not.
        stats: filled while the statement runs.
        account: told what the statement does; None where nobody keeps statistics.
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


async def run_statement(
    statement: str, params: Mapping[str, Any], context: StatementContext
) -> StatementResult:
    """Run one statement.

    Without AI calls the engine runs it alone.

    Args:
        statement: SQL text of exactly one statement.
        params: values by parameter name.
        context: the session's side.

    Raises:
        TierKVError: with SQLSTATE; nothing of a statement that writes remains.
    """
    plan = plan_statement(statement, key_base=context.connection.key_base)
    if context.account is not None:
        context.account.planned(plan.kind.value, holds_calls=bool(plan.sites))
    await context.refresh_views(plan.admin_views)
    if not plan.sites:
        return client_result(plan, await context.connection.run(plan.engine_sql, params))
    started = context.clock.now()
    try:
        return await _Replay(plan, params, context).run()
    finally:
        context.stats.wall_s += context.clock.now() - started
        if context.on_finished is not None:
            context.on_finished(context.stats)


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
        """Run the statement in one transaction: the client's, or one of its own."""
        statement = self.statement
        await statement.check_constants()
        if self.plan.explain in (Explain.PLAN, Explain.ESTIMATE):
            return await self._explain()
        if self.context.account is not None:
            await self.context.account.began()
        async with self.context.transaction.for_statement():
            if self.plan.collect_sql is not None:
                await self._collect(self.plan.collect_sql)
            stop_after = None if self.plan.writes else self.plan.stop_after_rows
            rounds = self._rounds(self.plan.engine_sql, self.plan.writes, stop_after)
            result = await statement.until_answered(rounds, may_stop=stop_after is not None)
        statement.report("done")
        if self.plan.explain is Explain.ANALYZE:
            result = self._with_ai_plan(result)
        return client_result(self.plan, result, statement.notices())

    def _rounds(self, sql: RewrittenSql, writes: bool, stop_after: int | None) -> _DuckDbRounds:
        return _DuckDbRounds(self.statement, self.context, sql, self.params, writes, stop_after)

    async def _collect(self, sql: RewrittenSql) -> None:
        """Learn the answers a write needs, with the SELECT that meets the same calls."""
        rounds = self._rounds(sql, False, None)
        try:
            await self.statement.until_answered(rounds)
        except TierKVError as error:
            # The SELECT is only a way to collect; what the engine has against it may not hold for
            # the statement itself, which will say what is wrong.
            if error is not rounds.engine_error or isinstance(error, CancelledByUserError):
                raise
            if not await self.context.transaction.start_again():
                raise
        self.statement.discard_rows()

    async def _explain(self) -> StatementResult:
        """Show the engine's plan and ours; unknown calls are NULL, and nobody is asked."""
        result = await self.context.connection.run(
            self.plan.engine_sql, self.params, self.statement.book
        )
        return client_result(self.plan, self._with_ai_plan(result))

    def _with_ai_plan(self, result: EngineResult) -> EngineResult:
        analyzed = self.context.stats if self.plan.explain is Explain.ANALYZE else None
        text = ai_plan_text(self.plan, self.context.defaults, analyzed)
        columns = result.columns or (
            Column("explain_key", "VARCHAR"),
            Column("explain_value", "VARCHAR"),
        )
        return EngineResult(columns, [*result.rows, ("ai_plan", text)])


@dataclass(slots=True)
class _DuckDbRounds:
    """EngineRounds over DuckDB, which has no savepoints: undoing begins the transaction anew.

    Attributes:
        engine_error: what the engine said last, right or wrong.
    """

    statement: AiStatement
    context: StatementContext
    sql: RewrittenSql
    params: Mapping[str, Any]
    writes: bool
    stop_after: int | None
    engine_error: TierKVError | None = None
    _rows: int | None = None

    @property
    def behind(self) -> bool:
        """DuckDB reads the book itself."""
        return False

    async def run(self) -> EngineResult | None:
        """See EngineRounds."""
        self._rows = None
        try:
            result = await self.context.connection.run(self.sql, self.params, self.statement.book)
        except CancelledByUserError:
            raise
        except TierKVError as error:
            # NULL stands where an answer is missing, so the error may not be the statement's own.
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
        return result

    async def undo(self) -> None:
        """See EngineRounds; a read has nothing to take back."""
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
