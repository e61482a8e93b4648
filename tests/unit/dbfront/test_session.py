"""Writes, transactions, settings, describe, COPY and the admin views of a SQL session."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import (
    CancelledByUserError,
    ConfigError,
    SqlError,
)


async def rows(session: DuckDbSession, sql: str) -> list[tuple[object, ...]]:
    return list((await session.execute(sql)).rows)


async def tag(session: DuckDbSession, sql: str) -> str:
    return (await session.execute(sql)).command_tag


async def test_returning(session: DuckDbSession) -> None:
    sql = (
        "INSERT INTO docs SELECT 100 + id, topic, ai_generate(body) FROM docs WHERE id < 2 "
        "RETURNING id, ai_generate('r' || id) AS a"
    )
    described = await session.describe(sql)
    assert described.columns == (Column("id", "INTEGER"), Column("a", "VARCHAR"))
    result = await session.execute(sql)
    assert result.command_tag == "INSERT 0 2"
    assert sorted(result.rows) == [(100, answer_text("r100")), (101, answer_text("r101"))]
    assert result.columns == described.columns
    result = await session.execute("DELETE FROM docs WHERE id = 100 RETURNING body")
    assert list(result.rows) == [(answer_text("body 0"),)]


async def test_notices_of_transactions_have_their_states(session: DuckDbSession) -> None:
    await session.execute("BEGIN")
    assert (await session.execute("BEGIN")).notices[0].sqlstate == "25001"
    await session.execute("ROLLBACK")
    assert (await session.execute("ROLLBACK")).notices[0].sqlstate == "25P01"


async def test_client_options_and_server_defaults(generator: InstantGenerator) -> None:
    server = DuckDbSqlServer(
        DuckDbConfig(threads=1), generator, session_defaults={"tierkv.max_calls": "0"}
    )
    session = await server.open_session(
        ClientInfo(options={"tierkv.model": "other", "DateStyle": "ISO"})
    )
    assert await rows(session, "SHOW tierkv.max_calls") == [("0",)]
    assert await rows(session, "SHOW tierkv.model") == [("other",)]
    with pytest.raises(SqlError):
        await server.open_session(ClientInfo(options={"tierkv.nope": "1"}))
    await server.close()
    with pytest.raises(SqlError):
        DuckDbSqlServer(DuckDbConfig(), generator, session_defaults={"tierkv.nope": "1"})


async def test_describe(session: DuckDbSession, generator: InstantGenerator) -> None:
    described = await session.describe(
        "SELECT id, ai_generate($1 || body), $2::int + 1 AS n FROM docs WHERE id = CAST($3 AS "
        "bigint) LIMIT $4"
    )
    assert described.columns == (
        Column("id", "INTEGER"),
        Column("ai_generate", "VARCHAR"),
        Column("n", "INTEGER"),
    )
    assert described.parameter_types == ("VARCHAR", "INTEGER", "BIGINT", "BIGINT")
    for statement in ("INSERT INTO docs VALUES ($1, 1, 'x')", "CREATE TABLE x (a INT)", "BEGIN"):
        assert (await session.describe(statement)).columns is None
    explained = await session.describe("EXPLAIN SELECT 1")
    assert [column.name for column in explained.columns or ()] == ["explain_key", "explain_value"]
    shown = await session.describe("SHOW TABLES")
    assert [column.name for column in shown.columns or ()] == ["name"]
    decimal = await session.describe("SELECT 1.5::DECIMAL(18,3) AS d, [1] AS l")
    assert [column.type_name for column in decimal.columns or ()] == [
        "DECIMAL(18,3)",
        "INTEGER[]",
    ]
    with pytest.raises(SqlError):
        await session.describe("SELECT nope FROM docs")
    assert generator.prompts == []
    assert await rows(session, "SELECT count(*) FROM docs") == [(60,)]


async def test_database_file(tmp_path: Path, generator: InstantGenerator) -> None:
    for _ in range(2):
        server = DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "a.duckdb")), generator)
        session = await server.open_session(ClientInfo())
        await session.execute("CREATE TABLE IF NOT EXISTS t AS SELECT ai_generate('x') AS a")
        assert await rows(session, "SELECT * FROM t") == [(answer_text("x"),)]
        await server.close()
    assert generator.prompts == ["x"]
    with pytest.raises(ConfigError, match="hides the admin views"):
        DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "tierkv.db")), generator)
    duckdb.connect(tmp_path / "tierkv.db", config={"threads": 1}).close()  # Nothing has it open.
    with pytest.raises(ConfigError, match="can't open"):
        DuckDbSqlServer(DuckDbConfig(path=str(tmp_path / "no" / "a.db")), generator)


async def test_stat_activity_shows_a_running_statement(
    server: DuckDbSqlServer, session: DuckDbSession, generator: InstantGenerator
) -> None:
    watcher = await server.open_session(ClientInfo(user="dba"))
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    seen = await rows(
        watcher,
        "SELECT usename, state, phase, round, calls_total, query FROM tierkv.stat_activity "
        f"WHERE pid = {session.pid}",
    )
    assert seen == [("ann", "active", "llm", 1, 27, "SELECT ai_generate(body) FROM docs")]
    generator.gate.set()
    await running
    state = (
        f"SELECT state, query_start IS NOT NULL FROM tierkv.stat_activity WHERE pid = {session.pid}"
    )
    assert await rows(watcher, state) == [("idle", True)]


async def test_an_admin_view_is_described_before_it_was_ever_filled(
    session: DuckDbSession,
) -> None:
    described = await session.describe("SELECT pid, state FROM tierkv.stat_activity WHERE pid = $1")
    assert described.columns == (Column("pid", "BIGINT"), Column("state", "VARCHAR"))


async def test_pg_cancel_backend_stops_another_session(
    server: DuckDbSqlServer, session: DuckDbSession, generator: InstantGenerator
) -> None:
    watcher = await server.open_session(ClientInfo(user="dba"))
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute("SELECT ai_generate(body) FROM docs"))
    await generator.started.wait()
    cancel = "SELECT pg_cancel_backend(pid) FROM tierkv.stat_activity WHERE phase = 'llm'"
    assert await rows(watcher, cancel) == [(True,)]
    with pytest.raises(CancelledByUserError):
        await running
    assert await rows(session, "SELECT 1") == [(1,)]
    assert await rows(watcher, "SELECT pg_cancel_backend(4711)") == [(False,)]


async def test_text_that_is_no_utf8_is_refused(session: DuckDbSession) -> None:
    with pytest.raises(SqlError, match="UTF-8") as caught:
        await session.execute("SELECT '\udcff'")
    assert caught.value.sqlstate == "22021"


async def test_a_statement_cancelled_before_its_first_step_leaves_nothing_behind(
    session: DuckDbSession,
) -> None:
    """As when a client hangs up at once; a coroutine that was never awaited would warn."""

    async def work() -> None:
        pytest.fail("it was cancelled before")

    statement = work()
    task = await session._start(statement)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert inspect.getcoroutinestate(statement) == inspect.CORO_CLOSED


async def test_the_error_of_a_statement_whose_client_left_is_not_logged(
    session: DuckDbSession,
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def work() -> None:
        raise SqlError("nobody reads this")

    task = await session._start(work())
    await asyncio.wait([task])
    session._running = None
    del task
    gc.collect()
    assert told == []


WITH_CALLS = [
    "INSERT INTO mine SELECT ai_generate(body) FROM docs",
    pytest.param(
        "WITH m AS (INSERT INTO mine SELECT ai_generate(body) FROM docs RETURNING 1) FROM m",
        marks=pytest.mark.skipif(
            int(duckdb.__version__.split(".")[0]) < 2, reason="the WITH of this DuckDB can't write"
        ),
    ),
    "SELECT id FROM docs WHERE ai_generate(body) = 'x'",
]


@pytest.mark.parametrize("sql", WITH_CALLS)
async def test_a_cancel_that_comes_again_and_again_leaves_the_session_usable(
    session: DuckDbSession, generator: InstantGenerator, sql: str
) -> None:
    """As Ctrl-C twice, or a cancel beside statement_timeout: the next one meets the ROLLBACK."""
    await session.execute("CREATE TABLE mine (a VARCHAR)")
    generator.gate = asyncio.Event()
    running = asyncio.create_task(session.execute(sql))
    await generator.started.wait()
    while not running.done():
        await session.cancel()
        await asyncio.sleep(0)
    with pytest.raises(CancelledByUserError):
        await running
    assert session.transaction_status == "I"
    assert await rows(session, "SELECT count(*) FROM mine") == [(0,)]
    generator.gate = None
    assert await tag(session, WITH_CALLS[0]) == "INSERT 0 60"


@pytest.mark.parametrize("sql", [WITH_CALLS[0], "INSERT INTO mine SELECT body FROM docs", "COMMIT"])
async def test_a_cancel_at_any_step_writes_all_or_nothing_and_says_which(
    session: DuckDbSession, sql: str
) -> None:
    await session.execute("CREATE TABLE mine (a VARCHAR)")
    for steps in range(0, 120, 3):
        await session.execute("DELETE FROM mine")
        if sql == "COMMIT":
            await session.execute("BEGIN")
            await session.execute("INSERT INTO mine SELECT body FROM docs")
        running = asyncio.create_task(session.execute(sql))
        for _ in range(steps):
            await asyncio.sleep(0)
        await session.cancel()
        try:
            await running
            written = 60
        except CancelledByUserError:
            written = 0
        if session.transaction_status != "I":
            await session.execute("ROLLBACK")
        assert await rows(session, "SELECT count(*) FROM mine") == [(written,)], steps


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_session_that_two_close_at_once_is_closed_once(
    generator: InstantGenerator, gives_up: bool
) -> None:
    """As when a client hangs up while the front stops; the second comes at any step."""
    for steps in range(12):
        server = DuckDbSqlServer(DuckDbConfig(), generator)
        session = await server.open_session(ClientInfo())
        await session.execute("SELECT 1")
        by_client = asyncio.create_task(session.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        if gives_up:
            by_client.cancel()
        await server.close()
        await asyncio.wait([by_client])
        assert by_client.cancelled() or by_client.exception() is None


KILLED = """
import duckdb, os, sys
database = duckdb.connect(sys.argv[1])
database.execute("CREATE TABLE t (v VARCHAR CHECK (length(rtrim(v)) < 5))")
database.execute("INSERT INTO t VALUES ('x')")
database.execute("CHECKPOINT")
database.execute("ALTER TABLE t ADD COLUMN w VARCHAR DEFAULT left('abc', 2)")
database.execute("INSERT INTO t VALUES ('y', 'z')")
os._exit(9)
"""


async def test_a_database_is_opened_whatever_a_kill_left_to_replay(
    tmp_path: Path, generator: InstantGenerator
) -> None:
    """DuckDB alone can't: it replays before it knows the functions of constraints."""
    path = tmp_path / "it's.duckdb"
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)
    server = DuckDbSqlServer(DuckDbConfig(path=str(path)), generator)
    session = await server.open_session(ClientInfo())
    assert await rows(session, "SELECT * FROM t ORDER BY v") == [("x", "ab"), ("y", "z")]
    with pytest.raises(SqlError):
        await session.execute("INSERT INTO t VALUES ('too long', '')")
    await server.close()
