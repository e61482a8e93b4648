"""Hop 1 of the main job: run one SQL statement whose AI calls go to the models.

``run_statement`` collects, evaluates and replays: the engine runs the user's own statement, unknown
AI calls are answered NULL and noted, all distinct ones are evaluated as one batch, and the engine
runs again until it missed nothing. Types, names, row order and NULL logic stay the engine's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dbfront.answers import AiCall, AnswerBook
from dbfront.command_tag import client_result
from dbfront.contracts import Column, Notice, PreparedCall, StatementResult, TextGenerator
from dbfront.engines.duckdb_engine import DuckDbConnection, EngineResult
from dbfront.evaluation import CallDefaults, Outcome, RowFailure, evaluate, text_call
from dbfront.explain import ai_plan_text
from dbfront.statistics import AiStats, StatementProgress
from dbfront.transaction import ClientTransaction
from kvcore import limits
from kvcore.clock import Clock
from kvcore.errors import CancelledByUserError, NoNodeError, SqlError, TierKVError
from kvcore.request import FinishReason
from sql.plan import Explain, StatementPlan, plan_statement
from sql.rewrite import RewrittenSql

FIRST_BUDGET = 64
"""Calls of a filter in the first round of a LIMIT that may stop early; doubled each round."""

MAX_WARNED_MESSAGES = 5


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What failed calls and big statements lead to.

    Attributes:
        on_error: ``null``, ``error``, or ``auto``: null in reads, error in writes.
        max_error_ratio: share of failures above which the statement fails anyway.
        max_calls: most distinct calls; 0 is no limit.
    """

    on_error: str = "auto"
    max_error_ratio: float = 1.0
    max_calls: int = 1000


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
    """Collect, evaluate, replay: one statement with AI calls.

    Attributes:
        book: what is known and what was missed.
        errors: messages of failed calls, in order of arrival.
    """

    def __init__(
        self, plan: StatementPlan, params: Mapping[str, Any], context: StatementContext
    ) -> None:
        self.plan = plan
        self.params = params
        self.context = context
        self.stats = context.stats
        self.book = AnswerBook(plan.forms)
        self.errors: list[str] = []
        self.stopped_at_default_length = 0
        self.blend_refusal = ""
        self._calls_total = 0
        self._engine_error: TierKVError | None = None

    async def run(self) -> StatementResult:
        """Run the statement in one transaction: the client's, or one of its own."""
        await self._check_constants()
        transaction = self.context.transaction
        if self.plan.explain is Explain.PLAN:
            return await self._explain()
        async with transaction.for_statement():
            if self.plan.collect_sql is not None:
                await self._collect(self.plan.collect_sql)
            result = await self._until_answered(self.plan.engine_sql, writes=self.plan.writes)
        self.stats.calls += self.book.lookups
        self._report("done")
        if self.plan.explain is Explain.ANALYZE:
            result = self._with_ai_plan(result)
        return client_result(self.plan, result, self._notices())

    async def _check_constants(self) -> None:
        """Refuse unknown models and unusable options before anything runs, rows or no rows."""
        for params in {form.params for form in self.plan.forms if not form.per_row}:
            try:
                await self.context.generator.prepare(
                    text_call(AiCall(params, "."), self.context.defaults)
                )
            except NoNodeError:
                if self.plan.explain is not Explain.PLAN:
                    raise

    async def _collect(self, sql: RewrittenSql) -> None:
        """Learn the answers a write needs, with the SELECT that meets the same calls."""
        try:
            await self._until_answered(sql, writes=False)
        except TierKVError as error:
            # The SELECT is only a way to collect; what the engine has against it may not hold for
            # the statement itself, which will say what is wrong.
            if error is not self._engine_error or isinstance(error, CancelledByUserError):
                raise
            if not await self.context.transaction.start_again():
                raise

    async def _until_answered(self, sql: RewrittenSql, *, writes: bool) -> EngineResult:
        """Run, evaluate what was missed, run again; return the run that missed nothing."""
        stop_after = None if writes else self.plan.stop_after_rows
        budget = FIRST_BUDGET if stop_after is not None else None
        for _ in range(limits.MAX_REPLAY_ROUNDS):
            self.book.start_round(budget)
            result = await self._round(sql)
            if self.book.fatal is not None:
                raise self.book.fatal
            enough = (
                result is not None and stop_after is not None and (len(result.rows) >= stop_after)
            )
            batch = self.book.next_batch(without_filters=enough)
            if not batch and result is not None:
                return result
            if writes and result is not None:
                await self._undo_write()
            await self._evaluate(batch)
            budget = None if budget is None else 2 * budget
        raise SqlError(
            f"the AI calls of this statement did not settle in {limits.MAX_REPLAY_ROUNDS} rounds",
            sqlstate="54001",
            hint="Store the inner calls' answers in a table first.",
        )

    async def _round(self, sql: RewrittenSql) -> EngineResult | None:
        """Run the engine once; None when it failed on a placeholder NULL."""
        self._report("collect")
        started = self.context.clock.now()
        try:
            return await self.context.connection.run(sql, self.params, self.book)
        except CancelledByUserError:
            raise
        except TierKVError as error:
            # NULL stands where an answer is missing, so the error may not be the statement's own.
            self._engine_error = error
            if not self.book.has_misses:
                raise
            if not await self.context.transaction.start_again():
                error.hint = error.hint or (
                    "It was raised while AI answers were still missing; run the statement outside "
                    "the transaction, or make the expression accept NULL."
                )
                raise
            return None
        finally:
            self.stats.rounds += 1
            self.stats.engine_s += self.context.clock.now() - started

    async def _undo_write(self) -> None:
        if not await self.context.transaction.start_again():
            raise SqlError(
                "this statement's AI calls can't be collected inside a transaction with changes",
                sqlstate="0A000",
                hint="Run it outside the transaction, or compute the answers into a table first.",
            )

    async def _evaluate(self, batch: list[AiCall]) -> None:
        """Evaluate one batch of distinct calls and note the answers."""
        self._calls_total += len(batch)
        self._check_max_calls()
        self._report("llm")
        started = self.context.clock.now()
        try:
            summary = await evaluate(
                batch,
                self.context.generator,
                self.context.defaults,
                self._outcome,
                self._prepared,
            )
            self.stats.add_plan(summary)
        finally:
            self.stats.llm_s += self.context.clock.now() - started

    def _prepared(self, prepared: PreparedCall) -> None:
        self.blend_refusal = self.blend_refusal or prepared.blend_refusal

    def _outcome(self, call: AiCall, outcome: Outcome) -> None:
        """Note one outcome; raise when this failure is one too many."""
        if isinstance(outcome, RowFailure):
            self.stats.add_failure()
            self._failed(outcome)
            self.book.add({call: None})
        else:
            self.stats.add_answer(outcome)
            self.book.add({call: outcome.text})
            if outcome.finish_reason is FinishReason.LENGTH:
                self.stopped_at_default_length += call.params.options.max_tokens is None
        self._report("llm")

    def _failed(self, outcome: RowFailure) -> None:
        policy = self.context.policy
        on_error = policy.on_error
        if on_error == "auto":
            on_error = "error" if self.plan.writes else "null"
        if on_error == "error":
            raise outcome.error
        self.errors.append(outcome.error.message)
        if len(self.errors) > policy.max_error_ratio * self._calls_total:
            raise SqlError(
                f"{len(self.errors)} of {self._calls_total} AI calls failed, more than "
                f"tierkv.max_error_ratio allows",
                sqlstate="22000",
                detail="\n".join(self._distinct_errors()),
            )

    def _check_max_calls(self) -> None:
        allowed = self.context.policy.max_calls
        if allowed and self._calls_total > allowed:
            raise SqlError(
                f"this statement needs at least {self._calls_total} AI calls; "
                f"tierkv.max_calls allows {allowed}",
                sqlstate="53400",
                hint=f"SET tierkv.max_calls = {self._calls_total} (0 is no limit), "
                "or ask for fewer rows.",
            )

    def _distinct_errors(self) -> list[str]:
        return list(dict.fromkeys(self.errors))[:MAX_WARNED_MESSAGES]

    def _notices(self) -> tuple[Notice, ...]:
        notices: list[Notice] = []
        if self.errors:
            messages = self._distinct_errors()
            notices.append(
                Notice(
                    "WARNING",
                    f"{len(self.errors)} of {self._calls_total} AI calls failed and gave NULL: "
                    f"{'; '.join(messages)}",
                    sqlstate="01000",
                    hint="SET tierkv.on_error = 'error' makes the statement fail instead.",
                )
            )
        if self.stopped_at_default_length:
            notices.append(
                Notice(
                    "NOTICE",
                    f"{self.stopped_at_default_length} of {self._calls_total} answers were cut at "
                    f"tierkv.max_tokens = {self.context.defaults.max_tokens}",
                )
            )
        if self.blend_refusal:
            notices.append(
                Notice(
                    "NOTICE",
                    f"documents were not blended: {self.blend_refusal}",
                    detail="The answers are exact.",
                    hint="tierkv.namespaces shows what is allowed, `tierkv namespace set NAME "
                    "--blend on` allows it, in one process the setting namespace.blend does.",
                )
            )
        return tuple(notices)

    async def _explain(self) -> StatementResult:
        """Show the engine's plan and ours; unknown calls are NULL, and nobody is asked."""
        result = await self.context.connection.run(self.plan.engine_sql, self.params, self.book)
        return client_result(self.plan, self._with_ai_plan(result))

    def _with_ai_plan(self, result: EngineResult) -> EngineResult:
        analyzed = self.stats if self.plan.explain is Explain.ANALYZE else None
        text = ai_plan_text(self.plan, self.context.defaults, analyzed)
        columns = result.columns or (
            Column("explain_key", "VARCHAR"),
            Column("explain_value", "VARCHAR"),
        )
        return EngineResult(columns, [*result.rows, ("ai_plan", text)])

    def _report(self, phase: str) -> None:
        if self.context.on_progress is not None:
            self.context.on_progress(
                StatementProgress(
                    phase=phase,
                    round=self.stats.rounds,
                    calls_done=self.stats.distinct_calls,
                    calls_total=self._calls_total,
                    stats=self.stats,
                )
            )
