"""EXPLAIN of statements with AI calls on DuckDB: the plan, an estimate, or the measured cost.

``run_statement`` calls this module. EXPLAIN asks no model. AI_ESTIMATE asks no model either: it
runs the statement once with NULL for every answer, or the SELECT of a statement that writes.
EXPLAIN ANALYZE runs the statement as without EXPLAIN, including writes, as in PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.databases.duckdb_connection import EngineResult
from tierkv.dbfront.explain.estimate import Estimate
from tierkv.dbfront.explain.plan import (
    REPLAY,
    STREAM,
    Analysis,
    Explanation,
    ai_plan_json,
    ai_plan_lines,
)
from tierkv.dbfront.statement.ai_statement import AiStatement, EngineRounds
from tierkv.dbfront.statement.results import client_result
from tierkv.dbfront.statement_results import Column, Notice, StatementResult
from tierkv.kvcore.errors import NoNodeError
from tierkv.sql.plan.explain_options import ExplainOptions, explaining
from tierkv.sql.plan.plan import Explain, StatementPlan
from tierkv.sql.plan.rewrite import RewrittenSql

if TYPE_CHECKING:
    from tierkv.dbfront.statement.executor import StatementContext

EXPLAIN_COLUMNS: Final = (Column("explain_key", "VARCHAR"), Column("explain_value", "VARCHAR"))
_NOT_COLLECTED: Final = "its calls can't be known without writing"


class ExplainedRun(Protocol):
    """One run of a statement by the executor."""

    @property
    def statement(self) -> AiStatement: ...

    async def run(self) -> StatementResult: ...

    def streams(self) -> bool: ...

    def collecting(self, sql: RewrittenSql) -> EngineRounds[object]: ...


Start = Callable[[StatementPlan, Mapping[str, Any], "StatementContext"], ExplainedRun]


async def explain_statement(
    plan: StatementPlan,
    explained: StatementPlan,
    params: Mapping[str, Any],
    context: StatementContext,
    start: Start,
) -> StatementResult:
    """Explain a statement.

    Args:
        plan: plan of the EXPLAIN.
        explained: plan of the statement behind EXPLAIN.
        params: values by parameter name.
        context: environment from the session.
        start: creates the run of a statement without starting the run.
    """
    explain = _Explain(plan, explained, params, context, start)
    if plan.explain is Explain.ANALYZE:
        return await explain.analyze()
    if plan.explain is Explain.ESTIMATE and plan.sites:
        return await explain.estimate()
    return await explain.show()


class _Discarded:
    """Discards rows."""

    async def begin(self, columns: tuple[Column, ...]) -> None:
        """See RowSink."""

    async def put(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """See RowSink."""


class _Explain:
    """One EXPLAIN."""

    def __init__(
        self,
        plan: StatementPlan,
        explained: StatementPlan,
        params: Mapping[str, Any],
        context: StatementContext,
        start: Start,
    ) -> None:
        self.plan = plan
        self.explained = explained
        self.params = params
        self.context = context
        self.start = start

    async def show(self) -> StatementResult:
        """Show the engine's plan and the AI plan; unknown answers are NULL."""
        run = self.start(self.explained, self.params, self.context)
        with suppress(NoNodeError):  # EXPLAIN asks no node.
            await run.statement.check_constants()
        engine = await self._engine_plan(run.statement.book)
        return self._result(engine, self._told(run, streams=run.streams()))

    async def estimate(self) -> StatementResult:
        """Collect the statement's first calls and estimate their cost."""
        run = self.start(self.explained, self.params, self.context)
        await run.statement.check_constants()
        told = self._told(run, streams=run.streams())
        collect = self._collecting()
        if collect is None:
            told = replace(told, not_estimated=_NOT_COLLECTED)
        else:
            async with self.context.transaction.for_statement():
                rounds = run.collecting(collect)
                estimate = await run.statement.estimate(rounds)
                await rounds.undo()
                told = replace(told, estimate=await self._bounded(estimate))
        engine = await self._engine_plan(AnswerBook(self.plan.forms))
        return self._result(engine, told)

    async def analyze(self) -> StatementResult:
        """Run the statement and show the measured cost."""
        writes = self.explained.writes
        # The engine analyzes a write during the write. A read is run again with known answers.
        explained = self.explained
        if writes:
            explained = replace(explained, engine_sql=self.plan.engine_sql)
        context = self.context
        if context.sink is not None:
            context = replace(context, sink=_Discarded())
        run = self.start(explained, self.params, context)
        result = await run.run()
        trace = run.statement.trace
        streamed = trace.executor == STREAM
        analysis = Analysis(self.context.stats, trace)
        told = replace(self._told(run, streams=streamed), analysis=analysis)
        if writes:
            engine = EngineResult(result.columns or EXPLAIN_COLUMNS, list(result.rows))
        else:
            engine = await self._engine_plan(run.statement.book, analyze=not streamed)
        return self._result(engine, told, result.notices)

    def _collecting(self) -> RewrittenSql | None:
        """Choose the SQL text for collecting calls; None if running the text would leave changes.

        A WITH that writes is undone with its transaction, unless the transaction belongs to the
        client.
        """
        explained = self.explained
        if not explained.writes:
            return explained.engine_sql
        if explained.with_writes and self.context.transaction.status != "I":
            return None
        return explained.collect_sql or (explained.engine_sql if explained.with_writes else None)

    def _told(self, run: ExplainedRun, *, streams: bool) -> Explanation:
        why_not = self.explained.why_not_stream or run.statement.trace.why_not_stream
        return Explanation(
            self.explained,
            self.context.defaults,
            STREAM if streams else REPLAY,
            "" if streams else why_not,
            max_calls=self.context.policy.max_calls,
            indexes=self.context.kv_indexes,
        )

    async def _engine_plan(self, book: AnswerBook, *, analyze: bool = True) -> EngineResult:
        sql = self.plan.engine_sql
        if not analyze:
            options = ExplainOptions(0, format="JSON" if self.plan.explain_json else "TEXT")
            prefix = options.engine_prefix(self.plan.dialect, analyze=False)
            sql = explaining(prefix, self.explained.engine_sql)
        return await self.context.connection.run(sql, self.params, book)

    async def _bounded(self, estimate: Estimate) -> Estimate:
        """Add the maximum number of rows for calls that depend on answers."""
        if self.plan.rows_sql is None or estimate.total.known:
            return estimate
        result = await self.context.connection.run(self.plan.rows_sql, self.params)
        # Even without rows an aggregate has one group.
        return replace(estimate, rows=max(1, int(result.rows[0][0])))

    def _result(
        self, engine: EngineResult, told: Explanation, notices: tuple[Notice, ...] = ()
    ) -> StatementResult:
        if self.plan.explain_json:
            document = {"Plan": _engine_json(engine), "AI Plan": ai_plan_json(told)}
            rows = [("json", json.dumps(document, indent=2))]
        else:
            rows = [*engine.rows, ("ai_plan", "\n".join(ai_plan_lines(told)))]
        return client_result(self.plan, EngineResult(EXPLAIN_COLUMNS, rows), notices)


def _engine_json(engine: EngineResult) -> Any:
    """Parse the engine's plan; several plans are returned by name."""
    plans = {str(key): _json_value(value) for key, value in engine.rows}
    return next(iter(plans.values())) if len(plans) == 1 else plans


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
