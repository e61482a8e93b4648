"""psycopg 3 against the real SQL server: the whole extended protocol as a driver uses it."""

from __future__ import annotations

import datetime as dt
import struct
import threading
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.fix_pgwire import RunningServer, running_pgwire

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture
def conn(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, name VARCHAR)")
        yield connection


VALUES = [
    (True, "BOOLEAN"),
    (-5, "SMALLINT"),
    (2**40, "BIGINT"),
    (10**30, "HUGEINT"),
    (1.25, "DOUBLE"),
    (Decimal("-12.340"), "DECIMAL(18,3)"),
    ("naïve 'text' \\ ☃", "VARCHAR"),
    (b"\x00\xff\\", "BLOB"),
    (dt.date(1999, 12, 31), "DATE"),
    (dt.time(23, 59, 58, 123), "TIME"),
    (dt.datetime(2024, 2, 29, 1, 2, 3, 456), "TIMESTAMP"),
    (dt.timedelta(days=3, seconds=5, microseconds=7), "INTERVAL"),
    (uuid.UUID(int=2**100 + 7), "UUID"),
    (dt.datetime(2024, 2, 29, 1, 2, 3, 456, tzinfo=dt.UTC), "TIMESTAMPTZ"),
    ([1, None, 3], "INTEGER[]"),
    ([Decimal("1.50"), None], "DECIMAL(10,2)[]"),
    ([b"\0\\", None], "BLOB[]"),
    ([uuid.UUID(int=3)], "UUID[]"),
    ([dt.date(2024, 2, 29), None], "DATE[]"),
    ([dt.timedelta(days=2, seconds=1)], "INTERVAL[]"),
    ([True, None, False], "BOOLEAN[]"),
    ([1.5, float("inf")], "DOUBLE[]"),
    (["a", 'b "q"', None, "", "x,y"], "VARCHAR[]"),
]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(("value", "type_name"), VALUES)
def test_a_value_survives_the_trip(
    conn: psycopg.Connection, value: object, type_name: str, binary: bool
) -> None:
    row = conn.execute(f"SELECT CAST(%s AS {type_name}) AS x", [value], binary=binary).fetchone()
    assert row == (value,)


@pytest.mark.parametrize("value", [v for v, t in VALUES if t not in ("HUGEINT",)])
def test_a_bare_parameter_keeps_its_type(conn: psycopg.Connection, value: object) -> None:
    row = conn.execute("SELECT %b AS x", [value]).fetchone()
    assert row == (value,)


@pytest.mark.parametrize("binary", [False, True])
def test_json_and_nested_types_come_back(conn: psycopg.Connection, binary: bool) -> None:
    row = conn.execute(
        "SELECT %s::JSON, {'a': 1, 'b': [1, 2]}, MAP {'k': 1}, [[1], [2, 3]]",
        [Jsonb({"a": [1, None]})],
        binary=binary,
    ).fetchone()
    assert row == ({"a": [1, None]}, {"a": 1, "b": [1, 2]}, {"k": 1}, [[1], [2, 3]])


def test_integer_parameters_do_not_overflow_like_smallint(conn: psycopg.Connection) -> None:
    assert conn.execute("SELECT %s * 1000", [100]).fetchone() == (100_000,)


def test_executemany_returning_and_rowcount(conn: psycopg.Connection) -> None:
    with conn.cursor() as cursor:
        cursor.executemany("INSERT INTO t VALUES (%s, %s)", [(i, f"n{i}") for i in range(20)])
        assert cursor.rowcount == 20
        cursor.execute("INSERT INTO t VALUES (%s, %s) RETURNING id, name", [99, None])
        assert cursor.fetchall() == [(99, None)]
        cursor.execute("SELECT name FROM t WHERE id = %s", ["3"])
        assert cursor.fetchall() == [("n3",)]


def test_prepared_statements_are_reused_and_dropped(conn: psycopg.Connection) -> None:
    for number in range(10):
        row = conn.execute("SELECT %s + 1", [number], prepare=True).fetchone()
        assert row == (number + 1,)
    conn.execute("DEALLOCATE ALL")
    conn.prepare_threshold = None
    conn.execute("DISCARD ALL")
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_transaction_error_then_rollback(server: RunningServer, conn: psycopg.Connection) -> None:
    with psycopg.connect(server.dsn) as other:
        other.execute("INSERT INTO t VALUES (1, 'a')")
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            other.execute("INSERT INTO t VALUES (1, 'again')")
        assert caught.value.sqlstate == "23505"
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            other.execute("SELECT 1")
        assert other.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        other.rollback()
        assert other.execute("SELECT count(*) FROM t").fetchone() == (0,)
        other.execute("INSERT INTO t VALUES (2, 'kept')")
    assert conn.execute("SELECT * FROM t").fetchall() == [(2, "kept")]


def test_syntax_error_carries_state_and_position(conn: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.SyntaxError) as caught:
        conn.execute("SELECT 1 +* 2 FROM")
    assert caught.value.diag.statement_position is not None
    with pytest.raises(psycopg.errors.UndefinedTable):
        conn.execute("SELECT * FROM nowhere")
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_several_statements_are_one_transaction(conn: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO t VALUES (1, 'a'); INSERT INTO t VALUES (1, 'b')")
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (0,)
    cursor = conn.execute("INSERT INTO t VALUES (1, 'a'); SELECT 7")
    assert cursor.statusmessage == "INSERT 0 1"
    assert cursor.nextset()
    assert cursor.fetchall() == [(7,)]


def test_pipeline_is_one_transaction_up_to_its_sync(conn: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation), conn.pipeline():
        conn.execute("INSERT INTO t VALUES (1, 'a')")
        conn.execute("INSERT INTO t VALUES (1, 'b')")
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (0,)
    with conn.pipeline():
        conn.execute("INSERT INTO t VALUES (1, 'a')")
        cursor = conn.execute("SELECT count(*) FROM t")
        assert cursor.fetchone() == (1,)
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (1,)


def test_copy_in_and_out(conn: psycopg.Connection) -> None:
    rows = [(1, "plain"), (2, None), (3, "tab\tnewline\nback\\slash"), (4, "")]
    with conn.cursor() as cursor:
        with cursor.copy("COPY t (id, name) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        assert cursor.rowcount == 4
        with cursor.copy("COPY (SELECT * FROM t ORDER BY id) TO STDOUT") as copy:
            copy.set_types(["int4", "text"])
            assert list(copy.rows()) == rows
        with cursor.copy("COPY (SELECT %s + 1) TO STDOUT WITH (FORMAT csv)", [41]) as copy:
            assert b"".join(map(bytes, copy)) == b"42\n"
    assert conn.execute("SELECT * FROM t ORDER BY id").fetchall() == rows


def test_failed_copy_loads_nothing(conn: psycopg.Connection) -> None:
    with (
        pytest.raises(psycopg.errors.BadCopyFileFormat),
        conn.cursor() as cursor,
        cursor.copy("COPY t FROM STDIN") as copy,
    ):
        copy.write("1\tone\n")
        copy.write("2\n" * 20_000)
        copy.write("3\tthree\n" * 20_000)
    with (
        pytest.raises(ZeroDivisionError),  # psycopg sends CopyFail
        conn.cursor() as cursor,
        cursor.copy("COPY t FROM STDIN") as copy,
    ):
        copy.write("1\tone\n")
        raise ZeroDivisionError
    assert conn.execute("SELECT count(*) FROM t").fetchone() == (0,)


SLOW = "SELECT count(*) FROM range(200000) a, range(200000) b WHERE hash(a.range, b.range) = 1"


def test_cancel_from_another_thread(conn: psycopg.Connection) -> None:
    # Not cancel(): it blocks in libpq holding the GIL, and the server is in this process.
    timer = threading.Timer(0.2, conn.cancel_safe)
    timer.start()
    with pytest.raises(psycopg.errors.QueryCanceled):
        conn.execute(SLOW)
    timer.join()
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_statement_timeout(conn: psycopg.Connection) -> None:
    conn.execute("SET statement_timeout = '100ms'")
    with pytest.raises(psycopg.errors.QueryCanceled, match="statement timeout"):
        conn.execute(SLOW)
    conn.execute("RESET statement_timeout")
    assert conn.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_hanging_up_stops_the_statement(server: RunningServer) -> None:
    connection = psycopg.connect(server.dsn, autocommit=True)
    connection.pgconn.send_query(SLOW.encode())
    connection.close()
    waited = threading.Event()
    for _ in range(200):
        if server.server.connections == 0:
            break
        waited.wait(0.05)
    assert server.server.connections == 0


def test_streaming_and_large_results(conn: psycopg.Connection) -> None:
    with conn.cursor() as cursor:
        total = sum(row[0] for row in cursor.stream("SELECT range FROM range(50000)"))
    assert total == sum(range(50_000))
    big = conn.execute("SELECT repeat('x', 3000000)").fetchone()
    assert big is not None
    assert len(big[0]) == 3_000_000


def test_named_cursor(server: RunningServer) -> None:
    with (
        psycopg.connect(server.dsn) as connection,
        connection.cursor("walk", scrollable=True) as cursor,
    ):
        cursor.execute("SELECT range AS n FROM range(%s)", [10])
        assert cursor.fetchmany(3) == [(0,), (1,), (2,)]
        cursor.scroll(2)
        assert cursor.fetchone() == (5,)
        assert cursor.fetchall() == [(6,), (7,), (8,), (9,)]


class AsText(psycopg.adapt.Loader):
    def load(self, data: object) -> str:
        return bytes(data).decode()  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT INTERVAL '1 year 2 months 3 days 04:05:06'", "1 year 2 mons 3 days 04:05:06"),
        ("SELECT x FROM (VALUES (INTERVAL '-1 month')) t(x) ORDER BY x", "-1 mons"),
        ("SELECT * FROM (SELECT INTERVAL '1 month' AS x, 1 AS x)", "1 mon"),
        ("SELECT nextval('turns') * INTERVAL '1 month'", "1 mon"),
        ("INSERT INTO waits VALUES (INTERVAL '2 months', 5) RETURNING *", "2 mons"),
        ("UPDATE waits SET n = 6 RETURNING waits.x AS y, n + 1", "2 mons"),
        ("DELETE FROM waits RETURNING x, 'a, b'", "2 mons"),
        ("WITH w AS (SELECT [INTERVAL '1 month', NULL] AS a) SELECT a FROM w", '{"1 mon",NULL}'),
        ("SELECT {'a': INTERVAL '1 month', 'b b': [1]}", {"a": "1 mon", "b b": [1]}),
    ],
)
def test_months_stay_months(server: RunningServer, sql: str, expected: Any) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for oid in (1186, 1187):
            connection.adapters.register_loader(oid, AsText)
        connection.execute("CREATE OR REPLACE SEQUENCE turns")
        connection.execute("CREATE OR REPLACE TABLE waits (x INTERVAL, n INTEGER)")
        connection.execute("INSERT INTO waits VALUES (INTERVAL '2 months', 4)")
        row = connection.execute(sql).fetchone()
        assert row is not None
        assert row[0] == expected
        if "nextval" in sql:
            assert connection.execute("SELECT nextval('turns')").fetchone() == (2,)


def test_months_stay_months_in_binary(conn: psycopg.Connection) -> None:
    row = conn.execute("SELECT INTERVAL '14 months 3 days' = %b", [dt.timedelta(1)]).fetchone()
    assert row == (False,)
    result = conn.pgconn.exec_params(
        b"SELECT INTERVAL '14 months 3 days 1 second'", None, result_format=1
    )
    assert result.get_value(0, 0) == struct.pack("!qii", 1_000_000, 3, 14)


def test_a_cursor_held_over_the_transaction(server: RunningServer) -> None:
    with psycopg.connect(server.dsn) as connection:
        connection.execute("DECLARE kept CURSOR WITH HOLD FOR SELECT range FROM range(5)")
        connection.commit()
        assert connection.execute("FETCH 2 FROM kept").fetchall() == [(0,), (1,)]
        assert connection.execute("MOVE FORWARD 1 FROM kept").statusmessage == "MOVE 1"
        assert connection.execute("FETCH ALL kept").fetchall() == [(3,), (4,)]
        connection.execute("DECLARE lost CURSOR WITH HOLD FOR SELECT 1")
        connection.rollback()
        with pytest.raises(psycopg.errors.InvalidCursorName):
            connection.execute("FETCH lost")
        connection.rollback()
        connection.execute("CLOSE kept")
        with pytest.raises(psycopg.errors.InvalidCursorName):
            connection.execute("CLOSE kept")


@pytest.mark.parametrize("sql", ["LISTEN a", "NOTIFY a, 'b'", "SELECT pg_notify('a', 'b')"])
def test_notifications_are_refused(conn: psycopg.Connection, sql: str) -> None:
    with pytest.raises(psycopg.Error, match="LISTEN and NOTIFY are not supported"):
        conn.execute(sql)
    assert conn.execute("UNLISTEN *").statusmessage == "UNLISTEN"


def test_commands_that_change_nothing_answer_as_postgres(conn: psycopg.Connection) -> None:
    assert conn.execute("FORCE CHECKPOINT").statusmessage == "CHECKPOINT"
    conn.execute("SET standard_conforming_strings = on")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="always on"):
        conn.execute("SET standard_conforming_strings = off")


@pytest.mark.parametrize("sql", ["SELECT $1::text", "SELECT $1"])
def test_text_can_not_hold_a_nul(conn: psycopg.Connection, sql: str) -> None:
    result = conn.pgconn.exec_params(sql.encode(), [b"a\0b"], param_formats=[1])
    assert result.error_field(psycopg.pq.DiagnosticField.SQLSTATE) == b"22021"
    assert conn.execute("SELECT 1").fetchone() == (1,)


def test_settings_and_session_facts(conn: psycopg.Connection) -> None:
    assert conn.info.server_version == 160000
    assert conn.info.parameter_status("TimeZone") is not None
    conn.execute("SET application_name TO 'reports'")
    assert conn.info.parameter_status("application_name") == "reports"
    row = conn.execute("SELECT current_user, pg_backend_pid(), version()").fetchone()
    assert row is not None
    assert row[:2] == ("alice", conn.info.backend_pid)
    assert row[2].startswith("PostgreSQL 16.0")
    with conn.transaction():
        conn.execute("SET LOCAL statement_timeout = 5000")
        assert conn.execute("SHOW statement_timeout").fetchone() == ("5000",)
    assert conn.execute("SHOW statement_timeout").fetchone() == ("0",)
    config = conn.execute("SELECT set_config('application_name', 'x', false)")
    assert config.fetchone() == ("x",)
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        conn.execute("SET client_encoding TO 'LATIN1'")


def test_type_introspection(conn: psycopg.Connection) -> None:
    info = psycopg.types.TypeInfo.fetch(conn, "uuid")
    assert info is not None
    assert (info.oid, info.array_oid) == (2950, 2951)
    row = conn.execute("SELECT 't'::regclass::oid = c.oid FROM pg_class c WHERE relname = 't'")
    assert row.fetchone() == (True,)
    described = conn.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a "
        "WHERE a.attrelid = 't'::regclass ORDER BY a.attnum"
    )
    assert described.fetchall() == [("id", "integer"), ("name", "text")]


def test_identifiers_are_quoted(conn: psycopg.Connection) -> None:
    name = sql.Identifier('odd "name; --')
    conn.execute(sql.SQL("CREATE OR REPLACE TABLE {} (a INT)").format(name))
    copying = sql.SQL("COPY {} FROM STDIN").format(name)
    with conn.cursor() as cursor, cursor.copy(copying) as copy:
        copy.write_row([5])
    row = conn.execute(sql.SQL("SELECT * FROM {}").format(name)).fetchone()
    assert row == (5,)


def test_show_all_lists_our_settings_too(conn: psycopg.Connection) -> None:
    conn.execute("SET tierkv.on_error = 'error'")
    shown = {row[0]: row[1] for row in conn.execute("SHOW ALL").fetchall()}
    assert shown["server_encoding"] == "UTF8"
    assert shown["tierkv.on_error"] == "error"


def test_an_admin_view_takes_parameters_at_once(conn: psycopg.Connection) -> None:
    pid = conn.info.backend_pid
    asked = conn.execute("SELECT state FROM tierkv.stat_activity WHERE pid = %s", (pid,))
    assert asked.fetchall() == [("active",)]


def test_pg_cancel_backend_takes_the_pid_a_client_knows(conn: psycopg.Connection) -> None:
    assert conn.execute("SELECT pg_cancel_backend(%s)", (987654,)).fetchone() == (False,)
    with psycopg.connect(conn.info.dsn, autocommit=True) as other:
        cancel = "SELECT pg_cancel_backend(%s)"
        assert other.execute(cancel, (conn.info.backend_pid,)).fetchone() == (True,)
    assert conn.execute("SELECT 1").fetchone() == (1,)
