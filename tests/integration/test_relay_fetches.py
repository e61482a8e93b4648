"""Row-limited portals and cursors with AI calls on PostgreSQL: values, cancels, and what is beside.

``test_relay_cursors`` walks by FETCH; here asyncpg walks over portals.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import asyncpg
import psycopg
import pytest

from tests.differential.answers import DigestGenerator, plain
from tests.fix_postgres import PASSWORD, USER, PostgresServer, RunningRelay
from tests.fix_sql import InstantGenerator
from tests.integration.test_relay_cursors import TABLE
from tierkv.dbfront.postgres.statements.windows import WINDOW_ROWS
from tierkv.kvcore.errors import RowLevelError

pytestmark = pytest.mark.integration

QUERIES = (
    "SELECT id, ai_generate(body) AS a FROM docs WHERE topic <> $1 ORDER BY id DESC",
    "SELECT id, $1::int + 1 AS n FROM docs WHERE ai_filter('q', body) AND id > 20",
    "SELECT ai_generate(body || $1::text) AS a, id FROM docs d ORDER BY topic, id",
    "SELECT id, ai_generate(body) AS a FROM mixed WHERE id < $1 * 30 + 60 AND ai_filter('q', body)",
    "SELECT body, $1::int AS n FROM mixed WHERE ai_filter('q', body) OR ai_generate(body) = 'a3'",
    "SELECT id, $1::int AS n, ai_generate(body) AS a FROM seen WHERE ai_filter('z', body)",
)


@pytest.fixture
def generator() -> InstantGenerator:
    return DigestGenerator()


@pytest.fixture
def walks(postgres: PostgresServer) -> Any:
    with psycopg.connect(postgres.dsn, options="-c search_path=walks") as direct:
        direct.execute(TABLE)
        direct.execute("CREATE TABLE walks.mixed AS SELECT * FROM walks.docs ORDER BY md5(body)")
        direct.execute("CREATE INDEX ON walks.mixed (id, topic, body)")
        direct.execute(
            "CREATE VIEW walks.seen AS SELECT m.* FROM walks.mixed m JOIN walks.docs d USING (id) "
            "WHERE id < 900"
        )
        direct.execute("ANALYZE walks.docs, walks.mixed")
        direct.commit()
        yield direct
        direct.rollback()
        direct.execute("DROP SCHEMA walks CASCADE")


async def connected(port: int) -> asyncpg.Connection:
    return await asyncpg.connect(
        host="127.0.0.1", port=port, user=USER, password=PASSWORD, database="app",
        server_settings={"search_path": "walks", "tierkv.max_calls": "0"},
    )  # fmt: skip


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("query", QUERIES)
async def test_a_row_limit_asks_a_window(
    walks: psycopg.Connection, ai_relay: RunningRelay, generator: InstantGenerator, query: str,
    readonly: bool,
) -> None:  # fmt: skip
    value: Any = "x" if "text" in query else 1
    text = plain(query).replace("$1", "%s")
    expected = [tuple(row) for row in walks.execute(text, (value,)).fetchall()]
    connection = await connected(ai_relay.port)
    async with connection.transaction(readonly=readonly):
        cursor = await connection.cursor(query, value)
        found = await cursor.fetch(5)
        assert len(found) == 5
        assert 0 < len(generator.calls) <= 3 * WINDOW_ROWS
        found += await cursor.fetch(len(expected))
    in_order = list if "ORDER" in query else sorted  # PostgreSQL may walk either way.
    assert in_order(tuple(row) for row in found) == in_order(expected)
    await connection.close()


async def test_one_row_of_many(
    walks: psycopg.Connection, ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    (expected,) = walks.execute(plain(QUERIES[0]).replace("$1", "1") + " LIMIT 1").fetchall()
    walks.commit()
    connection = await connected(ai_relay.port)
    assert tuple(await connection.fetchrow(QUERIES[0], 1)) == expected
    assert 0 < len(generator.calls) <= WINDOW_ROWS
    assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements") < 4
    async with connection.transaction():
        for _ in range(2):
            assert tuple(await connection.fetchrow(QUERIES[0], 1)) == expected
        await connection.execute("ALTER TABLE docs ADD another int")
        assert tuple(await connection.fetchrow(QUERIES[0], 1)) == expected
        await connection.fetch("SELECT $1::int", 1)
        await connection.execute("DROP TABLE docs CASCADE")
        await connection.execute("CREATE TABLE docs (id int, body text, topic int)")
    assert await connection.fetchrow(QUERIES[0], 1) is None
    await connection.close()


@pytest.mark.parametrize("seed", range(4))
async def test_portals_beside_each_other(
    walks: psycopg.Connection, ai_relay: RunningRelay, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = [rng.choice(QUERIES[:2]) for _ in range(2)]
    connection = await connected(ai_relay.port)
    open_ones, found, expected = [], [], []
    async with connection.transaction(readonly=rng.random() < 0.3):
        prepared = [await connection.prepare(text) for text in texts]
        for at in range(4):
            open_ones.append(await prepared[at % 2].cursor(at % 3))
            found.append([tuple(row) for row in await open_ones[at].fetch(1)])
            text = plain(texts[at % 2]).replace("$1", "%s")
            expected.append(walks.execute(text, (at % 3,)).fetchall())
        for _ in range(12):
            at = rng.randrange(4)
            savepoint = connection.transaction()
            await savepoint.start()
            found[at] += [tuple(row) for row in await open_ones[at].fetch(rng.randrange(1, 90))]
            if rng.random() < 0.3:
                await connection.fetchval("SELECT ai_generate('beside')")
            await (savepoint.rollback() if rng.random() < 0.4 else savepoint.commit())
        for at in range(4):
            found[at] += [tuple(row) for row in await open_ones[at].fetch(5000)]
    for one, other in zip(found, expected, strict=True):
        assert sorted(one) == sorted(other)
    await connection.close()


def test_values_of_a_named_cursor(
    walks: psycopg.Connection, ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    text = "SELECT id, %s, ai_generate(body) FROM docs WHERE topic = %s AND body < %s ORDER BY id"
    values = ("v", 1, "body 5")
    expected = walks.execute(plain(text), values).fetchall()
    with psycopg.connect(ai_relay.dsn, options="-c search_path=walks") as relayed:
        relayed.execute("SET tierkv.max_calls = 0")
        with relayed.cursor("walk") as cursor:
            found = cursor.execute(text, values).fetchmany(3)
            assert 0 < len(generator.calls) <= WINDOW_ROWS
            found += cursor.fetchall()
    assert found == expected


def test_a_closed_cursor_leaves_nothing(walks: psycopg.Connection, ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, options="-c search_path=walks") as relayed:
        for end in ("CLOSE c", "CLOSE ALL", "ROLLBACK TO s"):
            relayed.execute("SAVEPOINT s")
            relayed.execute(f"DECLARE c CURSOR FOR {QUERIES[-1].replace('$1', '1')}")
            relayed.execute("FETCH 5 c")
            relayed.execute(end)
            assert relayed.execute("SELECT count(*) FROM pg_cursors").fetchone() in ((0,), (1,))
            relayed.execute("ALTER TABLE docs ADD another int")
            relayed.rollback()
        with pytest.raises(psycopg.errors.UndefinedColumn) as refused:
            relayed.execute("DECLARE c CURSOR FOR SELECT ai_generate(body), nope FROM docs")
        assert refused.value.diag.statement_position == "48"


def test_a_fetch_that_failed_fails_again(walks: psycopg.Connection, ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, options="-c search_path=walks") as relayed:
        relayed.execute("SET LOCAL tierkv.max_calls = 70")
        relayed.execute("DECLARE c CURSOR FOR SELECT id, ai_generate(body) FROM docs")
        found = relayed.execute("FETCH 20 c").fetchall()
        for _ in range(2):
            with pytest.raises(psycopg.Error, match="max_calls"), relayed.transaction():
                relayed.execute("FETCH 90 c")
        relayed.execute("CLOSE c")
        assert len(found) == 20
        assert relayed.execute("SELECT ai_generate('x')").fetchone() is not None


def test_warnings_come_with_a_fetch(
    walks: psycopg.Connection, ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    generator.failing["body 7"] = RowLevelError("no answer to this")
    said: list[str | None] = []
    with psycopg.connect(ai_relay.dsn, options="-c search_path=walks") as relayed:
        relayed.add_notice_handler(lambda notice: said.append(notice.message_primary))
        relayed.execute("SET LOCAL tierkv.on_error = 'null'")
        relayed.execute("DECLARE c CURSOR FOR SELECT id, ai_generate(body) FROM docs ORDER BY id")
        assert not said
        assert relayed.execute("FETCH 9 c").fetchall()[6] == (7, None)
    assert len(said) == 1


async def test_a_fetch_is_cancelled(
    walks: psycopg.Connection, ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()
    connection = await connected(ai_relay.port)
    for stop in ("cancel", "timeout"):
        generator.started.clear()
        await connection.execute("BEGIN")
        await connection.execute("DECLARE c CURSOR FOR SELECT ai_generate(body) FROM docs")
        if stop == "timeout":
            await connection.execute("SET LOCAL statement_timeout = 100")
        fetching = asyncio.create_task(connection.execute("FETCH 5 c"))
        while not generator.started.is_set():
            await asyncio.sleep(0.01)
        if stop == "cancel":
            fetching.cancel()
        with pytest.raises((asyncio.CancelledError, asyncpg.QueryCanceledError)):
            await fetching
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await connection.execute("SELECT 1")
        await connection.execute("ROLLBACK")
    assert await connection.fetchval("SELECT 1") == 1
    await connection.close()
