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
    "casts": """
CREATE TABLE t AS SELECT i::int AS id, ('row ' || i)::varchar(5)::text AS v
FROM generate_series(8, 11) g (i);
SELECT v::varchar(3), CAST(v || 'äöü' AS character varying(6)), NULL::varchar(3),
  '12'::varchar(3)::int FROM t ORDER BY id;
SELECT upper(v)::varchar(2), count(*) FROM t GROUP BY upper(v)::varchar(2);
SELECT CASE WHEN id = 8 THEN 'abc' ELSE v END::varchar(9), (ARRAY['abc'])[1]::varchar(2) FROM t
ORDER BY id;
UPDATE t SET v = 'abcdefg'::varchar(4) WHERE id = 8""",
    "fixed": """
CREATE TABLE t (id int, c char(3), d character(2));
INSERT INTO t VALUES (1, 'abc', 'ab');
INSERT INTO t VALUES (2, 'abcd', 'ab')""",
    "no such length": """
CREATE TABLE t (v varchar(0));
CREATE TABLE t (v varchar(99999999));
CREATE TABLE t (v varchar(1))""",
    "add a column": """
CREATE TABLE t (id int PRIMARY KEY, d int DEFAULT 3, k varchar(2), CHECK (d < 9));
INSERT INTO t VALUES (1, 1, 'a');
ALTER TABLE t ADD COLUMN v varchar(3) DEFAULT 'x';
INSERT INTO t VALUES (2, 2, 'b', 'abc');
INSERT INTO t VALUES (3, 3, 'c', 'abcd');
INSERT INTO t VALUES (3, 3, 'ccc', 'abc');
INSERT INTO t VALUES (3, 9, 'c', 'abc');
INSERT INTO t VALUES (1, 3, 'c', 'abc');
ALTER TABLE t ADD COLUMN IF NOT EXISTS v varchar(1);
ALTER TABLE t ADD COLUMN v varchar(1)""",
    "another length": """
CREATE TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, 'abc');
ALTER TABLE t ALTER COLUMN v TYPE varchar(5);
INSERT INTO t VALUES (2, 'abcde');
INSERT INTO t VALUES (3, 'abcdef');
ALTER TABLE t ALTER v SET DATA TYPE varchar(4);
INSERT INTO t VALUES (4, 'vwxyz');
ALTER TABLE t ALTER v TYPE text;
INSERT INTO t VALUES (5, 'as long as it takes');
ALTER TABLE t ALTER v TYPE varchar(40)""",
    "another type": """
CREATE TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, '12');
ALTER TABLE t ALTER COLUMN v TYPE int USING v::int;
INSERT INTO t VALUES (2, 1234);
ALTER TABLE t ALTER COLUMN v TYPE varchar(4) USING v::text;
INSERT INTO t VALUES (3, '12345')""",
    "in a transaction": """
BEGIN;
CREATE TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, 'abc');
ALTER TABLE t ADD COLUMN w varchar(2);
UPDATE t SET w = 'ab';
SAVEPOINT s;
INSERT INTO t VALUES (2, 'abcd', NULL);
ROLLBACK TO s;
INSERT INTO t VALUES (3, 'abc', 'de');
ALTER TABLE t ALTER COLUMN v TYPE varchar(9);
INSERT INTO t VALUES (4, 'abcdefghi', 'de');
COMMIT;
INSERT INTO t VALUES (5, 'abcdefghij', 'de')""",
    "rolled back": """
CREATE TABLE t (id int, v varchar(3));
INSERT INTO t VALUES (1, 'abc');
BEGIN;
ALTER TABLE t ALTER v TYPE varchar(5);
INSERT INTO t VALUES (2, 'abcde');
ROLLBACK;
INSERT INTO t VALUES (2, 'abcde')""",
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
ALTER TABLE public.t ADD w varchar(2);
ALTER TABLE ONLY public."t" ALTER v TYPE varchar(4);
ALTER TABLE IF EXISTS nothing ADD v varchar(3);
ALTER TABLE nothing ADD v varchar(3);
INSERT INTO t VALUES (1, 'abcd', 'ab')""",
    "temporary": """
CREATE TEMP TABLE t (id int, v varchar(3));
ALTER TABLE t ADD w varchar(2);
INSERT INTO t VALUES (1, 'abc', 'abc');
INSERT INTO t VALUES (1, 'abc', 'ab')""",
    "serial and views": """
CREATE TABLE t (id serial PRIMARY KEY, v varchar(3));
CREATE VIEW seen AS SELECT v FROM t;
INSERT INTO t (v) VALUES ('a'), ('b');
ALTER TABLE t ADD w varchar(2);
INSERT INTO t (v, w) VALUES ('c', 'cc');
SELECT * FROM seen ORDER BY 1;
DROP VIEW seen""",
}


@pytest.fixture(scope="module")
def doors(postgres: PostgresServer) -> Iterator[list[psycopg.Connection[Any]]]:
    with (
        running_pgwire() as running,
        psycopg.connect(running.dsn, autocommit=True, prepare_threshold=None) as ours,
        psycopg.connect(postgres.dsn, autocommit=True, prepare_threshold=None) as theirs,
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
