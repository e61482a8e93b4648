"""Which table each column of a result is of, as RowDescription says, compared with PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import generators

from tests.fix_pgwire import RunningServer, running_pgwire, tierkv_sql
from tests.fix_postgres import PostgresServer
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.catalog.table_numbers import TableNumbers

pytestmark = pytest.mark.integration

SETUP = [
    "CREATE TABLE docs (id int PRIMARY KEY, topic int, body text, size bigint)",
    "CREATE TABLE topics (id int PRIMARY KEY, name text)",
    "CREATE TABLE sizes (size bigint, id bigint, label text)",
    "INSERT INTO docs VALUES (1, 1, 'a', 5)",
    "INSERT INTO topics VALUES (1, 'sport')",
    "INSERT INTO sizes VALUES (5, 1, 'small')",
    "CREATE VIEW shown AS SELECT d.id, name AS topic, size + 1 AS bigger FROM docs d "
    "JOIN topics t ON d.topic = t.id",
    "CREATE SCHEMA other",
    "CREATE TABLE other.docs (x int, id int)",
    "CREATE TABLE hidden (a int, b int)",
    "CREATE TEMP TABLE hidden (c int, a int)",
    "CREATE TABLE changed (a int, b int, c int)",
    "ALTER TABLE changed ADD COLUMN d int",
    "ALTER TABLE changed RENAME COLUMN b TO bb",
]
SAME = [
    "SELECT id, docs.body, docs.* FROM docs",
    "SELECT ID, (body), size + 1, 'x', id AS body FROM Docs",
    "SELECT d.id AS a, d.* FROM docs AS d",
    "SELECT * FROM docs AS d (one, two)",
    "SELECT d.two, one FROM docs AS d (one, two)",
    "SELECT * FROM docs, topics",
    "SELECT t.*, d.id FROM docs d LEFT JOIN topics t ON d.topic = t.id",
    "SELECT body, name, label FROM docs JOIN topics ON topic = topics.id CROSS JOIN sizes",
    "SELECT id, docs.id, topics.id FROM docs JOIN topics USING (id)",
    "SELECT * FROM docs JOIN topics USING (id)",
    "SELECT * FROM docs LEFT JOIN topics USING (id)",
    "SELECT id, docs.id, topics.id FROM docs RIGHT JOIN topics USING (id)",
    "SELECT id, docs.id, topics.id FROM docs FULL JOIN topics USING (id)",
    "SELECT id, name FROM docs NATURAL JOIN topics",
    "SELECT s.a, s.b, s.n FROM (SELECT id AS a, body b, count(*) AS n FROM docs GROUP BY 1, 2) s",
    "SELECT * FROM (SELECT * FROM (SELECT body, id FROM docs) a) b",
    "SELECT * FROM (SELECT id, size FROM docs) AS s (x)",
    "SELECT d.id, l.name FROM docs d, LATERAL (SELECT name FROM topics t WHERE t.id = d.topic) l",
    "SELECT l.x FROM docs d, LATERAL (SELECT d.body AS x) l",
    "WITH c AS (SELECT id, body FROM docs) SELECT * FROM c",
    "WITH c (x) AS (SELECT topic FROM docs), e AS (SELECT x, 1 AS y FROM c) SELECT y, x FROM e",
    "WITH docs AS (SELECT name AS id FROM topics) SELECT id FROM docs",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT n FROM r",
    "SELECT * FROM shown",
    "SELECT s.topic, d.topic FROM shown s JOIN docs d ON d.id = s.id",
    "SELECT id FROM docs UNION SELECT id FROM topics",
    "SELECT * FROM (SELECT id FROM docs UNION ALL SELECT id FROM topics) u",
    "SELECT topic, count(*), max(body) FROM docs GROUP BY topic ORDER BY topic",
    "SELECT DISTINCT body FROM docs",
    "SELECT id, row_number() OVER (ORDER BY id) FROM docs",
    "SELECT body || 'x', size::text, coalesce(body, ''), CASE WHEN id = 1 THEN id END FROM docs",
    "SELECT (SELECT name FROM topics LIMIT 1), id FROM docs",
    "SELECT * FROM public.docs",
    "SELECT id, x FROM other.docs",
    "SELECT other.docs.id FROM other.docs",
    "SELECT d.id, o.id FROM docs d, other.docs o",
    "SELECT * FROM hidden",
    "SELECT * FROM changed",
    "SELECT * FROM generate_series(1, 2) AS g (n)",
    "SELECT d.*, g.n FROM docs d, generate_series(1, 2) AS g (n)",
    "SELECT * FROM (VALUES (1, 2)) AS v (id, topic)",
    "TABLE docs",
    "SELECT 1",
    "SELECT count(*) FROM docs",
    "SELECT NULL AS id FROM docs",
    "INSERT INTO docs VALUES (2, 1, 'b', 6) RETURNING *",
    "INSERT INTO docs (id, body) SELECT 3, name FROM topics RETURNING id + 1, body AS b",
    "UPDATE docs SET body = 'c' WHERE id = 2 RETURNING id, docs.body, upper(body)",
    "UPDATE docs AS d SET body = 'c' WHERE id = 2 RETURNING d.*",
    "DELETE FROM docs WHERE id > 1 RETURNING body, id",
    "WITH c AS (SELECT 9 AS n) INSERT INTO docs (id) SELECT n FROM c RETURNING id",
    "DELETE FROM docs WHERE id = 9 RETURNING *",
]
SILENT = [
    "SELECT id FROM sizes JOIN docs USING (size, id)",  # A column of two types.
    "SELECT id::int, docs FROM docs",  # A cast that is none; a whole row.
    "SELECT * FROM public.hidden",  # DuckDB finds the temporary one.
    "SELECT oid, relname FROM pg_class WHERE relname = 'docs'",
    "SELECT table_name FROM information_schema.tables WHERE table_name = 'docs'",
]


@pytest.fixture(scope="module")
def ours() -> Iterator[psycopg.Connection]:
    with running_pgwire() as server, psycopg.connect(server.dsn, autocommit=True) as connection:
        for statement in SETUP:
            connection.execute(statement)
        yield connection


@pytest.fixture(scope="module")
def theirs(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.dsn, autocommit=True) as direct:
        direct.execute("CREATE DATABASE column_tables")
    dsn = postgres.dsn.replace("dbname=app", "dbname=column_tables")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in SETUP:
            connection.execute(statement)
        yield connection


Named = list[tuple[str, str] | None]


def named(connection: psycopg.Connection, sql: str) -> Named:
    """Run a statement, and name each column's table and column by the catalogue."""
    result = connection.execute(sql).pgresult
    assert result is not None
    numbers = [(result.ftable(at), result.ftablecol(at)) for at in range(result.nfields)]
    return [None if pair == (0, 0) else name(connection, *pair) for pair in numbers]


def name(connection: psycopg.Connection, table: int, column: int) -> tuple[str, str]:
    found = connection.execute(
        "SELECT relnamespace::regnamespace::text || '.' || relname, attname FROM pg_class "
        "JOIN pg_attribute ON attrelid = pg_class.oid WHERE pg_class.oid = %s AND attnum = %s",
        (table, column),
    ).fetchall()
    assert len(found) == 1, (table, column, found)
    schema, _, rest = str(found[0][0]).partition(".")
    return ("pg_temp" if schema.startswith("pg_temp") else schema) + "." + rest, str(found[0][1])


@pytest.mark.parametrize("sql", SAME)
def test_columns_know_their_table(
    ours: psycopg.Connection, theirs: psycopg.Connection, sql: str
) -> None:
    assert named(ours, sql) == named(theirs, sql)


@pytest.mark.parametrize("sql", SILENT)
def test_what_is_not_sure_is_not_said(ours: psycopg.Connection, sql: str) -> None:
    assert {pair for pair in named(ours, sql) if pair} == set()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_pgwire() as running:
        yield running


@pytest.fixture
def one(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS t")
        connection.execute("DROP SCHEMA IF EXISTS s CASCADE")
        connection.execute("CREATE TABLE t (a int, b int)")
        yield connection


@pytest.fixture
def two(server: RunningServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        yield connection


T_A, T_B = ("public.t", "a"), ("public.t", "b")
BOTH = "SELECT b, a FROM t"


def test_prepared_statements_know_their_table(one: psycopg.Connection) -> None:
    pgconn = one.pgconn
    pgconn.send_prepare(b"p", b"SELECT a + $1, b FROM t WHERE a = $1")
    [prepared] = one.wait(generators.execute(pgconn))
    assert not prepared.error_message
    pgconn.send_describe_prepared(b"p")
    [shape] = one.wait(generators.execute(pgconn))
    assert (shape.ftable(0), shape.ftablecol(0)) == (0, 0)
    assert name(one, shape.ftable(1), shape.ftablecol(1)) == T_B


def test_a_prepared_statement_is_described_with_the_tables_there_are_now(
    one: psycopg.Connection, two: psycopg.Connection
) -> None:
    pgconn = one.pgconn
    pgconn.send_prepare(b"later", b"SELECT b AS x, b, count(*) OVER () FROM t")
    [prepared] = one.wait(generators.execute(pgconn))
    assert not prepared.error_message
    for change in ("ALTER TABLE t DROP COLUMN a", "DROP TABLE t", "CREATE TABLE t (c int, b int)"):
        two.execute(change)
        pgconn.send_describe_prepared(b"later")
        [shape] = one.wait(generators.execute(pgconn))
        numbers = [(shape.ftable(at), shape.ftablecol(at)) for at in range(3)]
        if change == "DROP TABLE t":
            assert numbers == [(0, 0)] * 3
        else:
            assert [name(one, *pair) for pair in numbers[:2]] == [T_B, T_B]
            assert numbers[2] == (0, 0)


def test_another_schema_in_use_means_other_tables(one: psycopg.Connection) -> None:
    one.execute("CREATE SCHEMA s")
    one.execute("CREATE TABLE s.t (b int, a int)")
    assert named(one, BOTH) == [T_B, T_A]
    one.execute("USE s")
    assert named(one, BOTH) == [("s.t", "b"), ("s.t", "a")]
    one.execute("USE main")
    assert named(one, BOTH) == [T_B, T_A]


def test_cursors_know_their_table(one: psycopg.Connection) -> None:
    with one.transaction():
        one.execute("DECLARE c CURSOR FOR SELECT b, a, 1 FROM t")
        assert named(one, "FETCH ALL FROM c") == [T_B, T_A, None]


def test_a_cursor_of_the_protocol_knows_its_table(one: psycopg.Connection) -> None:
    with one.transaction(), one.cursor("named") as cursor:
        cursor.execute(BOTH)
        assert cursor.pgresult is not None
        assert [cursor.pgresult.ftablecol(at) for at in (0, 1)] == [2, 1]


def test_a_name_follows_every_change_of_tables(
    one: psycopg.Connection, two: psycopg.Connection
) -> None:
    assert named(one, BOTH) == named(two, BOTH) == [T_B, T_A]
    two.execute("DROP TABLE t")
    two.execute("CREATE TABLE t (b int, c int, a int)")
    assert named(one, BOTH) == named(two, BOTH) == [T_B, T_A]
    two.execute("ALTER TABLE t DROP COLUMN c")
    assert named(one, BOTH) == named(two, BOTH) == [T_B, T_A]
    two.execute("ALTER TABLE t RENAME TO u")
    two.execute("CREATE VIEW t AS SELECT b, a FROM u")
    assert named(one, BOTH) == [T_B, T_A]
    two.execute("DROP VIEW t")
    two.execute("DROP TABLE u")
    one.execute("CREATE TABLE t (a int, b int)")


def test_a_transaction_sees_its_own_tables(
    one: psycopg.Connection, two: psycopg.Connection
) -> None:
    with one.transaction(force_rollback=True):
        assert named(one, BOTH) == [T_B, T_A]
        one.execute("ALTER TABLE t RENAME TO u")
        one.execute("CREATE TABLE t (x int, a int, b int)")
        assert named(one, BOTH) == [T_B, T_A]
        assert named(two, BOTH) == [T_B, T_A]
    assert named(one, BOTH) == named(two, BOTH) == [T_B, T_A]
    with one.transaction():
        one.execute("CREATE TABLE fresh (a int)")
        assert named(one, "SELECT a FROM fresh") == [("public.fresh", "a")]
    assert named(two, "SELECT a FROM fresh") == [("public.fresh", "a")]
    one.execute("DROP TABLE fresh")


def test_a_transaction_keeps_the_tables_of_its_begin(
    one: psycopg.Connection, two: psycopg.Connection
) -> None:
    with two.transaction():
        assert named(two, BOTH) == [T_B, T_A]
        one.execute("CREATE TABLE later (a int)")
        assert named(one, "SELECT a FROM later") == [("public.later", "a")]
        assert named(two, BOTH) == [T_B, T_A]
    assert named(two, "SELECT a FROM later") == [("public.later", "a")]
    one.execute("DROP TABLE later")


def test_temporary_tables_and_the_search_path_are_the_sessions_own(
    one: psycopg.Connection, two: psycopg.Connection
) -> None:
    one.execute("CREATE SCHEMA s")
    one.execute("CREATE TABLE s.t (b int, a int)")
    assert named(one, BOTH) == named(two, BOTH) == [T_B, T_A]
    one.execute("SET search_path = s, public")
    assert named(one, BOTH) == [("s.t", "b"), ("s.t", "a")]
    assert named(two, BOTH) == [T_B, T_A]
    one.execute("SELECT set_config('search_path', 'public', false)")
    assert named(one, BOTH) == [T_B, T_A]
    two.execute("CREATE TEMP TABLE t (b int, a int)")
    assert named(two, BOTH) == [("pg_temp.t", "b"), ("pg_temp.t", "a")]
    assert named(one, BOTH) == [T_B, T_A]
    two.execute("DROP TABLE t")
    assert named(two, BOTH) == [T_B, T_A]


def test_going_back_to_a_savepoint_takes_tables_back(one: psycopg.Connection) -> None:
    with one.transaction():
        one.execute("SAVEPOINT before")
        one.execute("CREATE TEMP TABLE t (b int, a int)")
        assert named(one, BOTH) == [("pg_temp.t", "b"), ("pg_temp.t", "a")]
        one.execute("ROLLBACK TO SAVEPOINT before")
        assert named(one, BOTH) == [T_B, T_A]


async def test_a_table_is_looked_up_once() -> None:
    sql_server = tierkv_sql()
    client = ClientInfo(user="alice", database="main")
    sessions = [await sql_server.open_session(client) for _ in range(2)]
    asked: list[str] = []
    numbers = TableNumbers()
    for session in sessions:
        watch(session, asked)
    await sessions[0].execute("CREATE TABLE once (a int)")
    await numbers.learn("SELECT a FROM once", sessions[1])
    assert len(asked) == 1
    for session in sessions[1:] * 3:
        await session.execute("BEGIN")
        await numbers.learn("SELECT a FROM once", session)
        await numbers.learn("SELECT 1, count(*) FROM never", session)
        await session.execute("COMMIT")
    assert len(asked) == 1
    await sql_server.close()


def watch(session: Any, asked: list[str]) -> None:
    """Note what a session is asked to run for the front."""
    run = session.execute_own

    async def noting(sql: str) -> Any:
        asked.append(sql)
        return await run(sql)

    session.execute_own = noting
