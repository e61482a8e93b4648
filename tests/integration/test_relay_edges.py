"""The relay where it is awkward: encodings, isolation, half messages, clients that leave."""

from __future__ import annotations

import asyncio
import random
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import psycopg
import pytest

from tests.fix_postgres import (
    PASSWORD,
    USER,
    PostgresServer,
    RawClient,
    RunningRelay,
    attendants,
    running_relay,
)
from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.contracts import EncodedAhead, PreparedCall, TextCall, TextEvent
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres.wire import messages

pytestmark = pytest.mark.integration


def test_other_client_encodings(ai_relay: RunningRelay) -> None:
    with psycopg.connect(f"{ai_relay.dsn} client_encoding=latin1", autocommit=True) as connection:
        assert connection.execute("SELECT ai_generate('né')").fetchone() == (answer_text("né"),)
        # This question can't even be written in the client's encoding.
        row = connection.execute("SELECT ai_generate('n' || chr(8364)), 'é'").fetchone()
        assert row == (answer_text("n€"), "é")
        with pytest.raises(psycopg.errors.UndefinedColumn) as refused:
            connection.execute("SELECT 'é', ai_generate('x'), nothing")
        assert refused.value.diag.statement_position == "31"


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_isolation_levels(ai_relay: RunningRelay, level: str) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute(f"SET default_transaction_isolation = '{level}'")
        assert connection.execute("SELECT ai_generate('x')").fetchone() == (answer_text("x"),)
        connection.execute("UPDATE docs SET body = ai_generate(body) WHERE id = 1")
        row = connection.execute("SELECT body FROM docs WHERE id = 1").fetchone()
        assert row == (answer_text("body 1"),)


def test_a_row_that_comes_while_models_answer_is_not_seen_by_a_query(
    ai_relay: RunningRelay, generator: InstantGenerator, postgres: PostgresServer
) -> None:
    generator.gate = asyncio.Event()

    async def run() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=ai_relay.port, user=USER, password=PASSWORD, database="app"
        )
        running = asyncio.create_task(connection.fetch("SELECT ai_generate(body) FROM docs"))
        while not generator.started.is_set():
            await asyncio.sleep(0.01)
        with psycopg.connect(postgres.dsn) as direct:
            direct.execute("INSERT INTO docs VALUES (1000, 0, 'new')")
        assert generator.gate is not None
        ai_relay.loop.call_soon_threadsafe(generator.gate.set)
        rows = await running
        await connection.close()
        return rows

    assert len(asyncio.run(run())) == 60
    assert "new" not in generator.prompts


def test_sessions_that_only_read(ai_relay: RunningRelay, generator: InstantGenerator) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = on")
        assert connection.execute("SELECT ai_generate('x')").fetchone() == (answer_text("x"),)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("CREATE TABLE never AS SELECT ai_generate('x')")
        connection.execute("RESET default_transaction_read_only")
        text = "SELECT id, ai_generate(body) FROM docs ORDER BY id"
        expected = connection.execute(text).fetchall()
        generator.prompts.clear()
        with connection.transaction():
            connection.execute("SET TRANSACTION READ ONLY")
            for _ in range(2):
                assert connection.execute(text).fetchall() == expected
            with connection.cursor("c") as cursor:
                assert cursor.execute(text).fetchall() == expected
        assert len(generator.prompts) == 3 * 27
        used = "SELECT current_setting('tierkv_answers.s0', true)"
        assert connection.execute(used).fetchone()[0] in (None, "")


def test_cursors_that_are_open_while_others_only_read(ai_relay: RunningRelay) -> None:
    text = "SELECT id, ai_generate(body) FROM docs WHERE ai_filter('q', body) ORDER BY id"

    async def halves() -> list[list[asyncpg.Record]]:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=ai_relay.port, user=USER, password=PASSWORD, database="app"
        )
        async with connection.transaction(readonly=True):
            prepared = await connection.prepare(text)
            cursors = [await prepared.cursor() for _ in range(2)]
            first = [await cursor.fetch(5) for cursor in cursors]
            await connection.fetchval("SELECT ai_generate('y')")
            rest = [await cursor.fetch(1000) for cursor in cursors]
        await connection.close()
        return [some + more for some, more in zip(first, rest, strict=True)]

    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        expected = connection.execute(text).fetchall()
        with connection.transaction():
            connection.execute("SET TRANSACTION READ ONLY")
            with connection.cursor("c") as cursor:
                found = cursor.execute(text).fetchmany(5)
                for _ in range(2):
                    row = connection.execute("SELECT ai_generate('x')").fetchone()
                    assert row == (answer_text("x"),)
                assert found + cursor.fetchall() == expected
    for found in asyncio.run(halves()):
        assert [tuple(row) for row in found] == expected


def test_users_who_may_not_make_tables(ai_relay: RunningRelay, postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute("REVOKE TEMP ON DATABASE app FROM PUBLIC")
        direct.execute("DROP ROLE IF EXISTS bob")
        direct.execute("CREATE ROLE bob LOGIN PASSWORD 'b'")
        with psycopg.connect(ai_relay.dsn, user="bob", password="b") as connection:
            assert connection.execute("SELECT ai_generate('x')").fetchone() == (answer_text("x"),)
            row = connection.execute("SELECT ai_generate(ai_generate('x') || 'y')").fetchone()
            assert row == (answer_text(f"{answer_text('x')}y"),)
        direct.execute("GRANT TEMP ON DATABASE app TO PUBLIC")
        direct.execute("DROP ROLE bob")


def test_a_client_that_leaves_stops_its_calls(
    ai_relay: RunningRelay, generator: InstantGenerator
) -> None:
    generator.gate = asyncio.Event()

    async def leave() -> None:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=ai_relay.port, user=USER, password=PASSWORD, database="app"
        )
        running = asyncio.create_task(connection.fetch("SELECT ai_generate(body) FROM docs"))
        while not generator.started.is_set():
            await asyncio.sleep(0.01)
        connection.terminate()
        with pytest.raises(asyncpg.ConnectionDoesNotExistError):
            await running
        while generator.cancelled == 0 or ai_relay.server.connections:
            await asyncio.sleep(0.01)

    asyncio.run(leave())


def test_discard_all_between_statements(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.prepare_threshold = 0
        for _ in range(3):
            row = connection.execute("SELECT ai_generate(%s::text)", ("x",)).fetchone()
            assert row == (answer_text("x"),)
            connection.execute("DISCARD ALL")
            connection.prepare_threshold = 0
            connection._prepared.clear()


def test_copy_in_beside_calls_in_a_pipeline(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        connection.execute("CREATE TEMP TABLE c (a text)")
        with connection.transaction():
            connection.execute("INSERT INTO c SELECT ai_generate('x')")
            with connection.cursor().copy("COPY c FROM STDIN") as copy:
                copy.write("ai_generate(\n")
            connection.execute("INSERT INTO c SELECT ai_generate(a) FROM c WHERE a LIKE 'ai%'")
        assert connection.execute("SELECT count(*) FROM c").fetchone() == (3,)


class Euro(InstantGenerator):
    """Answers with a character that LATIN1 lacks."""

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        async for event in super().stream(prepared):
            yield replace(event, text=event.text and "10 €")


def test_an_answer_that_the_database_can_not_hold(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    dsn = postgres.dsn.replace("dbname=app", "dbname=latin")
    asyncio.run(install(dsn))
    with (
        running_relay(dsn, attendants(Euro())) as relay,
        psycopg.connect(relay.dsn, dbname="latin", autocommit=True) as connection,
    ):
        for _ in range(2):
            with pytest.raises(psycopg.errors.UntranslatableCharacter):
                connection.execute("SELECT ai_generate('price?')")
        assert connection.execute("SELECT 1").fetchone() == (1,)
    with (
        running_relay(dsn, attendants(InstantGenerator())) as relay,
        psycopg.connect(relay.dsn, dbname="latin", autocommit=True) as connection,
    ):
        row = connection.execute("SELECT ai_generate('né'), 'é'").fetchone()
        assert row == (answer_text("né"), "é")
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute("DROP DATABASE latin WITH (FORCE)")


def test_a_database_without_the_schema(postgres: PostgresServer, ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, dbname="postgres", autocommit=True) as connection:
        for _ in range(2):
            with pytest.raises(psycopg.errors.FeatureNotSupported) as refused:
                connection.execute("SELECT ai_generate('x')")
            assert "tierkv postgres-sql" in refused.value.diag.message_hint
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_large_texts(ai_relay: RunningRelay, generator: InstantGenerator) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT ai_generate(repeat('x', 15000) || i), repeat('y', 200000) "
            "FROM generate_series(1, 100) i"
        ).fetchall()
        assert [row[0] for row in rows] == [
            answer_text("x" * 15000 + str(i)) for i in range(1, 101)
        ]
        assert all(len(row[1]) == 200_000 for row in rows)
        text = "SELECT ai_generate('x') -- " + "." * (1 << 20)
        assert connection.execute(text).fetchone() == (answer_text("x"),)


def test_notifications_during_a_statement(ai_relay: RunningRelay) -> None:
    with (
        psycopg.connect(ai_relay.dsn, autocommit=True) as connection,
        psycopg.connect(ai_relay.dsn, autocommit=True) as other,
    ):
        connection.execute("LISTEN news")
        for number in range(20):
            other.execute(f"NOTIFY news, '{number}'")
            connection.execute("SELECT ai_generate('x')")
        told = [n.payload for n in connection.notifies(timeout=20, stop_after=20)]
        assert told == [str(number) for number in range(20)]


def test_dump_and_restore(ai_relay: RunningRelay) -> None:
    done = subprocess.run(
        ["pg_dump", "-t", "docs"], env=ai_relay.environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "COPY public.docs" in done.stdout, done.stderr


def bind(portal: bytes, name: bytes, *values: bytes) -> bytes:
    cells = b"".join(len(v).to_bytes(4, "big") + v for v in values)
    count = len(values).to_bytes(2, "big")
    return messages.framed(b"B", portal, b"\0", name, b"\0\0\0", count, cells, b"\0\0")


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_batches_in_any_pieces(ai_relay: RunningRelay, seed: int | None) -> None:
    rng = None if seed is None else random.Random(seed)
    raw = RawClient(ai_relay.dsn)
    call = b"SELECT ai_generate($1) FROM generate_series(1, 3)"
    answer = str(answer_text("q")).encode()
    try:
        raw.say(
            messages.parse(b"plain", b"SELECT 1")
            + bind(b"p", b"plain")
            + messages.execute(b"p")
            + messages.parse(b"", call)
            + bind(b"", b"", b"q")
            + messages.framed(b"D", b"P\0")
            + messages.execute(b"", 2)
            + messages.execute(b"", 2)
            + messages.SYNC
            + bind(b"", b"", b"q")  # the unnamed statement is still there
            + messages.execute(b"")
            + messages.SYNC
            + messages.query(b"SELECT 2")
            + bind(b"", b"", b"q")  # and now it is not
            + messages.execute(b"")
            + messages.SYNC,
            rng,
        )
        frames = raw.hear(4)
        kinds = "".join(kind for kind, _ in frames)
        assert kinds == "12DC12TDDsDCZ2DDDCZTDCZEZ"
        values = [body[6:] for kind, body in frames if kind == "D"]
        assert values == [b"1"] + [answer] * 6 + [b"2"]
        [error] = [body for kind, body in frames if kind == "E"]
        assert b"C26000\0" in error
        assert frames[-1] == ("Z", b"I")
    finally:
        raw.close()


BATCHES_WITHOUT_SYNC = (
    ("P selec", "Q SELECT {}"),
    ("P selec", "P SELECT {}", "Q SELECT 4"),
    ("P selec", "Q SELECT 5", "Q SELECT {}"),
    ("P SELECT {}, nothing", "Q SELECT {}"),
    ("P SELECT {}", "Q SELECT {}"),
)


@pytest.mark.parametrize("said", BATCHES_WITHOUT_SYNC)
def test_a_query_before_the_sync_is_answered_as_postgres_does(
    ai_relay: RunningRelay, postgres: PostgresServer, said: tuple[str, ...]
) -> None:
    """After an error PostgreSQL reads nothing but the Sync, not even a query."""

    def heard(dsn: str, call: str) -> list[str]:
        raw = RawClient(dsn)
        try:
            for each in said:
                text = each[2:].replace("{}", call).encode()
                raw.say(messages.query(text) if each[0] == "Q" else messages.parse(b"", text))
            raw.say(messages.SYNC)
            kinds = "".join(kind for kind, _ in raw.hear(2 if said[0] == "P SELECT {}" else 1))
            raw.say(messages.query(f"SELECT {call}".encode()))
            return [kinds, "".join(kind for kind, _ in raw.hear(1))]
        finally:
            raw.close()

    assert heard(ai_relay.dsn, "ai_generate('x')") == heard(postgres.dsn, "lower('x')")


def test_a_parse_whose_name_does_not_end_is_refused(ai_relay: RunningRelay) -> None:
    raw = RawClient(ai_relay.dsn)
    raw.say(messages.framed(b"P", b"no end"))
    heard = b""
    while piece := raw.socket.recv(65536):
        heard += piece
    assert b"C08P01\0" in heard
    raw.close()


def test_transactions_inside_a_batch(ai_relay: RunningRelay) -> None:
    raw = RawClient(ai_relay.dsn)

    def run(text: bytes) -> bytes:
        return messages.parse(b"", text) + bind(b"", b"") + messages.execute(b"")

    try:
        raw.say(
            run(b"BEGIN")
            + run(b"CREATE TEMP TABLE kept (a text)")
            + run(b"INSERT INTO kept SELECT ai_generate('in a block')")
            + messages.SYNC
        )
        assert raw.hear(1)[-1] == ("Z", b"T")
        raw.say(
            run(b"INSERT INTO kept SELECT ai_generate('again')")
            + run(b"COMMIT")
            + run(b"INSERT INTO kept SELECT ai_generate('third')")
            + messages.SYNC
        )
        frames = raw.hear(1)
        assert frames[-1] == ("Z", b"I") and "E" not in {kind for kind, _ in frames}
        raw.say(
            run(b"INSERT INTO kept SELECT ai_generate('own block')") + run(b"BEGIN") + messages.SYNC
        )
        assert raw.hear(1)[-1] == ("Z", b"T")
        raw.say(messages.query(b"ROLLBACK"))
        raw.hear(1)
        raw.say(
            run(b"SELECT 1")
            + run(b"SELECT ai_generate('x')")
            + run(b"SELECT 1/0")
            + run(b"SELECT ai_generate('y')")
            + messages.SYNC
        )
        frames = raw.hear(1)
        assert [kind for kind, _ in frames].count("E") == 1 and frames[-1] == ("Z", b"I")
        raw.say(run(b"SELECT ai_generate()") + run(b"SELECT 1") + messages.SYNC)
        assert "".join(kind for kind, _ in raw.hear(1)) == "EZ"
        raw.say(
            run(b"INSERT INTO kept SELECT ai_generate('kept')")
            + run(b"SAVEPOINT s")
            + run(b"ROLLBACK TO s")
            + run(b"INSERT INTO kept SELECT ai_generate('too')")
            + messages.SYNC
        )
        assert raw.hear(1)[-1] == ("Z", b"I")
        raw.say(messages.query(b"DELETE FROM kept WHERE ctid IN (SELECT ctid FROM kept OFFSET 3)"))
        assert ("C", b"DELETE 2\0") in raw.hear(1)
        raw.say(messages.query(b"SELECT count(*) FROM kept"))
        counted = [body[6:] for kind, body in raw.hear(1) if kind == "D"]
        assert counted == [b"3"]
    finally:
        raw.close()


@pytest.mark.parametrize(
    "text",
    [
        "SELECT v, ai_generate('x') FROM counters WHERE id = 1 FOR NO KEY UPDATE",
        "SELECT v, ai_generate('x') FROM counters WHERE id = 1 FOR /* all */\nUPDATE",
        "SELECT v, ai_generate('x') FROM counters WHERE id = 1 FOR  KEY SHARE",
        "SELECT ai_generate('x'); UPDATE counters SET v = v + 1 WHERE id = 1 RETURNING v",
        None,
    ],
)
def test_rows_that_others_change_are_waited_for(
    ai_relay: RunningRelay, postgres: PostgresServer, text: str | None
) -> None:
    """A snapshot of the rounds must not reach what the client writes or locks: no 40001."""
    with psycopg.connect(postgres.dsn, autocommit=True) as other:
        other.execute("DROP TABLE IF EXISTS counters; CREATE TABLE counters (id int, v int)")
        other.execute("INSERT INTO counters VALUES (1, 0)")

        class Changing(InstantGenerator):
            async def prepare(
                self, call: TextCall, ahead: EncodedAhead | None = None
            ) -> PreparedCall:
                other.execute("UPDATE counters SET v = 10")
                return await super().prepare(call)

        with (
            running_relay(postgres.dsn, attendants(Changing())) as relay,
            psycopg.connect(relay.dsn, autocommit=True) as connection,
        ):
            _run_beside_a_change(connection, text)


def _run_beside_a_change(connection: psycopg.Connection, text: str | None) -> None:
    if text is None:
        with connection.pipeline():
            connection.execute("SELECT ai_generate('x')")
            cursor = connection.execute("UPDATE counters SET v = v + 1 RETURNING v")
    else:
        cursor = psycopg.ClientCursor(connection).execute(text)
        cursor.nextset()
    # A locked row is read as the other session left it, after as many rounds as that takes.
    assert cursor.fetchall() in ([(11,)], [(10, answer_text("x"))])


def test_void_parameters_are_dropped_as_postgresql_does(ai_relay: RunningRelay) -> None:
    """What pgJDBC sends for ``{ ? = call ai_generate(?) }``."""
    text = b"select * from ai_generate($1,$2) as result"
    types = struct.pack("!HII", 2, 2278, 25)
    values = struct.pack("!HHiI", 0, 2, -1, 1) + b"x" + struct.pack("!H", 0)
    client = RawClient(ai_relay.dsn)
    try:
        client.say(
            messages.framed(b"P", b"\0", text, b"\0", types)
            + messages.framed(b"B", b"\0", b"\0", values)
            + messages.execute(b"")
            + messages.SYNC
        )
        frames = client.hear(1)
    finally:
        client.close()
    assert [kind for kind, _ in frames] == ["1", "2", "D", "C", "Z"]
    assert (answer_text("x") or "").encode() in frames[2][1]


def test_a_session_that_left_is_not_shown(ai_relay: RunningRelay) -> None:
    with psycopg.connect(ai_relay.dsn, autocommit=True) as connection:
        for _ in range(3):
            with psycopg.connect(ai_relay.dsn) as gone:
                gone.execute("SELECT ai_generate('x')")
        while len(ai_relay.server.sessions) > 1:
            connection.execute("SELECT 1")
        rows = connection.execute("SELECT pid FROM tierkv.stat_activity").fetchall()
        assert rows == [(connection.info.backend_pid,)]
