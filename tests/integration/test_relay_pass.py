"""The relay without AI calls: what PostgreSQL can do, a client can do through it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest
from psycopg import sql

from tests.fix_postgres import (
    PASSWORD,
    USER,
    PostgresServer,
    RunningRelay,
    running_relay,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def relay(postgres: PostgresServer) -> Iterator[RunningRelay]:
    with running_relay(postgres.dsn) as running:
        yield running


@pytest.fixture
def connection(relay: RunningRelay) -> Iterator[psycopg.Connection]:
    with psycopg.connect(relay.dsn, autocommit=True) as connection:
        yield connection


def psql(relay: RunningRelay, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["psql", "-X", "-v", "ON_ERROR_STOP=1", *arguments],
        env=relay.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_login_is_postgresql_s_own(relay: RunningRelay) -> None:
    with psycopg.connect(relay.dsn) as connection:
        assert connection.info.parameter_status(
            "server_version",
        ).startswith("1")
        assert connection.execute("SELECT current_user, version()").fetchone()[0] == USER
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(relay.dsn.replace(PASSWORD, "wrong"))
    with pytest.raises(psycopg.OperationalError, match='database "nowhere" does not exist'):
        psycopg.connect(relay.dsn, dbname="nowhere")


def test_settings_are_transactional(connection: psycopg.Connection) -> None:
    def shown() -> str:
        return connection.execute("SHOW tierkv.max_calls").fetchone()[0]

    assert shown() == "1000"
    with connection.transaction(force_rollback=True):
        connection.execute("SET tierkv.max_calls = 5")
        assert shown() == "5"
    assert shown() == "1000"
    with connection.transaction():
        connection.execute("SET LOCAL tierkv.max_calls = 6")
        assert shown() == "6"
    assert shown() == "1000"
    connection.execute("SET tierkv.max_calls = 7")
    connection.execute("DISCARD ALL")
    assert shown() == "1000"


def test_settings_in_options_win_over_defaults(relay: RunningRelay) -> None:
    with psycopg.connect(relay.dsn, options="-c tierkv.max_calls=12") as connection:
        assert connection.execute("SHOW tierkv.max_calls").fetchone()[0] == "12"


def test_psql_shows_the_catalogue(relay: RunningRelay) -> None:
    script = "DROP TABLE IF EXISTS shown; CREATE TABLE shown (id int PRIMARY KEY, t text)"
    assert psql(relay, "-c", script).returncode == 0
    for command, expected in (
        ("\\l", "app"),
        ("\\d shown", "shown_pkey"),
        ("\\dt", "shown"),
        ("\\df upper", ""),
        ("\\du", USER),
    ):
        done = psql(relay, "-c", command)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    copied = subprocess.run(
        ["psql", "-X", "-c", "\\copy shown FROM STDIN", "-c", "\\copy shown TO STDOUT"],
        input="1\tone\n2\ttwo\n", env=relay.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert copied.stdout == "COPY 2\n1\tone\n2\ttwo\n"
    failed = psql(relay, "-c", "SELECT 1 FROM nothing")
    assert "LINE 1: SELECT 1 FROM nothing" in failed.stderr


def test_a_large_result_is_whole(connection: psycopg.Connection) -> None:
    rows = connection.execute("SELECT i, repeat('x', i % 50) FROM generate_series(1, 200000) i")
    assert sum(row[0] + len(row[1]) for row in rows) == sum(i + i % 50 for i in range(1, 200_001))
    [(wide,)] = connection.execute("SELECT repeat('ü', 5000000)").fetchall()
    assert wide == "ü" * 5_000_000


def test_copy_both_ways(connection: psycopg.Connection) -> None:
    connection.execute("CREATE TEMP TABLE copied (id int, t text)")
    with connection.cursor().copy("COPY copied FROM STDIN") as copy:
        for i in range(50_000):
            copy.write_row((i, f"text ai_generate( {i}"))
    with connection.cursor().copy("COPY copied TO STDOUT") as copy:
        rows = list(copy.rows())
    assert rows[49_999] == ("49999", "text ai_generate( 49999")
    with pytest.raises(psycopg.DataError), connection.cursor().copy("COPY copied FROM STDIN") as c:
        c.write("not a number\tx\n")
    assert connection.execute("SELECT count(*) FROM copied").fetchone() == (50_000,)


def test_transactions_savepoints_and_cursors(connection: psycopg.Connection) -> None:
    connection.execute("CREATE TEMP TABLE t (id int)")
    with connection.transaction():
        connection.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
            connection.execute("INSERT INTO t VALUES (2)")
            connection.execute("SELECT 1 / 0")
        with connection.cursor("named") as cursor:
            cursor.itersize = 10
            cursor.execute("SELECT * FROM generate_series(1, 95)")
            assert len(list(cursor)) == 95
    assert connection.execute("SELECT array_agg(id) FROM t").fetchone() == ([1],)


def test_pipelines(connection: psycopg.Connection) -> None:
    with connection.pipeline():
        cursors = [connection.execute("SELECT %s::int", (i,)) for i in range(500)]
    assert [cursor.fetchone()[0] for cursor in cursors] == list(range(500))
    with pytest.raises(psycopg.errors.DivisionByZero), connection.pipeline():
        connection.execute("SELECT 1 / 0")
        connection.execute("SELECT 2")
    assert connection.execute("SELECT 3").fetchone() == (3,)


def test_notifications_pass(relay: RunningRelay, connection: psycopg.Connection) -> None:
    connection.execute("LISTEN news")
    with psycopg.connect(relay.dsn, autocommit=True) as other:
        other.execute("NOTIFY news, 'hello'")
    [notify] = list(connection.notifies(timeout=20, stop_after=1))
    assert (notify.channel, notify.payload) == ("news", "hello")


async def test_asyncpg(relay: RunningRelay) -> None:
    connection = await asyncpg.connect(
        host="127.0.0.1", port=relay.port, user=USER, password=PASSWORD, database="app"
    )
    await connection.execute("CREATE TEMP TABLE a (id int, t text, d float8[])")
    await connection.executemany(
        "INSERT INTO a VALUES ($1, $2, $3)", [(i, str(i), [0.5, i]) for i in range(1000)]
    )
    row = await connection.fetchrow("SELECT sum(id) AS s, max(d) AS d FROM a")
    assert row["s"] == 499_500 and row["d"] == [0.5, 999.0]
    await connection.copy_records_to_table("a", records=[(1, "x", [])])
    async with connection.transaction():
        values = [row["id"] async for row in connection.cursor("SELECT id FROM a ORDER BY id")]
    assert len(values) == 1001
    await connection.close()


def test_cancel_stops_the_engine(relay: RunningRelay) -> None:
    with psycopg.connect(relay.dsn, autocommit=True) as connection:
        watched = threading.Thread(target=_cancel_when_running, args=(relay, connection))
        watched.start()
        with pytest.raises(psycopg.errors.QueryCanceled, match="user request"):
            connection.execute("SELECT pg_sleep(60)")
        watched.join()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def _cancel_when_running(relay: RunningRelay, connection: psycopg.Connection) -> None:
    pid = connection.info.backend_pid
    with psycopg.connect(relay.dsn, autocommit=True) as other:
        running = sql.SQL(
            "SELECT 1 FROM pg_stat_activity WHERE pid = {} AND query ~ 'pg_sleep' "
            "AND wait_event = 'PgSleep'"
        )
        while other.execute(running.format(pid)).fetchone() is None:
            pass
    connection.cancel_safe()


def test_a_lost_backend_is_told_in_postgresql_s_words(relay: RunningRelay) -> None:
    with (
        psycopg.connect(relay.dsn, autocommit=True) as other,
        psycopg.connect(relay.dsn, autocommit=True) as connection,
    ):
        other.execute("SELECT pg_terminate_backend(%s, 20000)", (connection.info.backend_pid,))
        with pytest.raises(psycopg.errors.AdminShutdown):
            connection.execute("SELECT 1")
        assert other.execute("SELECT 1").fetchone() == (1,)


def test_many_clients_at_once(relay: RunningRelay) -> None:
    done = subprocess.run(
        ["pgbench", "-i", "-s", "1", "-q"], env=relay.environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        ["pgbench", "-S", "-c", "8", "-t", "200", "-M", "prepared", "-n"],
        env=relay.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "number of transactions actually processed: 1600/1600" in done.stdout
