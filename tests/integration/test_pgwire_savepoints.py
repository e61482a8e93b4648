"""Savepoints and nested transactions over an engine that has none."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import errors

from tests.fix_pgwire import RunningServer, running_pgwire

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture
def conn(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("CREATE OR REPLACE TABLE s (n INTEGER)")
        connection.execute("DROP TABLE IF EXISTS numbered")
        connection.execute(
            "CREATE TABLE numbered (id serial PRIMARY KEY, v text, made timestamptz DEFAULT now())"
        )
        yield connection


def numbers(connection: psycopg.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM s ORDER BY n")]


def test_nested_transactions_keep_what_came_before(conn: psycopg.Connection) -> None:
    with conn.transaction():
        conn.execute("INSERT INTO s VALUES (1)")
        with pytest.raises(errors.UndefinedTable), conn.transaction():
            conn.execute("INSERT INTO s VALUES (2)")
            conn.execute("SELECT * FROM nowhere")
        with conn.transaction():
            conn.execute("INSERT INTO s VALUES (3)")
            with pytest.raises(ZeroDivisionError), conn.transaction():
                conn.execute("UPDATE s SET n = n + 10")
                raise ZeroDivisionError
        assert numbers(conn) == [1, 3]
    assert numbers(conn) == [1, 3]


def test_rows_keep_the_numbers_and_times_they_were_given(conn: psycopg.Connection) -> None:
    with conn.transaction():
        given = conn.execute(
            "INSERT INTO numbered (v) VALUES ('a'), (NULL) RETURNING id, v, made"
        ).fetchall()
        conn.execute("INSERT INTO numbered (v) VALUES ('c')")
        conn.execute("UPDATE numbered SET v = 'b' WHERE v IS NULL")
        with pytest.raises(errors.UniqueViolation), conn.transaction():
            conn.execute("INSERT INTO numbered (id, v) VALUES (%s, 'twice')", (given[0][0],))
        assert conn.execute("INSERT INTO numbered (v) VALUES ('d')").statusmessage == "INSERT 0 1"
    rows = conn.execute("SELECT id, v, made FROM numbered ORDER BY id").fetchall()
    first = given[0][0]
    assert [row[:2] for row in rows[:3]] == [(first, "a"), (first + 1, "b"), (first + 2, "c")]
    assert [row[2] for row in rows[:2]] == [row[2] for row in given]
    assert rows[3][1] == "d"


def test_copied_rows_tables_and_settings_come_back(conn: psycopg.Connection) -> None:
    with conn.transaction():
        conn.execute("CREATE TEMP TABLE made AS SELECT 1 AS n")
        with conn.cursor().copy("COPY s FROM STDIN") as copy:
            copy.write_row((7,))
        conn.execute("SET tierkv.max_tokens = 5")
        conn.execute("SAVEPOINT a")
        conn.execute("SET tierkv.max_tokens = 6")
        conn.execute("DROP TABLE made")
        conn.execute("DELETE FROM s")
        conn.execute("ROLLBACK TO a")
        conn.execute("INSERT INTO made VALUES (2)")
        conn.execute("ROLLBACK TO a")
    assert numbers(conn) == [7]
    assert conn.execute("SELECT n FROM made").fetchall() == [(1,)]
    assert conn.execute("SHOW tierkv.max_tokens").fetchone() == ("5",)


def test_a_with_that_writes_is_a_change(conn: psycopg.Connection) -> None:
    if conn.execute("SELECT library_version FROM pragma_version()").fetchone() < ("v2",):
        pytest.skip("DuckDB 1.5 has no WITH that writes")
    with conn.transaction():
        conn.execute("WITH x AS (INSERT INTO s VALUES (1) RETURNING n) SELECT n FROM x")
        conn.execute("SAVEPOINT a")
        conn.execute("WITH x AS (INSERT INTO s VALUES (2) RETURNING n) SELECT n FROM x")
        conn.execute("ROLLBACK TO a")
    assert numbers(conn) == [1]


def test_what_reads_is_not_repeated_over_anothers_commit(
    server: RunningServer, conn: psycopg.Connection
) -> None:
    conn.execute("INSERT INTO s VALUES (1)")
    with psycopg.connect(server.dsn, autocommit=True) as other:
        with pytest.raises(errors.SerializationFailure), conn.transaction():
            conn.execute("INSERT INTO s SELECT n + 100 FROM s")
            conn.execute("SAVEPOINT a")
            other.execute("INSERT INTO s VALUES (2)")
            conn.execute("INSERT INTO s VALUES (9)")
            conn.execute("ROLLBACK TO a")
        with conn.transaction():
            conn.execute("INSERT INTO s VALUES (50)")
            with pytest.raises(ZeroDivisionError), conn.transaction():
                conn.execute("DELETE FROM s")
                other.execute("INSERT INTO s VALUES (3)")
                raise ZeroDivisionError
    assert numbers(conn) == [1, 2, 3, 50]


def test_a_change_that_can_not_be_repeated_is_refused(conn: psycopg.Connection) -> None:
    refused = pytest.raises(errors.FeatureNotSupported, match="random")
    with refused, conn.transaction():
        conn.execute("INSERT INTO s VALUES (1)")
        conn.execute("UPDATE s SET n = CAST(random() * 100 AS INTEGER)")
        conn.execute("SAVEPOINT a")
        conn.execute("DELETE FROM s")
        conn.execute("ROLLBACK TO a")
    assert numbers(conn) == []


def test_savepoints_by_name(conn: psycopg.Connection) -> None:
    with pytest.raises(errors.NoActiveSqlTransaction):
        conn.execute("SAVEPOINT a")
    conn.execute("BEGIN")
    conn.execute('SAVEPOINT a; INSERT INTO s VALUES (1); SAVEPOINT "A"; INSERT INTO s VALUES (2)')
    conn.execute('RELEASE SAVEPOINT "A"')
    assert numbers(conn) == [1, 2]
    conn.execute("ROLLBACK WORK TO a")
    assert numbers(conn) == []
    with pytest.raises(errors.InvalidSavepointSpecification):
        conn.execute("ROLLBACK TO nowhere")
    with pytest.raises(errors.InFailedSqlTransaction):
        conn.execute("SAVEPOINT b")
    conn.execute("ROLLBACK TO SAVEPOINT a")
    conn.execute("INSERT INTO s VALUES (4)")
    conn.execute("COMMIT")
    assert numbers(conn) == [4]
