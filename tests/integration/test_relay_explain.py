"""EXPLAIN of AI calls on PostgreSQL: estimates that leave nothing, and what a statement took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_postgres import RunningRelay
from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.contracts import Prospect

pytestmark = pytest.mark.integration

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(params=["extended", "simple"])
def connection(ai_relay: RunningRelay, request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A connection whose statements go by one of the protocols."""
    factory = psycopg.ClientCursor if request.param == "simple" else psycopg.Cursor
    with psycopg.connect(ai_relay.dsn, autocommit=True, cursor_factory=factory) as connection:
        yield connection


def document(connection: Connection, options: str, sql: str) -> dict[str, Any]:
    """Explain with FORMAT JSON; return the whole object."""
    ((told,),) = connection.execute(f"EXPLAIN ({options}, FORMAT JSON) {sql}").fetchall()
    (found,) = told if isinstance(told, list) else json.loads(told)
    assert found["Plan"]["Node Type"]
    return dict(found)


def lines(connection: Connection, explain: str) -> list[str]:
    return [row[0] for row in connection.execute(explain)]


def contents(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT * FROM docs ORDER BY id").fetchall()


@pytest.mark.parametrize("query", [
    "SELECT ai_generate(body) FROM docs",
    "SELECT ai_generate('the same instruction for all: ' || body), ai_generate('x' || topic) "
    "FROM docs",
    "UPDATE docs SET body = ai_generate(body)",
    "DELETE FROM docs WHERE ai_generate(body) = 'yes' RETURNING id",
    "INSERT INTO docs SELECT id + 100, 1, ai_generate(body) FROM docs",
])  # fmt: skip
def test_an_estimate_is_what_it_takes_and_leaves_nothing(
    connection: Connection, generator: InstantGenerator, query: str
) -> None:
    before = contents(connection)
    with connection.transaction():
        told = document(connection, "AI_ESTIMATE", query)["AI Plan"]
    assert told == document(connection, "AI_ESTIMATE", query)["AI Plan"]
    assert contents(connection) == before
    assert generator.prompts == []
    with connection.transaction(force_rollback=True):
        took = document(connection, "ANALYZE", query)["AI Plan"]
    assert contents(connection) == before
    assert len(generator.prompts) == took["Totals"]["Requests"] > 0
    for name in ("Distinct Calls", "Requests", "Prompt Tokens", "Shared Tokens"):
        assert told["Estimate"][name] == took["Totals"][name], name
    for one, other in zip(told["Calls"], took["Calls"], strict=True):
        assert one["Distinct Calls"] == other["Distinct Calls"] == other["Asked"]
        assert one["Prompt Tokens"] == other["Prompt Tokens"]
        assert "Rows" not in one
    assert "Rows" not in took["Totals"]


def test_lines_come_behind_postgresqls(connection: Connection, generator: InstantGenerator) -> None:
    query = "SELECT ai_generate(body) FROM docs WHERE ai_generate('t' || topic) <> 'no'"
    told = lines(connection, f"EXPLAIN (AI_ESTIMATE) {query}")
    assert "Scan" in told[0]
    at = told.index("AI Plan: above is a run with NULL for every answer, which was taken back")
    assert told[at + 1].startswith("AI Plan: collect, evaluate, replay")
    assert any("how many is known when the calls of an earlier stage" in line for line in told)
    assert any(line.strip().startswith("distinct 4, requests 4") for line in told)
    assert generator.prompts == []
    took = lines(connection, f"EXPLAIN (ANALYZE, COSTS OFF, VERBOSE) {query}")
    assert "actual" in took[0]
    assert any("distinct 4, asked 4, requests 4, errors 0" in line for line in took)
    assert any(line.startswith("  round 1: engine") for line in took)


def test_an_estimate_without_calls_is_postgresqls_plan(connection: Connection) -> None:
    before = contents(connection)
    with connection.transaction():
        told = lines(connection, "EXPLAIN (AI_ESTIMATE, COSTS OFF) UPDATE docs SET topic = 99")
    assert told == lines(connection, "EXPLAIN (COSTS OFF) UPDATE docs SET topic = 99")
    assert document(connection, "AI_ESTIMATE", "SELECT 1")["Plan"]["Node Type"] == "Result"
    assert contents(connection) == before


def test_analyze_writes(connection: Connection) -> None:
    connection.execute("CREATE TEMP TABLE w AS SELECT id, body FROM docs WHERE id < 5")
    lines(connection, "EXPLAIN ANALYZE UPDATE w SET body = ai_generate(body)")
    rows = connection.execute("SELECT id, body FROM w ORDER BY id").fetchall()
    assert rows == [(i, answer_text(f"body {i}")) for i in range(5)]
    connection.execute("DROP TABLE w")


@pytest.mark.parametrize("options", ["ANALYZE", "ANALYZE, FORMAT JSON"])
def test_analyze_of_a_limit_stops_as_early_as_the_statement(
    connection: Connection, generator: InstantGenerator, options: str
) -> None:
    query = "SELECT i FROM generate_series(1, 5000) i WHERE ai_generate('n' || i) = 'yes' LIMIT 5"
    connection.execute(query)
    alone = sorted(generator.prompts)
    generator.prompts.clear()
    connection.execute(f"EXPLAIN ({options}) {query}")
    assert sorted(generator.prompts) == alone


def test_a_long_estimate_can_be_stopped(
    connection: Connection, generator: InstantGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(calls: object, *, max_in_flight: int) -> Prospect:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(generator, "forecast", never)
    connection.execute("SET statement_timeout = '300ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        connection.execute("EXPLAIN (AI_ESTIMATE) SELECT ai_generate(body) FROM docs")
    assert connection.execute("SELECT 1").fetchone() == (1,)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
