"""What clients see on the wire, side by side with a real PostgreSQL: types of open parameters,
answers to them, COPY's bytes.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import psycopg
import pytest
from psycopg import generators, pq

from tests.fix_pgwire import RunningServer, running_pgwire
from tests.fix_postgres import PASSWORD, USER, PostgresServer, RawClient
from tierkv.dbfront.postgres.wire import messages
from tierkv.sql.settings import SETTINGS

pytestmark = pytest.mark.integration

GOLDEN = Path(__file__).parents[1] / "golden"
OPEN_PARAMETERS = (GOLDEN / "open_parameters.sql").read_text().splitlines()
UNNAMED_COLUMNS = (GOLDEN / "unnamed_columns.sql").read_text().splitlines()
TABLE = """
DROP TABLE IF EXISTS t;
CREATE TABLE t (
  id int PRIMARY KEY, n bigint, x text, f float8, d numeric(10,2), b bool, day date, ts timestamp,
  z timestamptz, tags text[], nums int[], j json, u uuid, s smallint, r real, iv interval,
  v varchar(20)
);
INSERT INTO t (id, n, x, d, ts, nums, tags) VALUES
  (1, 10, 'a', 1.5, '2024-01-02', array[4,5], array['p']),
  (2, 20, 'b', 2.5, '2024-01-03', array[6], array['q']),
  (3, 30, 'c', 3.5, '2024-01-04', array[]::int[], array['p', 'q']);
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        with psycopg.connect(running.dsn, autocommit=True) as connection:
            connection.execute(TABLE)
        yield running


def shape_of(connection: psycopg.Connection[Any], sql: str) -> pq.abc.PGresult:
    """What Describe answers."""
    pgconn = connection.pgconn
    pgconn.send_prepare(b"", sql.encode())
    [prepared] = connection.wait(generators.execute(pgconn))
    assert not prepared.error_message, (sql, prepared.error_message)
    pgconn.send_describe_prepared(b"")
    [shape] = connection.wait(generators.execute(pgconn))
    assert not shape.error_message, (sql, shape.error_message)
    return shape


def described(connection: psycopg.Connection[Any], sql: str) -> list[int]:
    """OIDs of ParameterDescription."""
    shape = shape_of(connection, sql)
    return [shape.param_type(at) for at in range(shape.nparams)]


def names(connection: psycopg.Connection[Any], sql: str) -> list[bytes | None]:
    """Column names of RowDescription."""
    shape = shape_of(connection, sql)
    return [shape.fname(at) for at in range(shape.nfields)]


def test_types_are_described_as_postgres_describes_them(
    server: RunningServer, postgres: PostgresServer
) -> None:
    with (
        psycopg.connect(postgres.dsn, autocommit=True) as real,
        psycopg.connect(server.dsn, autocommit=True) as ours,
    ):
        real.execute(TABLE)
        differ = [
            (sql, wanted, got)
            for sql in OPEN_PARAMETERS
            if (wanted := described(real, sql)) != (got := described(ours, sql))
        ]
    assert differ == []


def test_columns_are_named_as_postgres_names_them(
    server: RunningServer, postgres: PostgresServer
) -> None:
    with (
        psycopg.connect(postgres.dsn, autocommit=True) as real,
        psycopg.connect(server.dsn, autocommit=True) as ours,
    ):
        real.execute(TABLE)
        differ = [
            (sql, wanted, got)
            for sql in (*UNNAMED_COLUMNS, *OPEN_PARAMETERS)
            if not sql.startswith("explain")
            and (wanted := names(real, sql)) != (got := names(ours, sql))
        ]
    assert differ == []


def test_names_inside_the_engine_stay(server: RunningServer) -> None:
    """Only what the client is told changes; the simple protocol, cursors and COPY say the same."""
    with psycopg.connect(server.dsn, autocommit=True) as ours:
        ours.execute("CREATE OR REPLACE TABLE counted AS SELECT count(*) FROM t")
        assert names(ours, "SELECT * FROM counted") == [b"count_star()"]
        assert names(ours, "SELECT upper('x'), * FROM counted") == [b"upper", b"count_star()"]
        for sql in ("SELECT count(*) FROM t", "SELECT count(*), 1 FROM t"):
            cursor = psycopg.ClientCursor(ours).execute(sql)
            assert cursor.description and cursor.description[0].name == "count"
        assert said(server.dsn, "COPY (SELECT max(id), 1 FROM t) TO STDOUT (FORMAT csv, HEADER)")[
            1
        ] == ("d", b"max,?column?\n")
        with ours.transaction(), ours.cursor("walk") as walk:
            walk.execute("SELECT lower(x) FROM t ORDER BY 1")
            assert walk.description and walk.description[0].name == "lower"


def test_ai_functions_have_types(server: RunningServer) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as ours:
        sql = "SELECT ai_score($1, x, options => $2) > $3 FROM t"
        assert described(ours, sql) == [25, 3802, 701]
        assert described(ours, "SELECT ai_classify(x, $1), ai_filter($2, x) FROM t") == [1009, 25]
        assert described(ours, "EXPLAIN SELECT ai_generate(left(x, $1)) FROM t") == [23]


VALUES: list[tuple[str, list[Any]]] = [
    ("SELECT left('hello', $1)", [2]),
    ("SELECT $1 + 1", [41]),
    ("VALUES ($1), (9)", [3]),
    ("SELECT id FROM t WHERE id = ANY($1) ORDER BY id", [[1, 2]]),
    ("SELECT id FROM t WHERE x = ANY($1) ORDER BY id", [["a", "c", None]]),
    ("SELECT id FROM t WHERE x <> ALL($1) ORDER BY id", [["a"]]),
    ("SELECT coalesce($1, 5)", [None]),
    ("SELECT CASE WHEN $1 THEN 1 ELSE 2 END", [True]),
    ("SELECT * FROM generate_series(1, $1)", [3]),
    ("SELECT repeat('ab', $1), substr($2, $3, $4)", [2, "hello", 2, 3]),
    ("SELECT interval '1 day' * $1", [2.5]),
    ("SELECT ts - $1 FROM t ORDER BY id LIMIT $2", [dt.datetime(2024, 1, 1), 1]),
    ("SELECT id FROM t WHERE d > $1 ORDER BY id", [Decimal("1.55")]),
    ("SELECT nums[$1] FROM t ORDER BY id LIMIT 1", [1]),
    ("SELECT array[$1, 2]", [1]),
    ("SELECT id FROM t WHERE (id, x) = ($1, $2)", [1, "a"]),
    ("INSERT INTO t (id, x, d, nums) VALUES ($1, $2, $3, $4) RETURNING id, x, d, nums",
     [7, "q", Decimal("7.25"), [1, None]]),
    ("UPDATE t SET x = $1, n = n + $2 WHERE id = $3 RETURNING x", ["z", 1, 7]),
    ("DELETE FROM t WHERE id = $1 RETURNING id", [7]),
]  # fmt: skip
if not duckdb.__version__.startswith("1."):  # which takes round(1.2345, NULL) for an integer
    VALUES.append(("SELECT round(1.2345, $1)", [2]))


async def test_values_in_binary_answer_as_in_postgres(
    server: RunningServer, postgres: PostgresServer
) -> None:
    ours = await asyncpg.connect(
        host="127.0.0.1", port=server.port, user="alice", database="main", ssl=False
    )
    real = await asyncpg.connect(
        host="127.0.0.1", port=postgres.port, user=USER, password=PASSWORD, database="app"
    )
    await real.execute(TABLE)
    for sql, values in VALUES:
        wanted = [tuple(row) for row in await real.fetch(sql, *values)]
        assert [tuple(row) for row in await ours.fetch(sql, *values)] == wanted, sql
    await ours.close()
    await real.close()


def test_values_as_text(server: RunningServer) -> None:
    """As psycopg and node send them: lists and strings without a type."""
    with psycopg.connect(server.dsn) as ours:
        query = "SELECT id FROM t WHERE id = ANY(%s) AND x = ANY(%s) ORDER BY id"
        values = ([1, 2], ["a", "b"])
        assert ours.execute(query, values).fetchall() == [(1,), (2,)]
        assert ours.execute(query, ("{1,2}", '{"a",b}')).fetchall() == [(1,), (2,)]
        assert ours.execute("SELECT left('hello', %s)", ["3"]).fetchone() == ("hel",)
        assert ours.execute("SELECT %s + 1", ["3"]).fetchone() == (4,)
        with pytest.raises(psycopg.errors.InvalidTextRepresentation):
            ours.execute("SELECT left('hello', %s)", ["three"])


def test_composite_values_are_json(server: RunningServer) -> None:
    """A client's own JSON reader takes structs, maps and nested lists, in either format."""
    query = """
        SELECT {'a': 1.10::decimal(4,2), 'n': 'nan'::float, 'd': date '2024-01-02',
                'j': '{"x": [1]}'::json} AS s,
               map {'k': [1, NULL]} AS m, [[1], []] AS l, row(1, 'x') AS r, NULL::STRUCT(a INT) AS z
    """
    wanted = (
        {"a": 1.1, "n": "NaN", "d": "2024-01-02", "j": {"x": [1]}},
        {"k": [1, None]}, [[1], []], {"f1": 1, "f2": "x"}, None,
    )  # fmt: skip
    with psycopg.connect(server.dsn, autocommit=True) as ours:
        for binary in (False, True):
            cursor = ours.cursor(binary=binary)
            assert cursor.execute(query).fetchone() == wanted
            assert cursor.description and [c.type_code for c in cursor.description] == [114] * 5


def test_composite_values_go_out_and_in_by_copy(server: RunningServer) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as ours:
        ours.execute("CREATE OR REPLACE TABLE c (s STRUCT(a INT, b TEXT[]), l INT[][])")
        ours.execute("INSERT INTO c VALUES ({'a': 1, 'b': ['x,\"', NULL]}, [[1, 2], []])")
        ours.execute("INSERT INTO c VALUES (%s, %s)", ('{"a": 2, "b": ["y"]}', "[[3]]"))
        before = ours.execute("SELECT * FROM c ORDER BY s.a").fetchall()
        cursor = ours.cursor()
        with cursor.copy("COPY c TO STDOUT") as out:
            data = b"".join(bytes(piece) for piece in out)
        ours.execute("DELETE FROM c")
        with cursor.copy("COPY c FROM STDIN") as into:
            into.write(data)
        assert ours.execute("SELECT * FROM c ORDER BY s.a").fetchall() == before
        assert before[0] == ({"a": 1, "b": ['x,"', None]}, [[1, 2], []])


COPIES = (
    "COPY (SELECT i::int, 'x' || i FROM generate_series(1, 3) g(i)) TO STDOUT (FORMAT binary)",
    "COPY (SELECT 1 WHERE false) TO STDOUT (FORMAT binary)",
    "COPY (SELECT 1 AS a WHERE false) TO STDOUT (FORMAT csv, HEADER)",
    "COPY (SELECT 1 AS a) TO STDOUT (FORMAT csv, HEADER)",
    "COPY (SELECT 1 AS a WHERE false) TO STDOUT",
)


def said(dsn: str, sql: str) -> list[tuple[str, bytes]]:
    """All messages that answer a simple query."""
    client = RawClient(dsn)
    body = sql.encode() + b"\0"
    client.say(b"Q" + struct.pack("!i", len(body) + 4) + body)
    heard = client.hear(1)
    client.close()
    return heard


@pytest.mark.parametrize("sql", COPIES)
def test_copy_says_what_postgres_says(
    server: RunningServer, postgres: PostgresServer, sql: str
) -> None:
    assert said(server.dsn, sql) == said(postgres.dsn, sql)


@pytest.mark.parametrize("then", ["INSERT INTO unsynced VALUES (2)", "selec", "SELECT nothing", ""])
def test_a_query_ends_a_batch_that_had_no_sync(
    server: RunningServer, postgres: PostgresServer, then: str
) -> None:
    bind = messages.framed(b"B", b"p\0\0", bytes(6))
    insert = messages.parse(b"", b"INSERT INTO unsynced VALUES (1)") + bind + messages.execute(b"p")
    heard = []
    for dsn in (server.dsn, postgres.dsn):
        with psycopg.connect(dsn, autocommit=True) as before:
            before.execute("CREATE TABLE unsynced (a INT)")
        client = RawClient(dsn)
        client.say(insert + messages.query(then.encode()))
        frames = client.hear(1)
        client.say(messages.query(b"INSERT INTO unsynced VALUES (3)"))
        frames += client.hear(1)
        client.close()
        with psycopg.connect(dsn, autocommit=True) as after:
            kept = after.execute("SELECT a FROM unsynced ORDER BY a").fetchall()
            after.execute("DROP TABLE unsynced")
        heard.append(([kind for kind, _ in frames], frames[-1], kept))
    assert heard[0] == heard[1]


def test_pg_settings_lists_ours_as_custom_options(server: RunningServer) -> None:
    ask = """SELECT setting, source, category, short_desc, boot_val, reset_val FROM pg_settings
             WHERE name = 'tierkv.max_calls'"""
    about = SETTINGS["tierkv.max_calls"].description
    with psycopg.connect(server.dsn, autocommit=True) as ours:
        listed = ours.execute("SELECT name FROM pg_settings WHERE name LIKE 'tierkv.%'").fetchall()
        assert {name for (name,) in listed} == set(SETTINGS)
        default = ("1000", "default", "Customized Options", about, "1000", "1000")
        assert ours.execute(ask).fetchall() == [default]
        ours.execute("SET tierkv.max_calls = 77")
        changed = ("77", "session", "Customized Options", about, "1000", None)
        assert ours.execute(ask).fetchall() == [changed]
        shown = ours.execute("SHOW tierkv.max_calls").fetchall()
        assert shown == ours.execute("SELECT current_setting('tierkv.max_calls')").fetchall()
        [row] = [row for row in ours.execute("SHOW ALL") if row[0] == "tierkv.max_calls"]
        assert row == ("tierkv.max_calls", "77", about)
        ours.execute("RESET tierkv.max_calls")
        assert ours.execute(ask).fetchall() == [default]


@pytest.mark.parametrize("options", ["", "ANALYZE", "(FORMAT JSON)", "(ANALYZE, FORMAT TEXT)"])
def test_a_plan_has_the_shape_of_postgres(
    server: RunningServer, postgres: PostgresServer, options: str
) -> None:
    sql = f"EXPLAIN {options} SELECT x FROM t WHERE id > 1"
    seen = []
    for dsn in (postgres.dsn, server.dsn):
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(TABLE)
            shape = shape_of(db, sql)
            told = [(shape.fname(at), shape.ftype(at)) for at in range(shape.nfields)]
            cursor = db.execute(sql)
            assert cursor.description is not None
            ran = [(column.name, column.type_code) for column in cursor.description]
            rows = cursor.fetchall()
            assert "JSON" in options or (len(rows) > 1 and "\n" not in str(rows))
            seen.append((told, ran, cursor.statusmessage, len(rows) == 1))
    assert seen[0] == seen[1]
    assert seen[0][0] == [(b"QUERY PLAN", 114 if "JSON" in options else 25)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELEC 1", "SELECT FROM WHERE", "SELECT * FROM nowhere", "SELECT none FROM t",
        "INSERT INTO t VALUES (", "UPDATE t SET", "CREATE TABLE made (", "EXPLAIN SELEC 1",
        "DROP nothing", "SELECT $1 +", "DELETE FROM t WHER id = 1", "ALTER TABLE t AD x int",
    ],
)  # fmt: skip
def test_a_wrong_statement_is_told_at_parse(
    server: RunningServer, postgres: PostgresServer, sql: str
) -> None:
    """No Bind or Describe follows: so clients that prepare only learn it there."""
    seen = []
    for dsn in (postgres.dsn, server.dsn):
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(TABLE)
            shape_of(db, "SELECT 1")
            told = []
            for send in (
                lambda pgconn: pgconn.send_prepare(b"", sql.encode()),
                lambda pgconn: pgconn.send_describe_prepared(b""),
            ):
                send(db.pgconn)
                [answer] = db.wait(generators.execute(db.pgconn))
                told.append(answer.error_field(pq.DiagnosticField.SQLSTATE))
            seen.append(told)
    assert seen[0] == seen[1]
    assert seen[0][0] is not None


_HEAD = b"PGCOPY\n\xff\r\n\0"
_ROW = struct.pack("!hiii", 2, 4, 1, -1)
_MARKER = b"\xff\xff"
BINARY_COPIES: dict[str, list[bytes]] = {
    "whole": [_HEAD + bytes(8), _ROW, _MARKER],
    "without a marker": [_HEAD + bytes(8), _ROW],
    "half a count at the end": [_HEAD + bytes(8), _ROW, b"\0"],
    "only a header": [_HEAD + bytes(8)],
    "an extension": [_HEAD + struct.pack("!II", 7, 3), b"abc", _ROW, _MARKER],
    "a cut row": [_HEAD + bytes(8), _ROW[:7]],
    "a count only": [_HEAD + bytes(8), _ROW[:2]],
    "a byte behind the marker": [_HEAD + bytes(8), _ROW, _MARKER + b"x"],
    "a message behind the marker": [_HEAD + bytes(8), _ROW, _MARKER, b"x"],
    "two markers": [_HEAD + bytes(8), _ROW, _MARKER, _MARKER],
    "a row behind the marker": [_HEAD + bytes(8) + _ROW + _MARKER, _ROW],
    "another signature": [b"PGCOPX"],
    "a cut signature": [_HEAD[:5]],
    "no flags": [_HEAD],
    "no length": [_HEAD + bytes(4)],
    "a negative length": [_HEAD + struct.pack("!Ii", 0, -1)],
    "a cut extension": [_HEAD + struct.pack("!II", 0, 3), b"ab"],
    "object ids": [_HEAD + struct.pack("!II", 1 << 16, 0)],
    "unknown flags": [_HEAD + struct.pack("!II", 1 << 17, 0)],
    "three fields": [_HEAD + bytes(8), struct.pack("!h", 3)],
    "a negative size": [_HEAD + bytes(8), struct.pack("!hi", 2, -5)],
}


@pytest.mark.parametrize("name", BINARY_COPIES)
def test_binary_copies_end_as_in_postgresql(
    server: RunningServer, postgres: PostgresServer, name: str
) -> None:
    def copied(dsn: str) -> tuple[str, str] | list[Any]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS copied")
            connection.execute("CREATE TABLE copied (a int, b text)")
            try:
                with connection.cursor().copy("COPY copied FROM STDIN (FORMAT binary)") as copy:
                    for piece in BINARY_COPIES[name]:
                        copy.write(piece)
            except psycopg.Error as error:
                return str(error.sqlstate), str(error.diag.message_primary)
            return connection.execute("SELECT * FROM copied").fetchall()

    assert copied(server.dsn) == copied(postgres.dsn)
