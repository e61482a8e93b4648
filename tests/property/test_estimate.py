"""Random tables and random queries: what EXPLAIN (AI_ESTIMATE) says for sure is so."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, assume, example, given, settings

from tests.fix_sql import SqlExamples
from tests.property.test_sql_replay import queries, tables
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import StatementResult


def plans(
    examples: SqlExamples, rows: list[tuple[int, str | None]], query: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the AI plans of an estimate, which asks nobody, and of the run."""

    async def read(session: DuckDbSession) -> list[StatementResult]:
        await session.execute("CREATE TABLE t (i INTEGER, g INTEGER, p VARCHAR)")
        for index, (group, prompt) in enumerate(rows):
            await session.execute("INSERT INTO t VALUES ($1, $2, $3)", [index, group, prompt])
        told = await session.execute(f"EXPLAIN (AI_ESTIMATE, FORMAT JSON) {query}")
        assert examples.generator.calls == []
        return [told, await session.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}")]

    before, after = (json.loads(one.rows[0][1])["AI Plan"] for one in examples.play(read))
    return before, after


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(rows=tables, query=queries())
@example(  # before its inner call is answered, the outer one makes the same call as WHERE
    rows=[(0, "")],
    query="SELECT i, ai_generate(coalesce(ai_generate('q' || p), p)) AS v FROM t"
    " WHERE ai_generate(p) = 'yes' ORDER BY i",
)
@example(  # until ai_generate is answered, WHERE makes a call that only SELECT needs, later
    rows=[(0, "")],
    query="SELECT i, CASE WHEN ai_filter('Is it?', p || g) THEN 'a' ELSE p END AS v FROM t"
    " WHERE ai_filter('Is it?', coalesce(ai_generate(p), p || g)) ORDER BY i",
)
def test_what_is_known_is_so_and_bounds_hold(
    examples: SqlExamples, rows: list[tuple[int, str | None]], query: str
) -> None:
    assume("ai_generate" in query)
    told, took = plans(examples, rows, query)
    for before, after in zip(told["Calls"], took["Calls"], strict=True):
        if "As Call" in before:
            continue
        if not before["Known"]:
            assert before["Calls at Most"] is None or after["Asked"] <= before["Calls at Most"]
        elif "Stops After Rows" in told or took["Executor"] == "stream":
            assert after["Asked"] <= before["Distinct Calls"]
        else:
            assert after["Asked"] == before["Distinct Calls"], before
    if told["Estimate"]["Complete"] and "LIMIT" not in query:
        assert told["Estimate"]["Prompt Tokens"] == took["Totals"]["Prompt Tokens"]
