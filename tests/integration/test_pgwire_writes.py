"""A WITH that writes, through the wire: savepoints, parameters, cursors, COPY and intervals."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import psycopg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire
from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        int(duckdb.__version__.split(".")[0]) < 2, reason="the WITH of this DuckDB can't write"
    ),
]

WRITE = "WITH x AS (INSERT INTO t VALUES (1, 'a') RETURNING *) SELECT * FROM x"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    def made() -> DuckDbSqlServer:
        return DuckDbSqlServer(DuckDbConfig(threads=1), InstantGenerator())

    with running_pgwire(made) as server:
        yield server


@pytest.fixture
def connection(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("CREATE OR REPLACE TABLE t (k INTEGER, v VARCHAR)")
        connection.execute("CREATE OR REPLACE TABLE u (k INTEGER, a VARCHAR)")
        yield connection


def rows(connection: psycopg.Connection, table: str) -> list[tuple[object, ...]]:
    return connection.execute(f"SELECT * FROM {table} ORDER BY ALL").fetchall()


def test_a_savepoint_before_it_takes_it_back(connection: psycopg.Connection) -> None:
    connection.execute("BEGIN")
    connection.execute("SAVEPOINT a")
    connection.execute(WRITE)
    connection.execute("ROLLBACK TO a")
    connection.execute("COMMIT")
    assert rows(connection, "t") == []


def test_a_savepoint_behind_it_does_not_lose_it(connection: psycopg.Connection) -> None:
    with connection.transaction():
        connection.execute(WRITE)
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO u VALUES (1, 'b')")
        connection.execute("ROLLBACK TO a")
    assert rows(connection, "t") == [(1, "a")]
    assert rows(connection, "u") == []
    connection.execute("DELETE FROM t")
    with connection.transaction():
        connection.execute(WRITE)
        with pytest.raises(ZeroDivisionError), connection.transaction():
            connection.execute("EXPLAIN ANALYZE SELECT count(*) FROM t")
            raise ZeroDivisionError
    assert rows(connection, "t") == [(1, "a")]


def test_parameters_and_description(connection: psycopg.Connection) -> None:
    text = (
        "WITH x AS (INSERT INTO t VALUES (%s, %s) RETURNING k + 1 AS n, v) "
        "SELECT n, ai_generate(v || %s) AS a FROM x"
    )
    found = connection.execute(text, [1, "a", "b"], prepare=True)
    assert found.fetchall() == [(2, answer_text("ab"))]
    assert [(column.name, column.type_code) for column in found.description or ()] == [
        ("n", 23),
        ("a", 25),
    ]
    moved = connection.execute(
        "WITH gone AS (DELETE FROM t WHERE k = %s RETURNING *) "
        "INSERT INTO u SELECT k, ai_generate(v) FROM gone",
        [1],
    )
    assert moved.statusmessage == "INSERT 0 1"
    assert rows(connection, "t") == []
    assert rows(connection, "u") == [(1, answer_text("a"))]


@pytest.mark.parametrize("item", ["INTERVAL 40 DAY AS i", "INTERVAL 40 DAY AS i, ai_generate(v) a"])
def test_intervals_are_read_without_writing_again(
    connection: psycopg.Connection, item: str
) -> None:
    text = f"WITH x AS (INSERT INTO t VALUES (1, 'a') RETURNING *) SELECT k, {item} FROM x"
    (row,) = connection.execute(text).fetchall()
    assert row[1].days == 40
    assert rows(connection, "t") == [(1, "a")]


def test_a_cursor_over_it_is_refused_before_it_writes(connection: psycopg.Connection) -> None:
    with connection.transaction():
        refused = pytest.raises(psycopg.errors.FeatureNotSupported, match="data-modifying")
        with refused, connection.transaction():
            connection.execute(f"DECLARE c CURSOR FOR {WRITE}")
        with pytest.raises(psycopg.errors.SyntaxError), connection.transaction():
            connection.execute("DECLARE c CURSOR FOR INSERT INTO t VALUES (2, 'b') RETURNING *")
    assert rows(connection, "t") == []


def test_copy_to_the_client_writes_once(connection: psycopg.Connection) -> None:
    query = WRITE.replace("SELECT *", "SELECT k, ai_generate(v)")
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT") as copy:
        assert [bytes(line) for line in copy] == [f"1\t{answer_text('a')}\n".encode()]
    assert rows(connection, "t") == [(1, "a")]
