"""asyncpg: binary everywhere, statements described before they run, Describe without Bind."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from collections.abc import Iterator
from decimal import Decimal

import asyncpg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


async def connect(server: RunningServer) -> asyncpg.Connection:
    return await asyncpg.connect(
        host="127.0.0.1", port=server.port, user="alice", database="main", ssl=False
    )


async def test_binary_round_trip(server: RunningServer) -> None:
    conn = await connect(server)
    row = await conn.fetchrow(
        "SELECT $1::int + 1 AS i, $2::text AS t, $3::double AS d, $4::bool AS b, $5::uuid AS u, "
        "$6::date AS day, $7::timestamp AS ts, $8::int[] AS a, 1.25::DECIMAL(5,2) AS n, NULL AS z",
        41,
        "ü",
        0.5,
        True,
        uuid.UUID(int=5),
        dt.date(2024, 2, 29),
        dt.datetime(1970, 1, 1, 1, 2, 3, 4),
        [1, None],
    )
    assert tuple(row) == (
        42,
        "ü",
        0.5,
        True,
        uuid.UUID(int=5),
        dt.date(2024, 2, 29),
        dt.datetime(1970, 1, 1, 1, 2, 3, 4),
        [1, None],
        Decimal("1.25"),
        None,
    )
    await conn.close()


async def test_describe_does_not_run_the_statement(server: RunningServer) -> None:
    conn = await connect(server)
    await conn.execute("CREATE OR REPLACE TABLE d (id INTEGER, name VARCHAR)")
    await conn.prepare("INSERT INTO d VALUES (1, 'a')")
    statement = await conn.prepare("SELECT id, name FROM d WHERE id = $1::int")
    assert [p.name for p in statement.get_parameters()] == ["int4"]
    assert [(a.name, a.type.name) for a in statement.get_attributes()] == [
        ("id", "int4"),
        ("name", "text"),
    ]
    assert await conn.fetchval("SELECT count(*) FROM d") == 0
    await conn.close()


async def test_transaction_cursor_and_portal_suspension(server: RunningServer) -> None:
    conn = await connect(server)
    async with conn.transaction():
        cursor = await conn.cursor("SELECT range FROM range(10)")
        assert [r[0] for r in await cursor.fetch(4)] == [0, 1, 2, 3]
        assert [r[0] for r in await cursor.fetch(4)] == [4, 5, 6, 7]
        assert [r[0] for r in await cursor.fetch(4)] == [8, 9]
    await conn.close()


async def test_executemany_errors_and_pool_reset(server: RunningServer) -> None:
    async with asyncpg.create_pool(
        host="127.0.0.1", port=server.port, user="alice", database="main", ssl=False,
        min_size=1, max_size=2,
    ) as pool:  # fmt: skip
        async with pool.acquire() as conn:
            await conn.execute("CREATE OR REPLACE TABLE e (id INTEGER PRIMARY KEY)")
            await conn.executemany("INSERT INTO e VALUES ($1::int)", [(1,), (2,)])
            with pytest.raises(asyncpg.UniqueViolationError):
                await conn.executemany("INSERT INTO e VALUES ($1::int)", [(3,), (1,)])
        async with pool.acquire() as conn:  # the pool reset the connection in between
            assert await conn.fetchval("SELECT count(*) FROM e") == 2


async def test_timeout_cancels(server: RunningServer) -> None:
    conn = await connect(server)
    slow = "SELECT count(*) FROM range(200000) a, range(200000) b WHERE hash(a.range, b.range) = 1"
    with pytest.raises(asyncio.TimeoutError):
        await conn.fetchval(slow, timeout=0.2)
    assert await conn.fetchval("SELECT 1") == 1
    await conn.close()


async def test_copy_through_asyncpg(server: RunningServer, tmp_path: object) -> None:
    conn = await connect(server)
    await conn.execute("CREATE OR REPLACE TABLE c (id INTEGER, name VARCHAR)")

    async def pieces():
        for piece in (b"id,na", b"me\n1,on", b'e\n2,"t\nwo"\n'):
            yield piece

    status = await conn.copy_to_table("c", source=pieces(), format="csv", header=True)
    assert status == "COPY 2"
    gathered = bytearray()

    async def keep(data: bytes) -> None:
        gathered.extend(data)

    await conn.copy_from_query("SELECT * FROM c ORDER BY id", output=keep, format="csv")
    assert bytes(gathered) == b'1,one\n2,"t\nwo"\n'
    copied = await conn.copy_records_to_table("c", records=[(3, "x"), (4, None)])
    assert copied == "COPY 2"
    assert await conn.fetchval("SELECT count(*) FROM c") == 4
    await conn.close()


async def test_parameters_have_the_types_of_the_columns_they_meet(server: RunningServer) -> None:
    conn = await connect(server)
    await conn.execute(
        "CREATE OR REPLACE TABLE p (id INTEGER, made TIMESTAMPTZ, price DECIMAL(10,2), "
        "tags VARCHAR[])"
    )
    made = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    await conn.execute(
        "INSERT INTO p VALUES ($1, $2, $3, $4)", 7, made, Decimal("1.25"), ["a", None]
    )
    row = await conn.fetchrow("SELECT * FROM p WHERE id = $1 AND made <= $2 LIMIT $3", 7, made, 5)
    assert tuple(row) == (7, made, Decimal("1.25"), ["a", None])
    await conn.execute("UPDATE p SET price = $1 WHERE id IN ($2, $3)", Decimal("2.5"), 7, 8)
    assert await conn.fetchval("SELECT price FROM p WHERE id BETWEEN $1 AND $2", 1, 9) == Decimal(
        "2.50"
    )
    await conn.close()


async def test_many_types_copied_in_binary_and_back(server: RunningServer) -> None:
    conn = await connect(server)
    await conn.execute(
        "CREATE OR REPLACE TABLE m (b BOOLEAN, i SMALLINT, n DECIMAL(20,5), d DATE, t TIME, "
        "s TIMESTAMP, z TIMESTAMPTZ, u UUID, y BLOB, a INTEGER[], w VARCHAR[], f FLOAT, v INTERVAL)"
    )
    record = (
        True, 5, Decimal("-12.50000"), dt.date(1999, 12, 31), dt.time(1, 2, 3, 4),
        dt.datetime(2024, 2, 29, 1, 2), dt.datetime(2024, 2, 29, tzinfo=dt.UTC), uuid.UUID(int=9),
        b"\\\0\xff", [1, None, -3], ["", "NULL", 'q"', "a,b", None], 0.5,
        dt.timedelta(days=3, seconds=4),
    )  # fmt: skip
    nothing = (None,) * len(record)
    assert await conn.copy_records_to_table("m", records=[record, nothing]) == "COPY 2"
    assert [tuple(row) for row in await conn.fetch("SELECT * FROM m")] == [record, nothing]
    gathered = bytearray()

    async def keep(data: bytes) -> None:
        gathered.extend(data)

    async def pieces():
        for at in range(0, len(gathered), 5):
            yield bytes(gathered[at : at + 5])

    for form in ("binary", "text", "csv"):
        gathered.clear()
        await conn.copy_from_query("SELECT * FROM m", output=keep, format=form)
        await conn.execute("DELETE FROM m")
        assert await conn.copy_to_table("m", source=pieces(), format=form) == "COPY 2"
        assert [tuple(row) for row in await conn.fetch("SELECT * FROM m")] == [record, nothing]
    await conn.close()
