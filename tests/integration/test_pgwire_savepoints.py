"""Savepoints and nested transactions over an engine that has none."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

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
