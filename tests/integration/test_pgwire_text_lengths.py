"""``varchar(n)`` and ``char(n)`` beside a real PostgreSQL: SQLSTATEs, rows, catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.fix_pgwire import running_pgwire
from tests.fix_postgres import PostgresServer

pytestmark = pytest.mark.integration

COLUMNS = """
SELECT attname, typname, atttypmod, format_type(atttypid, atttypmod), attnotnull
FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
WHERE attrelid = '{0}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum;
SELECT column_name, data_type, character_maximum_length, character_octet_length, udt_name
FROM information_schema.columns WHERE table_name = '{0}' ORDER BY ordinal_position;
SELECT contype, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{0}'::regclass
AND contype = 'c';
SELECT relchecks FROM pg_class WHERE oid = '{0}'::regclass;
SELECT * FROM {0} ORDER BY 1
"""

STORIES = {
    "insert": """
CREATE TABLE t (id int PRIMARY KEY, v varchar(5) DEFAULT 'x' NOT NULL,
  w character varying(3) UNIQUE, c text CHECK (length(c) < 9), n national character varying(4));
INSERT INTO t VALUES (1, 'abcde', 'äöü', 'c', 'nnnn');
INSERT INTO t VALUES (2, 'abcdef', 'x', 'c', 'n');
INSERT INTO t VALUES (2, 'a', 'xxxx', 'c', 'n');
INSERT INTO t VALUES (2, 'a', 'x', '123456789', 'n');
INSERT INTO t VALUES (2, 'a', 'x', 'c', 'nnnnn');
INSERT INTO t VALUES (3, '12345', NULL, NULL, NULL);
INSERT INTO t (id, v, w) SELECT 7, 'abcdefg', 'y';
INSERT INTO t (id, v) VALUES (9, 'abcdefg') ON CONFLICT (id) DO NOTHING;
INSERT INTO t (id, v) VALUES (3, 'abc') ON CONFLICT (id) DO UPDATE SET v = 'abcdefg';
UPDATE t SET v = v || '1' WHERE id = 1;
UPDATE t SET v = 'short' WHERE id = 1;
INSERT INTO t (id) VALUES (4)""",
    "quoted": """
CREATE TABLE t (id int, "My Col" varchar(3), "x""y" varchar(2));
INSERT INTO t VALUES (1, 'abc', 'ab');
INSERT INTO t VALUES (1, 'abcd', 'ab');
INSERT INTO t VALUES (1, 'abc', 'abc')""",
    "fixed": """
CREATE TABLE t (id int, c char(3), d character(2));
INSERT INTO t VALUES (1, 'abc', 'ab');
INSERT INTO t VALUES (2, 'abcd', 'ab')""",
    "no such length": """
CREATE TABLE t (v varchar(0));
CREATE TABLE t (v varchar(99999999));
CREATE TABLE t (v varchar(1))""",
    "renamed and dropped": """
CREATE TABLE s (id int, v varchar(3), w varchar(4), x int);
ALTER TABLE s RENAME COLUMN v TO u;
ALTER TABLE s DROP COLUMN w;
ALTER TABLE s DROP COLUMN x;
ALTER TABLE s RENAME TO t;
INSERT INTO t VALUES (1, 'abcd');
INSERT INTO t VALUES (1, 'abc')""",
    "names with schemas": """
CREATE TABLE public.t (id int, v varchar(3));
ALTER TABLE ONLY public."t" ADD w int;
ALTER TABLE IF EXISTS nothing ADD v varchar(3);
ALTER TABLE nothing ADD v varchar(3);
INSERT INTO t VALUES (1, 'abcd', 2);
INSERT INTO t VALUES (1, 'abc', 2)""",
    "temporary": """
CREATE TEMP TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, 'abcd');
INSERT INTO t VALUES (1, 'abc')""",
    "in a transaction": """
BEGIN;
CREATE TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, 'abc');
SAVEPOINT s;
INSERT INTO t VALUES (2, 'abcd');
ROLLBACK TO s;
INSERT INTO t VALUES (3, 'de');
COMMIT""",
}


@pytest.fixture(scope="module")
def doors(postgres: PostgresServer) -> Iterator[list[psycopg.Connection[Any]]]:
    """Both are empty: PostgreSQL's other databases hold what other tests left there."""
    with psycopg.connect(postgres.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE text_lengths")
    with (
        running_pgwire() as running,
        psycopg.connect(running.dsn, autocommit=True, prepare_threshold=None) as ours,
        psycopg.connect(
            postgres.dsn, dbname="text_lengths", autocommit=True, prepare_threshold=None
        ) as theirs,
    ):
        yield [ours, theirs]


def answer(door: psycopg.Connection[Any], sql: str) -> Any:
    """What a statement gives: rows, a tag or an error's state and message."""
    try:
        cursor = door.execute(sql.encode())
    except psycopg.Error as error:
        told = error.diag.message_primary if error.sqlstate == "22001" else ""
        return error.sqlstate, told
    return cursor.statusmessage, cursor.fetchall() if cursor.description else None


@pytest.mark.parametrize("story", STORIES)
def test_lengths_are_as_in_postgresql(story: str, doors: list[psycopg.Connection[Any]]) -> None:
    statements = [one.strip() for one in (STORIES[story] + ";" + COLUMNS.format("t")).split(";")]
    told = []
    for door in doors:
        door.execute("DROP TABLE IF EXISTS t")
        told.append([(sql, answer(door, sql)) for sql in statements])
        if door.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            door.execute("ROLLBACK")
    assert told[0] == told[1]


def test_what_alter_table_can_not_do_is_said(doors: list[psycopg.Connection[Any]]) -> None:
    ours, told = doors[0], []
    ours.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
    ours.execute("DROP TABLE IF EXISTS t")
    ours.execute("CREATE TABLE t (id int, v varchar(3))")
    ours.execute("ALTER TABLE t ADD COLUMN w varchar(2)")
    assert len(told) == 1 and 'length of column "w" is ignored' in told[0]
    ours.execute("INSERT INTO t VALUES (1, 'abc', 'as long as it takes')")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="Create a new table") as refused:
        ours.execute("ALTER TABLE t ALTER v TYPE varchar(5)")
    assert refused.value.sqlstate == "0A000"
    ours.execute("CREATE TABLE own (v text CHECK (length(v) <= 5))")
    with pytest.raises(psycopg.errors.CheckViolation):
        ours.execute("INSERT INTO own VALUES ('abcdef')")
