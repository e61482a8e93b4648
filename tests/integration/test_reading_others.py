"""Statements of a user who tries to read or copy a table of another user: none shows a value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_roles import Roles

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
VALUE = "hunter2"
PASSWORD = "a password"


class Logins(Roles):
    """A front with two users, and no compute node."""

    def __init__(self, folder: Path) -> None:
        users = json.dumps(dict.fromkeys(("boss", "ann", "bob"), PASSWORD))
        environment = {"TIERKV_FRONT_USERS": users}
        super().__init__(folder, {"front": ["front.admins=boss"]}, environment=environment)

    def connect(self, user: str) -> psycopg.Connection:
        """Log in."""
        return psycopg.connect(
            host="127.0.0.1", port=self.pg_port, user=user, password=PASSWORD, dbname="main",
            autocommit=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logins]:
    roles = Logins(tmp_path_factory.mktemp("reading"))
    try:
        roles.start("meta", "front")
        with roles.connect("boss") as boss:
            boss.execute("CREATE SCHEMA ann")
            boss.execute("CREATE SCHEMA bob")
        with roles.connect("ann") as ann:
            ann.execute("CREATE TABLE ann.secret (id int PRIMARY KEY, body text)")
            ann.execute(f"INSERT INTO ann.secret VALUES (1, '{VALUE}')")
            ann.execute("CREATE MACRO ann.told() AS (SELECT max(body) FROM ann.secret)")
            ann.execute("CREATE VIEW ann.shown AS SELECT * FROM ann.secret")
        with roles.connect("bob") as bob:
            bob.execute("CREATE TABLE bob.own (id int, body text)")
            bob.execute("INSERT INTO bob.own VALUES (1, 'mine')")
        yield roles
    finally:
        roles.stop()


@pytest.mark.parametrize(
    "sql",
    [
        "TABLE ann.secret",
        "SELECT * FROM ann\u00a0.\u3000secret",
        "SELECT 1 AS a$$, body FROM ann.secret --$$",
        "SELECT 1--\r, body FROM ann.secret",
        "WITH ann AS (SELECT 1 x) SELECT ann.x, (SELECT max(body) FROM ann.secret) FROM ann",
        "SELECT l.* FROM bob.own o, LATERAL (FROM ann.secret s WHERE s.id = o.id) l",
        "WITH RECURSIVE r AS (SELECT '' b UNION SELECT body FROM r, ann.secret) FROM r",
        "FROM (PIVOT ann.secret ON id USING max(body))",
        "SUMMARIZE ann.secret",
        "SELECT ann.told()",
        "FROM ann.shown",
        "FROM query('FROM an' || 'n.secret')",
        "FROM query_table('a\"n\"n.secret')",
        "FROM histogram(ann.secret, body)",
        'FROM histogram("ann.secret", body)',
        "FROM bob.own, system.main.histogram_values('an' || 'n.secret', body)",
        "FROM bob.own JOIN histogram_values(col_name := body, source := 'ann.secret') ON true",
        "FROM duckdb_table_sample('ann.secret')",
        "CREATE MACRO bob.any_histogram(t, c) AS TABLE FROM histogram_values(t, c)",
        "CREATE VIEW bob.copied AS FROM histogram_values('an' || 'n.secret', body)",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('FROM ann.secret'))",
        "SET VARIABLE v = (SELECT max(body) FROM ann.secret)",
        "MERGE INTO bob.own o USING ann.secret s ON s.id = o.id WHEN MATCHED THEN UPDATE "
        "SET body = s.body",
        "DELETE FROM bob.own USING ann.secret s RETURNING s.body",
        "UPDATE bob.own SET body = s.body FROM ann.secret s",
        "CREATE TEMP TABLE taken AS FROM ann.secret",
        "CREATE TYPE bob.kinds AS ENUM (SELECT body FROM ann.secret)",
        "CREATE TABLE bob.keyed (id int REFERENCES ann.secret (id))",
        "PREPARE p AS FROM ann.secret",
        "DECLARE c CURSOR FOR SELECT * FROM ann.secret",
        "COPY (FROM ann.secret) TO STDOUT",
        "EXPORT DATABASE 'x'",
        "COPY FROM DATABASE memory TO temp",
        "PRAGMA copy_database('memory', 'temp')",
        "FROM read_text('/proc/self/environ')",
        "CALL enable_logging('QueryLog')",
        'SET search_path = "an""n"',
        "SET search_path = 'an\"\"n'",
        "EXPLAIN ANALYZE SELECT ai_generate(body) FROM ann.secret",
        "SELECT ai_generate('x', documents => (SELECT list(body) FROM ann.secret))",
        "CREATE AI TABLE kept AS SELECT id, ai_generate(body) AS b FROM ann.secret WITH (key = id)",
        "CREATE KV INDEX found ON ann.secret (body)",
    ],
)
def test_a_statement_shows_nothing_of_another_user(front: Logins, sql: str) -> None:
    with front.connect("bob") as bob:
        with pytest.raises(psycopg.Error) as refused:
            bob.execute(sql)
        assert refused.value.sqlstate in ("42501", "42601", "42704", "0A000", "25P01")
        assert VALUE not in str(refused.value)
        with pytest.raises(psycopg.errors.UndefinedTable):
            bob.execute("SELECT * FROM secret")
        assert bob.execute("FROM bob.own").fetchall() == [(1, "mine")]


def test_an_aggregate_of_the_name_is_an_aggregate(front: Logins) -> None:
    with front.connect("bob") as bob:
        counted = bob.execute("SELECT id, histogram(upper(body)) FROM own GROUP BY id").fetchall()
        assert [row[0] for row in counted] == [1] and "MINE" in str(counted)
        assert bob.execute("SELECT bin FROM histogram('own', body)").fetchall() == [("mine",)]


def test_a_trigger_would_run_in_anothers_session(front: Logins) -> None:
    with front.connect("bob") as bob:
        bob.execute("CREATE TABLE main.shared (id int)")
        bob.execute("CREATE TABLE bob.secret (id int, body text)")
        for verb in ("CREATE", "CREATE OR REPLACE", "EXPLAIN ANALYZE CREATE"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="trigger"):
                bob.execute(
                    f"{verb} TRIGGER t AFTER INSERT ON main.shared FOR EACH STATEMENT "
                    "INSERT INTO bob.own SELECT id, body FROM secret"
                )
        bob.execute("DROP TABLE bob.secret")
        with front.connect("ann") as ann:
            ann.execute("INSERT INTO main.shared VALUES (1)")
        assert bob.execute("FROM bob.own").fetchall() == [(1, "mine")]
        bob.execute("DROP TABLE main.shared")
