"""DECLARE and FETCH of a streamed statement: each FETCH makes the calls of its rows only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from tests.fix_held import HeldGenerator
from tests.fix_sql import answer_text
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import RowLevelError

pytestmark = pytest.mark.integration

QUERY = "SELECT i, ai_generate('p' || i) FROM range(200) r(i)"
EXPECTED = [(i, answer_text(f"p{i}")) for i in range(200)]
FIRST_WINDOW = 8
"""Rows of the first window: tierkv.max_concurrency. Each later one is twice as long."""

Connection = psycopg.AsyncConnection[tuple[object, ...]]


@pytest.fixture
def generator() -> HeldGenerator:
    return HeldGenerator()


@pytest.fixture
async def conn(generator: HeldGenerator) -> AsyncIterator[Connection]:
    defaults = {"tierkv.max_concurrency": str(FIRST_WINDOW)}
    sql_server = DuckDbSqlServer(DuckDbConfig(threads=1), generator, session_defaults=defaults)
    server = PgWireServer(PgWireConfig(port=0), DialectServer(sql_server), SystemClock())
    port = await server.start()
    dsn = f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection
    await server.stop()
    await sql_server.close()


async def fetched(conn: Connection, words: str) -> list[tuple[object, ...]]:
    return await (await conn.execute(f"FETCH {words} FROM c")).fetchall()


async def declare(conn: Connection, query: str = QUERY, options: str = "") -> None:
    await conn.execute("BEGIN")
    await conn.execute(f"DECLARE c {options} CURSOR FOR {query}")


async def test_each_fetch_asks_for_the_window_of_its_rows(
    conn: Connection, generator: HeldGenerator
) -> None:
    await declare(conn)
    assert generator.prompts == []
    assert await fetched(conn, "1") == EXPECTED[:1]
    assert len(generator.prompts) == FIRST_WINDOW
    assert await fetched(conn, str(FIRST_WINDOW - 1)) == EXPECTED[1:FIRST_WINDOW]
    assert len(generator.prompts) == FIRST_WINDOW
    assert await fetched(conn, "NEXT") == EXPECTED[FIRST_WINDOW : FIRST_WINDOW + 1]
    assert len(generator.prompts) == 3 * FIRST_WINDOW
    generator.release.set()
    assert await fetched(conn, "ALL") == EXPECTED[FIRST_WINDOW + 1 :]
    assert len(generator.prompts) == 200
    assert await fetched(conn, "1") == []
    await conn.execute("COMMIT")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "CLOSE c", "CLOSE ALL", "FETCH no_cursor"])
async def test_what_ends_a_cursor_stops_its_calls(
    conn: Connection, generator: HeldGenerator, end: str
) -> None:
    await declare(conn)
    await fetched(conn, "1")
    if end.startswith("FETCH"):
        with pytest.raises(psycopg.errors.InvalidCursorName):
            await conn.execute(end)
    else:
        await conn.execute(end)
    if not end.startswith(("COMMIT", "CLOSE")):
        await conn.execute("ROLLBACK")
    assert await (await conn.execute("SELECT 42")).fetchone() == (42,)
    assert len(generator.prompts) == FIRST_WINDOW
    with pytest.raises(psycopg.errors.InvalidCursorName):
        await conn.execute("FETCH 1 FROM c")


async def test_a_cursor_that_is_never_fetched_from_asks_nothing(
    conn: Connection, generator: HeldGenerator
) -> None:
    await declare(conn)
    with pytest.raises(psycopg.errors.DuplicateCursor):
        await conn.execute(f"DECLARE c CURSOR FOR {QUERY}")
    await conn.execute("ROLLBACK")
    await declare(conn)
    await conn.execute("COMMIT")
    assert generator.prompts == []


async def test_a_stream_goes_forward_only(conn: Connection, generator: HeldGenerator) -> None:
    await declare(conn)
    assert (await conn.execute("MOVE FORWARD 3 FROM c")).statusmessage == "MOVE 3"
    assert await fetched(conn, "RELATIVE 2") == EXPECTED[4:5]
    assert await fetched(conn, "ABSOLUTE 20") == EXPECTED[19:20]
    assert await fetched(conn, "0") == EXPECTED[19:20]
    assert await fetched(conn, "RELATIVE 0") == EXPECTED[19:20]
    assert await fetched(conn, "FORWARD 2") == EXPECTED[20:22]
    for back in ("PRIOR", "BACKWARD 1", "FIRST", "ABSOLUTE 3", "RELATIVE -1", "BACKWARD ALL"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as caught:
            await conn.execute(f"FETCH {back} FROM c")
        assert caught.value.diag.message_hint == "Declare it with SCROLL."
        await conn.execute("ROLLBACK")
        await declare(conn)
        assert await fetched(conn, "5") == EXPECTED[:5]
    assert len(generator.prompts) < 200


async def test_a_cursor_with_scroll_is_evaluated_whole(
    conn: Connection, generator: HeldGenerator
) -> None:
    generator.release.set()
    await declare(conn, options="SCROLL")
    assert len(generator.prompts) == 200
    assert await fetched(conn, "LAST") == EXPECTED[-1:]
    assert await fetched(conn, "PRIOR") == EXPECTED[-2:-1]
    await conn.execute("COMMIT")


async def test_the_last_row_of_a_stream(conn: Connection, generator: HeldGenerator) -> None:
    generator.release.set()
    await declare(conn)
    assert await fetched(conn, "LAST") == EXPECTED[-1:]
    assert await fetched(conn, "NEXT") == []
    await conn.execute("COMMIT")


async def test_max_calls_holds_over_the_life_of_a_cursor(
    conn: Connection, generator: HeldGenerator
) -> None:
    await conn.execute("SET tierkv.max_calls = 20")
    await declare(conn)
    assert await fetched(conn, "8") == EXPECTED[:8]
    with pytest.raises(psycopg.errors.ConfigurationLimitExceeded, match="max_calls"):
        for _ in range(3):
            await fetched(conn, "8")
    assert len(generator.prompts) <= 20
    await conn.execute("ROLLBACK")


async def test_a_timeout_is_of_one_fetch(conn: Connection, generator: HeldGenerator) -> None:
    await declare(conn)
    assert await fetched(conn, "1") == EXPECTED[:1]
    # Long enough for a busy machine to have asked, before it ends in the midst of answers.
    await conn.execute("SET statement_timeout = '2s'")
    assert len(generator.prompts) == FIRST_WINDOW  # SET does not run the rest
    with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
        await fetched(conn, "ALL")
    assert generator.stopped.is_set()
    await conn.execute("ROLLBACK")
    await conn.execute("SET statement_timeout = 0")
    assert await (await conn.execute("SELECT 42")).fetchone() == (42,)


async def test_cancel_reaches_a_fetch(conn: Connection, generator: HeldGenerator) -> None:
    await declare(conn)
    fetching = asyncio.create_task(fetched(conn, "ALL"))
    await generator.waiting.wait()
    await conn.cancel_safe()
    with pytest.raises(psycopg.errors.QueryCanceled):
        await fetching
    assert generator.stopped.is_set()
    await conn.execute("ROLLBACK")


async def test_another_statement_keeps_the_rest_of_an_open_cursor(
    conn: Connection, generator: HeldGenerator
) -> None:
    generator.release.set()
    await conn.execute("BEGIN")
    await conn.execute("CREATE TEMP TABLE mine AS SELECT i, 'p' || i AS p FROM range(200) r(i)")
    await conn.execute("DECLARE c CURSOR FOR SELECT i, ai_generate(p) FROM mine")
    assert await fetched(conn, "5") == EXPECTED[:5]
    await conn.execute("DELETE FROM mine")
    await conn.execute(f"DECLARE d NO SCROLL CURSOR FOR {QUERY}")
    assert await fetched(conn, "100") == EXPECTED[5:105]
    assert await (await conn.execute("FETCH 2 FROM d")).fetchall() == EXPECTED[:2]
    assert await fetched(conn, "ALL") == EXPECTED[105:]
    await conn.execute("COMMIT")
    assert await (await conn.execute("SELECT count(*) FROM mine")).fetchone() == (0,)


async def test_failed_calls_are_told_where_the_rows_end(
    conn: Connection, generator: HeldGenerator
) -> None:
    generator.failing["p50"] = RowLevelError("no such luck")
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    await declare(conn, QUERY.replace("200", "60"))
    assert (await fetched(conn, "55"))[50] == (50, None)
    assert notices == []
    assert len(await fetched(conn, "ALL")) == 5
    (notice,) = notices
    assert notice.startswith("1 of 60 AI calls failed")
    await conn.execute("COMMIT")


async def test_a_named_cursor_of_psycopg(conn: Connection, generator: HeldGenerator) -> None:
    async with conn.transaction():
        async with conn.cursor("walk") as rows:
            rows.itersize = 5
            await rows.execute(QUERY)
            assert await rows.fetchmany(3) == EXPECTED[:3]
            assert len(generator.prompts) == FIRST_WINDOW
            generator.release.set()
            assert [row async for row in rows] == EXPECTED[3:]
        async with conn.cursor("left") as rows:
            await rows.execute(QUERY.replace("'p'", "'q'"))
            assert len(await rows.fetchmany(3)) == 3
    assert len(generator.prompts) == 200 + FIRST_WINDOW
