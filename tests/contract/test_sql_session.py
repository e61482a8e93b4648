"""What every SqlSession does, numbered as in dbfront/sql_session.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fix_sql import TABLES, InstantGenerator, answer_text
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.sql_session import SqlServer, SqlSession
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement_results import RowStream, StatementResult
from tierkv.kvcore.errors import CancelledByUserError, SqlError, UserError

Rows = list[tuple[object, ...]]

SERVERS: dict[str, Callable[[DuckDbSqlServer], SqlServer]] = {
    "engine": lambda engine: engine,
    "postgres": DialectServer,
}


@pytest.fixture(params=SERVERS)
async def sql_server(
    request: pytest.FixtureRequest, server: DuckDbSqlServer
) -> AsyncIterator[SqlServer]:
    made = SERVERS[request.param](server)
    yield made
    await made.close()


@pytest.fixture
async def sql(sql_server: SqlServer) -> SqlSession:
    """Every implementation in turn, with some tables."""
    session = await sql_server.open_session(ClientInfo(user="ann"))
    for statement in session.split(TABLES):
        await session.execute(statement)
    return session


async def rows(session: SqlSession, text: str) -> Rows:
    return list((await session.execute(text)).rows)


def test_1_split_drops_comments_and_what_is_empty(sql: SqlSession) -> None:
    assert sql.split("SELECT 1; -- x\n ;; SELECT ';' /* ; */ ;SELECT $$;$$") == [
        "SELECT 1",
        "SELECT ';'",
        "SELECT $$;$$",
    ]


async def test_2_describe_runs_nothing(sql: SqlSession, generator: InstantGenerator) -> None:
    described = await sql.describe("SELECT id, ai_generate($1 || body) AS said FROM docs")
    assert [column.name for column in described.columns or ()] == ["id", "said"]
    assert len(described.parameter_types) == 1
    assert (await sql.describe("DELETE FROM docs")).columns is None
    assert generator.prompts == [] and await rows(sql, "SELECT count(*) FROM docs") == [(60,)]


async def test_3_parameters_are_bound_and_calls_answered(sql: SqlSession) -> None:
    found = await sql.execute("SELECT id + $1, ai_generate(body) FROM docs WHERE id = $2", [5, 2])
    assert list(found.rows) == [(7, answer_text("body 2"))]
    assert found.command_tag == "SELECT 1"


async def test_3_an_error_spoils_a_transaction_and_no_session(sql: SqlSession) -> None:
    with pytest.raises(UserError) as failed:
        await sql.execute("SELECT nope FROM docs")
    assert failed.value.sqlstate == "42703"
    assert sql.transaction_status == "I" and await rows(sql, "SELECT 1") == [(1,)]
    await sql.execute("BEGIN")
    assert sql.transaction_status == "T"
    with pytest.raises(UserError):
        await sql.execute("SELECT nope FROM docs")
    assert sql.transaction_status == "E"
    with pytest.raises(SqlError) as refused:
        await sql.execute("SELECT 1")
    assert refused.value.sqlstate == "25P02"
    await sql.execute("ROLLBACK")
    assert sql.transaction_status == "I" and await rows(sql, "SELECT 1") == [(1,)]


async def test_4_another_task_may_cancel(sql: SqlSession, generator: InstantGenerator) -> None:
    generator.gate = asyncio.Event()
    running = asyncio.create_task(sql.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    await sql.cancel()
    with pytest.raises(CancelledByUserError):
        await running
    generator.gate.set()
    assert await rows(sql, "SELECT 1") == [(1,)]


async def test_5_copied_rows_are_counted_and_come_whole_or_not_at_all(sql: SqlSession) -> None:
    lines = [[str(i), None, f"text {i}"] for i in range(1000, 6000)]
    assert await sql.copy_in('"docs"', ["id", "topic", "body"], lines) == 5000
    assert await rows(sql, "SELECT count(*), min(body) FROM docs WHERE id >= 1000") == [
        (5000, "text 1000")
    ]
    with pytest.raises(SqlError) as refused:
        await sql.copy_in("docs", ["id"], [["70000"], ["x"]])
    assert refused.value.sqlstate == "22P02"
    assert await rows(sql, "SELECT count(*) FROM docs WHERE id = 70000") == [(0,)]


async def all_rows(found: StatementResult | RowStream) -> Rows:
    if isinstance(found, StatementResult):
        return list(found.rows)
    gathered: Rows = []
    while batch := await found.next_rows():
        gathered += batch
    return gathered


async def test_6_a_streams_rows_outlive_the_next_statement(sql: SqlSession) -> None:
    text = "SELECT id, ai_generate(body) FROM docs WHERE id < 20"
    whole = await rows(sql, text)
    found = await sql.execute_rows(text)
    assert not isinstance(found, StatementResult)
    first = list(await found.next_rows())
    assert await rows(sql, "SELECT 1") == [(1,)]
    assert sorted(first + await all_rows(found)) == sorted(whole)
    assert await all_rows(await sql.execute_rows("CREATE TABLE other (a INT)")) == []


async def test_7_the_fronts_own_statements_are_free_and_not_counted(
    sql: SqlSession, sql_server: SqlServer
) -> None:
    kept = "CREATE SCHEMA tierkv_pg"
    with pytest.raises(UserError):
        await sql.execute(kept)
    await sql.execute_own(kept)
    await sql.execute("SELECT 42 AS asked")
    assert list(await sql.execute_own("SELECT 42 AS own")) == [(42,)]
    watcher = await sql_server.open_session(ClientInfo(user="ann"))
    shown = f"SELECT query FROM tierkv.stat_activity WHERE pid = {sql.pid}"
    assert await rows(watcher, shown) == [("SELECT 42 AS asked",)]


async def test_8_a_state_of_the_catalogue_means_the_same_tables(
    sql: SqlSession, sql_server: SqlServer
) -> None:
    other = await sql_server.open_session(ClientInfo(user="bob"))
    seen = {other.catalogue_state()}
    assert None not in seen and other.catalogue_state() in seen
    for change in ("CREATE TABLE new (a INT)", "ALTER TABLE new ADD b INT", "DROP TABLE new"):
        await sql.execute(change)
        seen.add(other.catalogue_state())
    assert len(seen) == 4
    await sql.execute("CREATE TEMP TABLE mine (a INT)")
    assert sql.catalogue_state() is None or sql.catalogue_state() != other.catalogue_state()


async def test_9_progress_is_told_and_the_last_calls_are_counted(sql: SqlSession) -> None:
    seen: list[tuple[str, int, int]] = []
    sql.on_progress = lambda p: seen.append((p.phase, p.calls_done, p.calls_total))
    await sql.execute("SELECT ai_generate(body) FROM docs")
    assert seen[0] == ("collect", 0, 0) and seen[-1] == ("done", 27, 27)
    assert ("llm", 13, 27) in seen
    await sql.execute("SELECT 1")
    assert (sql.last_ai_stats.calls, sql.last_ai_stats.distinct_calls) == (54, 27)
