"""Rows of a streamed statement through the wire: psycopg and asyncpg see them as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
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

pytestmark = pytest.mark.integration

QUERY = "SELECT i, ai_generate('p' || i) FROM range(200) r(i)"


@pytest.fixture
def generator() -> HeldGenerator:
    return HeldGenerator()


@pytest.fixture
async def port(generator: HeldGenerator) -> AsyncIterator[int]:
    sql_server = DuckDbSqlServer(
        DuckDbConfig(threads=1), generator, session_defaults={"tierkv.max_concurrency": "8"}
    )
    server = PgWireServer(PgWireConfig(port=0), DialectServer(sql_server), SystemClock())
    yield await server.start()
    await server.stop()
    await sql_server.close()


EXPECTED = [(i, answer_text(f"p{i}")) for i in range(200)]


async def test_psycopg_gets_rows_while_answers_are_missing(
    port: int, generator: HeldGenerator
) -> None:
    conn = await psycopg.AsyncConnection.connect(
        f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable", autocommit=True
    )
    rows = []
    async for row in conn.cursor().stream(QUERY):
        rows.append(row)
        if len(rows) == 8:
            assert len(generator.prompts) < 100
            generator.release.set()
    assert rows == EXPECTED
    cursor = await conn.execute(QUERY)
    assert await cursor.fetchall() == EXPECTED
    assert cursor.statusmessage == "SELECT 200"
    await conn.close()


async def test_a_cursor_reads_part_and_leaves_the_transaction_usable(
    port: int, generator: HeldGenerator
) -> None:
    conn = await asyncpg.connect(
        host="127.0.0.1", port=port, user="ann", database="main", ssl=False
    )
    async with conn.transaction():
        cursor = await conn.cursor(QUERY)
        assert [tuple(row) for row in await cursor.fetch(5)] == EXPECTED[:5]
        assert [tuple(row) for row in await cursor.fetch(10)] == EXPECTED[5:15]
        assert len(generator.prompts) < 100
        # Another statement of the same transaction while the portal is open.
        generator.release.set()
        assert await conn.fetchval("SELECT 42") == 42
        assert [tuple(row) for row in await cursor.fetch(500)] == EXPECTED[15:]
        assert await cursor.fetch(5) == []
    assert await conn.fetchval("SELECT 43") == 43
    await conn.close()


async def test_cancel_reaches_a_stream(port: int, generator: HeldGenerator) -> None:
    conn = await psycopg.AsyncConnection.connect(
        f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable", autocommit=True
    )

    async def read() -> None:
        async for _ in conn.cursor().stream(QUERY):
            pass

    reading = asyncio.create_task(read())
    await generator.waiting.wait()
    await conn.cancel_safe()
    with pytest.raises(psycopg.errors.QueryCanceled):
        await reading
    assert generator.cancelled
    assert await (await conn.execute("SELECT 1")).fetchone() == (1,)
    await conn.close()


async def test_a_client_that_goes_away_stops_the_calls(port: int, generator: HeldGenerator) -> None:
    conn = await asyncpg.connect(
        host="127.0.0.1", port=port, user="ann", database="main", ssl=False
    )
    reading = asyncio.create_task(conn.fetch(QUERY))
    await generator.waiting.wait()
    conn.terminate()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError)):
        await reading
    while not generator.cancelled:
        await asyncio.sleep(0.01)
    assert not generator.release.is_set()


@pytest.mark.parametrize(
    ("clauses", "params"),
    [
        ("ORDER BY i LIMIT 3", ()),
        ("ORDER BY i LIMIT %s", (3,)),
        ("ORDER BY i OFFSET %s LIMIT %s", (0, 3)),
        ("ORDER BY i %% 5 DESC NULLS LAST, i LIMIT %s::int", (3,)),
        ("ORDER BY i DESC OFFSET 1 ROWS FETCH FIRST 3 ROWS ONLY", ()),
    ],
)
async def test_an_ordered_limit_stops_a_filter_that_compares(
    port: int, generator: HeldGenerator, clauses: str, params: tuple[int, ...]
) -> None:
    generator.release.set()
    conn = await psycopg.AsyncConnection.connect(
        f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable", autocommit=True
    )
    await conn.execute("CREATE TABLE o AS SELECT range AS i, 'p' || range AS p FROM range(400)")
    await conn.execute("CREATE TABLE known (i BIGINT, a TEXT)")
    async with conn.cursor().copy("COPY known FROM STDIN") as copy:
        for i in range(400):
            await copy.write_row((i, answer_text(f"p{i}")))
    query = "SELECT i FROM o {} WHERE {} <> 'red' " + clauses
    found = await conn.execute(query.format("", "ai_generate(p)"), params or None)
    wanted = await conn.execute(query.format("JOIN known USING (i)", "a"), params or None)
    assert await found.fetchall() == await wanted.fetchall()
    assert len(generator.prompts) <= 32
    await conn.close()


async def test_a_call_as_a_driver_makes_it(port: int) -> None:
    """What pgJDBC sends for ``{ ? = call ai_generate(?) }``, with a void NULL for the result."""

    def call() -> bytes | None:
        with psycopg.connect(
            f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable"
        ) as conn:
            text = b"select * from ai_generate($1,$2) as result"
            return conn.pgconn.exec_params(text, [None, b"p7"], [2278, 25]).get_value(0, 0)

    assert await asyncio.to_thread(call) == (answer_text("p7") or "").encode()


async def test_a_large_statement_is_announced_before_its_answers(
    port: int, generator: HeldGenerator
) -> None:
    conn = await psycopg.AsyncConnection.connect(
        f"host=127.0.0.1 port={port} user=ann dbname=main sslmode=disable", autocommit=True
    )
    told: list[str | None] = []
    heard = asyncio.Event()
    conn.add_notice_handler(lambda said: (told.append(said.message_primary), heard.set()))
    await conn.execute("SET tierkv.notice_calls = 100")
    whole = asyncio.create_task(
        conn.execute("SELECT count(ai_generate('p' || i)) FROM range(200) r(i)")
    )
    await heard.wait()
    generator.release.set()
    assert await (await whole).fetchone() == (200,)
    assert len(told) == 1
    assert str(told[0]).startswith("this statement makes at least 200 AI calls: about ")
    await conn.close()
