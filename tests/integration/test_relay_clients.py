"""AI calls through the relay from asyncpg, SQLAlchemy, node-postgres and psql; cancels; TLS."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa

from tests.fix_postgres import (
    PASSWORD,
    USER,
    PostgresServer,
    RunningRelay,
    attendants,
    running_postgres,
    running_relay,
)
from tests.fix_sql import InstantGenerator, answer_text
from tests.fix_tls import Certificates
from tierkv.dbfront.postgres.install import install

pytestmark = pytest.mark.integration


async def open_asyncpg(relay: RunningRelay) -> asyncpg.Connection:
    return await asyncpg.connect(
        host="127.0.0.1", port=relay.port, user=USER, password=PASSWORD, database="app", ssl=False
    )


async def test_asyncpg(ai_relay: RunningRelay, generator: InstantGenerator) -> None:
    connection = await open_asyncpg(ai_relay)
    statement = await connection.prepare(
        "SELECT id, ai_generate(body) AS a, ai_filter(body) AS f FROM docs WHERE id < $1 ORDER BY 1"
    )
    assert [(a.name, a.type.name) for a in statement.get_attributes()] == [
        ("id", "int4"),
        ("a", "text"),
        ("f", "bool"),
    ]
    assert generator.prompts == []
    prompts = await connection.fetch("SELECT ai_generate($1::text || body) FROM docs", "say ")
    assert prompts[3][0] == answer_text("say body 3")
    async with connection.transaction():
        rows = [
            row["a"]
            async for row in connection.cursor(
                "SELECT ai_generate(body) AS a FROM docs ORDER BY id", prefetch=11
            )
        ]
        assert rows[:7] == [answer_text(f"body {i}") for i in range(7)] and len(rows) == 60
    with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
        await connection.fetch("SELECT 1, ai_generate()")
    assert refused.value.position == "11"
    await connection.executemany(
        "INSERT INTO docs SELECT $1, 0, ai_generate($2)", [(100 + i, f"new {i}") for i in range(5)]
    )
    rows = await connection.fetch("SELECT body FROM docs WHERE id >= 100 ORDER BY id")
    assert [row["body"] for row in rows] == [answer_text(f"new {i}") for i in range(5)]
    await connection.close()


async def test_cancel_while_models_answer(
    ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()
    connection = await open_asyncpg(ai_relay)
    transaction = connection.transaction()
    await transaction.start()
    running = asyncio.create_task(connection.fetch("SELECT ai_generate(body) FROM docs"))
    while not generator.started.is_set():
        await asyncio.sleep(0.01)
    running.cancel()  # asyncpg sends a CancelRequest.
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await connection.fetch("SELECT 1")
    assert generator.cancelled > 0
    await transaction.rollback()
    ai_relay.loop.call_soon_threadsafe(generator.gate.set)
    assert await connection.fetchval("SELECT ai_generate('on')") == answer_text("on")
    await connection.close()


def test_cancel_and_timeout_while_models_answer(
    ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("SET statement_timeout = '200ms'")
        with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
            connection.execute("SELECT ai_generate('slow')")
        assert connection.execute("SELECT 1").fetchone() == (1,)
        connection.execute("RESET statement_timeout")
        with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
            connection.execute("SET statement_timeout = '200ms'; SELECT ai_generate('slow')")


def test_cancel_in_a_round_of_the_engine(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        pid = connection.info.backend_pid

        def cancel_when_running() -> None:
            with psycopg.connect(ai_relay.dsn, autocommit=True) as other:
                while (
                    other.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'",
                        (pid,),
                    ).fetchone()
                    is None
                ):
                    pass
            connection.cancel_safe()

        canceller = threading.Thread(target=cancel_when_running)
        canceller.start()
        with pytest.raises(psycopg.errors.QueryCanceled, match="user request"):
            connection.execute("SELECT ai_generate('x'), pg_sleep(60)")
        canceller.join()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_sqlalchemy(ai_relay: RunningRelay) -> None:
    url = sa.URL.create("postgresql+psycopg", USER, PASSWORD, "127.0.0.1", ai_relay.port, "app")
    engine = sa.create_engine(url)
    metadata = sa.MetaData()
    metadata.reflect(engine, only=["docs", "topics"])
    docs, topics = metadata.tables["docs"], metadata.tables["topics"]
    assert [column.name for column in docs.primary_key] == ["id"]
    query = (
        sa.select(docs.c.id, sa.func.ai_generate(docs.c.body).label("a"), topics.c.name)
        .join(topics, topics.c.id == docs.c.topic)
        .where(sa.func.ai_generate(docs.c.body) == "yes", topics.c.name == "music")
        .order_by(docs.c.id)
    )
    with engine.begin() as connection:
        rows = connection.execute(query).all()
        bodies = {i: f"body {i % 30}" for i in range(60) if i % 10 != 7 and i % 4 == 1}
        assert rows == [(i, "yes", "music") for i, b in bodies.items() if answer_text(b) == "yes"]
        done = connection.execute(
            docs.update().where(docs.c.id == 3).values(body=sa.func.ai_generate(docs.c.body))
        )
        assert done.rowcount == 1
    with engine.connect() as connection:
        body = connection.scalar(sa.select(docs.c.body).where(docs.c.id == 3))
    assert body == answer_text("body 3")
    engine.dispose()


NODE = """
const { Client } = require('pg');
(async () => {
  const client = new Client();
  await client.connect();
  const out = {};
  out.simple = (await client.query('SELECT ai_generate(body) AS a FROM docs WHERE id = 3')).rows;
  out.unnamed = (await client.query('SELECT ai_generate($1::text) AS a', ['unnamed'])).rows;
  for (const word of ['one', 'two'])
    out[word] = (await client.query(
      { name: 'said', text: 'SELECT ai_generate($1::text) AS a', values: [word] })).rows;
  await client.query('BEGIN');
  try { await client.query('SELECT ai_generate()'); } catch (error) { out.code = error.code; }
  try { await client.query('SELECT 1'); } catch (error) { out.then = error.code; }
  await client.query('ROLLBACK');
  out.plain = (await client.query('SELECT 1 AS one')).rows;
  await client.end();
  console.log(JSON.stringify(out));
})();
"""


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "pg@8"],
        cwd=folder, check=True, timeout=110,
    )  # fmt: skip
    return folder / "node_modules"


def test_node_postgres(ai_relay: RunningRelay, node_modules: Path) -> None:
    done = subprocess.run(
        ["node", "-e", NODE], env=ai_relay.environment | {"NODE_PATH": str(node_modules)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "simple": [{"a": answer_text("body 3")}],
        "unnamed": [{"a": answer_text("unnamed")}],
        "one": [{"a": answer_text("one")}],
        "two": [{"a": answer_text("two")}],
        "code": "22023",
        "then": "25P02",
        "plain": [{"one": 1}],
    }


def test_psql(ai_relay: RunningRelay) -> None:
    script = """
SELECT id, ai_generate(body) FROM docs WHERE id IN (3, 7) ORDER BY id \\g
\\copy (SELECT ai_generate(body) FROM docs WHERE id = 3) TO STDOUT
BEGIN;
DECLARE c CURSOR FOR SELECT ai_generate(body) FROM docs WHERE id < 3 ORDER BY id;
FETCH 2 FROM c;
FETCH ALL FROM c;
COMMIT;
SELECT ai_generate(body), nothing FROM docs;
"""
    done = subprocess.run(
        ["psql", "-X", "-A", "-t"], input=script, env=ai_relay.environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    three = answer_text("body 3")
    answers = "\n".join(str(answer_text(f"body {i}")) for i in range(3))
    assert done.stdout == f"3|{three}\n7|\n{three}\nBEGIN\nDECLARE CURSOR\n{answers}\nCOMMIT\n"
    assert "LINE 1: SELECT ai_generate(body), nothing FROM docs;" in done.stderr
    marker = done.stderr.splitlines()[-1]
    assert marker.index("^") == len("LINE 1: SELECT ai_generate(body), ")


@pytest.fixture(scope="module")
def encrypted(certificates: Certificates) -> Iterator[PostgresServer]:
    with running_postgres((certificates.server.cert, certificates.server.key)) as server:
        yield server


def test_tls_on_both_legs(encrypted: PostgresServer, certificates: Certificates) -> None:
    generator = InstantGenerator()
    tls = {"tls_cert_file": certificates.server.cert, "tls_key_file": certificates.server.key}
    behind = f"{encrypted.dsn} sslmode=verify-full sslrootcert={certificates.client.ca}"
    with running_relay(behind, attendants(generator), require_tls=True, **tls) as relay:
        wanted = f"{relay.dsn} sslmode=verify-ca sslrootcert={certificates.client.ca}"
        with psycopg.connect(f"{wanted} channel_binding=disable") as connection:
            assert connection.execute(
                "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            ).fetchone() == (True,)
            rows = connection.execute("SELECT repeat('x', i) FROM generate_series(1, 2000) i")
            assert sum(len(row[0]) for row in rows) == 2001 * 1000
        with pytest.raises(psycopg.OperationalError, match="channel_binding=disable"):
            psycopg.connect(wanted)
        with pytest.raises(psycopg.OperationalError, match="TLS connections only"):
            psycopg.connect(f"{relay.dsn} sslmode=disable")
    wrong = f"{encrypted.dsn} sslmode=verify-full sslrootcert={certificates.deceived.ca}"
    with (
        running_relay(wrong) as relay,
        pytest.raises(psycopg.OperationalError, match="certificate verify failed"),
    ):
        psycopg.connect(relay.dsn)


def test_tls_to_the_front_only(postgres: PostgresServer, certificates: Certificates) -> None:
    tls = {"tls_cert_file": certificates.server.cert, "tls_key_file": certificates.server.key}
    with running_relay(postgres.dsn, **tls) as relay:
        with psycopg.connect(f"{relay.dsn} sslmode=require") as connection:
            assert connection.pgconn.ssl_in_use
            assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(psycopg.OperationalError, match="channel binding"):
            psycopg.connect(f"{relay.dsn} sslmode=require channel_binding=require")


def test_a_backend_that_is_away_and_comes_back(generator: InstantGenerator) -> None:
    with running_postgres() as server, running_relay(server.dsn, attendants(generator)) as relay:
        with psycopg.connect(relay.dsn, autocommit=True) as connection:
            server.stop()
            with pytest.raises(psycopg.errors.AdminShutdown):
                connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError, match="could not connect to PostgreSQL"):
            psycopg.connect(relay.dsn)
        server.start()
        with psycopg.connect(relay.dsn, autocommit=True) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


async def test_a_session_that_drains_ends_its_work_first(generator: InstantGenerator) -> None:
    generator.gate = asyncio.Event()
    with running_postgres() as server, running_relay(server.dsn, attendants(generator)) as relay:
        await install(server.dsn)
        idle, inside, asking = [await open_asyncpg(relay) for _ in range(3)]
        transaction = inside.transaction()
        await transaction.start()
        running = asyncio.create_task(asking.fetchval("SELECT ai_generate('x')"))
        while not generator.started.is_set():
            await asyncio.sleep(0.01)
        draining = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(relay.server.drain(30), relay.loop)
        )
        with pytest.raises(asyncpg.CannotConnectNowError, match="shutting down") as caught:
            while True:  # Until the relay has begun.
                await (await open_asyncpg(relay)).close()
        assert "another front" in (caught.value.hint or "")
        while not idle.is_closed():  # Between the message and the end asyncpg takes no statement.
            await asyncio.sleep(0.01)
        assert await inside.fetchval("SELECT 2") == 2
        await transaction.commit()
        assert not draining.done()
        relay.loop.call_soon_threadsafe(generator.gate.set)
        assert await running == answer_text("x")
        await draining
        assert relay.server.connections == 0


async def test_a_backend_that_dies_while_models_answer(generator: InstantGenerator) -> None:
    generator.gate = asyncio.Event()
    with running_postgres() as server, running_relay(server.dsn, attendants(generator)) as relay:
        await install(server.dsn)
        connection = await open_asyncpg(relay)
        running = asyncio.create_task(connection.fetch("SELECT ai_generate('x')"))
        while not generator.started.is_set():
            await asyncio.sleep(0.01)
        server.stop()
        with pytest.raises((asyncpg.AdminShutdownError, asyncpg.ConnectionDoesNotExistError)):
            await running
        assert generator.cancelled == 1
        connection.terminate()
