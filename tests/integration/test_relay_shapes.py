"""Statements of odd shapes: the relay answers what PostgreSQL does with functions of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from hashlib import md5

import psycopg
import pytest

from tests.fix_postgres import PostgresServer, RunningRelay
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.contracts import PreparedCall, TextEvent

pytestmark = pytest.mark.integration

TABLES = """
DROP SCHEMA IF EXISTS shapes CASCADE;
CREATE SCHEMA shapes;
CREATE TABLE t (i int, g int, p text, f float8, d decimal(9,2), ts timestamp, b boolean);
INSERT INTO t SELECT x, x % 5,
  CASE WHEN x % 7 = 3 THEN NULL WHEN x % 11 = 5 THEN '' ELSE 'p ' || (x % 13) END,
  CASE WHEN x % 6 <> 1 THEN x / 3.0 END, x * 1.25,
  timestamp '2024-01-01' + x * interval '1 hour', CASE WHEN x % 3 <> 2 THEN x % 3 = 0 END
  FROM generate_series(1, 60) x;
CREATE TABLE u (k int, name text);
INSERT INTO u VALUES (0, 'sport'), (1, 'music'), (2, NULL), (7, 'food'), (3, 'p 3'), (3, 'p 4');
CREATE TABLE w (id int PRIMARY KEY, v text, n int DEFAULT 5);
INSERT INTO w SELECT x, 'v ' || (x % 4), x FROM generate_series(1, 12) x;
CREATE TABLE audit (n serial, what text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO audit (what) VALUES (TG_OP || coalesce(new.id, old.id)); RETURN NULL; END $$;
CREATE TRIGGER noting AFTER INSERT OR UPDATE OR DELETE ON w FOR EACH ROW EXECUTE FUNCTION note();
CREATE FUNCTION plain_generate(p text) RETURNS text LANGUAGE sql IMMUTABLE
  AS $$ SELECT 'a' || left(md5(p), 1) $$;
CREATE FUNCTION plain_filter(q text, t text) RETURNS boolean LANGUAGE sql IMMUTABLE
  AS $$ SELECT left(md5(t || E'\\nQuestion: ' || q || E'\\nAnswer yes or no.'), 1) < '8' $$;
"""

QUERIES = """
SELECT i, ai_generate(p) FROM t UNION SELECT k, ai_generate(name) FROM u
SELECT ai_generate(p) FROM t INTERSECT ALL SELECT ai_generate(name) FROM u
(SELECT i, ai_generate(p) FROM t ORDER BY 2, 1 LIMIT 5) UNION ALL SELECT k, name FROM u
SELECT t.i, u.name FROM t LEFT JOIN u ON t.g = u.k AND ai_filter('q', u.name)
SELECT t.i, u.name FROM t FULL JOIN u ON t.g = u.k WHERE ai_filter('q', u.name) IS NOT TRUE
SELECT t.i, u.name FROM t LEFT JOIN u ON ai_generate(t.p) = ai_generate(u.name)
SELECT t.i FROM t RIGHT JOIN u ON t.g=u.k WHERE ai_generate(t.p) IS NULL AND ai_filter('b', u.name)
SELECT i, (SELECT count(*) FROM u WHERE u.k = t.g AND ai_filter('q', u.name || t.i)) FROM t
SELECT i FROM t WHERE NOT EXISTS (SELECT 1 FROM u WHERE u.k = t.g AND ai_filter('q', u.name))
SELECT i FROM t WHERE ai_generate(p) NOT IN (SELECT ai_generate(name) FROM u WHERE k < 2)
SELECT i FROM t WHERE ai_generate(p) >= ALL (SELECT ai_generate(name) FROM u WHERE k < 2)
SELECT DISTINCT ON (g) g, i, ai_generate(p) FROM t ORDER BY g, ai_generate(p) NULLS LAST, i
SELECT ai_generate(p), g, count(*) FROM t GROUP BY GROUPING SETS ((ai_generate(p)), (g), ())
SELECT ai_generate(p), g, grouping(ai_generate(p)) FROM t GROUP BY ROLLUP (ai_generate(p), g)
SELECT * FROM ai_generate('x')
SELECT t.i, a.x FROM t LEFT JOIN LATERAL ai_generate(p) AS a(x) ON x > 'a5' AND ai_filter('q', x)
SELECT i, ai_generate FROM t, ai_generate(p) WHERE i IN (SELECT g FROM t) AND ai_generate > 'a2'
SELECT i AS tablesample, CAST(ai_generate(p) AS char(5)) FROM t WHERE ai_filter('q', p)
SELECT ai_generate(t.p || 'x'), count(*) FROM t GROUP BY ai_generate(("p") || E'x')
SELECT ai_generate('g' || g), count(*) FROM t GROUP BY ai_generate('g' || g::int)
SELECT DISTINCT ai_generate(p) FROM t ORDER BY ai_generate(t.p)
SELECT DISTINCT ON (ai_generate(p)) i FROM t ORDER BY ai_generate(t.p), i
SELECT g, ai_generate(min(p)) FROM t GROUP BY g HAVING ai_filter('h', max(p))
SELECT g, count(*) FILTER (WHERE ai_filter('h', p)), count(DISTINCT ai_generate(p)) FROM t GROUP
 BY g
SELECT i, row_number() OVER (PARTITION BY ai_generate(p) ORDER BY i) FROM t
SELECT i, ai_generate(lag(p) OVER (ORDER BY i)), lag(ai_generate(p)) OVER (ORDER BY i) FROM t
WITH c AS (SELECT i, g, ai_generate(p) AS a FROM t) SELECT x.i, y.i FROM c x JOIN c y USING (a, g)
WITH RECURSIVE r(n, s) AS (SELECT 1, text 'x' UNION ALL SELECT n + 1, ai_generate(s || n) || n
 FROM r WHERE n < 9 AND ai_filter('go', s || n) IS NOT NULL) SELECT * FROM r
SELECT i, a FROM t LEFT JOIN LATERAL (SELECT ai_generate(t.p || u.name) AS a FROM u WHERE k = g)
 l ON true
SELECT i, CASE WHEN b THEN ai_generate(p) WHEN b IS NULL THEN ai_generate('n' || p) ELSE 'k' END
 FROM t
SELECT i, coalesce(ai_generate(p), ai_generate('none' || i)), nullif(ai_generate(p), 'a1') FROM t
SELECT i FROM t WHERE (ai_filter('a', p) OR b) AND NOT (ai_filter('b', p) AND g > 2)
SELECT i FROM t WHERE ai_filter('a', p) IS UNKNOWN OR ai_filter('b', p) IS DISTINCT FROM b
SELECT i FROM t WHERE CASE WHEN g <> 2 THEN i / (g - 2) > 3 END AND ai_filter('a', p)
SELECT i, ai_generate(f::text), ai_generate(d::text), ai_generate(ts::text), ai_generate(b::text)
 FROM t
SELECT i, ai_generate(p || 'q') FROM t ORDER BY ai_generate(p) DESC NULLS LAST, i LIMIT 7 OFFSET 10
SELECT ai_generate(p) AS p, i FROM t WHERE p > 'p 3' ORDER BY p NULLS LAST, i FETCH FIRST 9 ROWS
 WITH TIES
SELECT count(*) FROM (SELECT i FROM t WHERE ai_filter('a', p) ORDER BY i LIMIT 10) s
SELECT (SELECT max(ai_generate(x.p || t.g)) FROM t x WHERE x.g = t.g) FROM t WHERE i < 9
SELECT g, string_agg(ai_generate(p), ',' ORDER BY ai_generate(p), i) FROM t GROUP BY g
SELECT ai_generate(ai_generate(ai_generate(p))) FROM t
SELECT x.i FROM (t JOIN u ON t.g = u.k) x(i) WHERE ai_filter('a', x.name) AND ai_filter('b', x.p)
SELECT i, generate_series(1, 2), ai_generate(p) FROM t WHERE ai_filter('a', p)
SELECT i FROM t WHERE (g, p) = (1, ai_generate(text 'x')) OR ai_filter('a', p) FOR UPDATE
"""

WRITES = """
UPDATE w SET v = ai_generate(v), n = n + 1 WHERE ai_filter('q', v) RETURNING id, v, n
UPDATE w AS x SET v = ai_generate(x.v || u.name) FROM u WHERE u.k = x.id AND k <> 3 RETURNING *
UPDATE w SET (v, n) = (SELECT ai_generate(p), i FROM t WHERE t.i = w.id)
UPDATE w SET v = ai_generate(v) WHERE id IN (SELECT id FROM w ORDER BY ai_generate(v), id LIMIT 4)
DELETE FROM w WHERE NOT ai_filter('q', v) AND ai_filter('z', id::text) RETURNING id, ai_generate(v)
DELETE FROM w USING u WHERE u.k = w.id AND ai_filter('f', u.name) RETURNING w.id
INSERT INTO w SELECT i + 100, ai_generate(p) FROM t WHERE ai_filter('q', p) RETURNING *,
 ai_generate(v)
INSERT INTO w VALUES (1, 'q'), (60, 'z') ON CONFLICT (id) DO UPDATE SET v =
 ai_generate(excluded.v || w.v)
INSERT INTO w VALUES (1, 'q') ON CONFLICT (id) DO UPDATE SET v = 'up' WHERE ai_filter('q',
 excluded.v)
INSERT INTO w VALUES (1, ai_generate(text 'taken'))
WITH gone AS (DELETE FROM w WHERE ai_filter('q', v) RETURNING *) SELECT max(ai_generate(v)) FROM
 gone
MERGE INTO w USING u ON k = id AND k <> 3 WHEN MATCHED AND ai_filter('q', name) THEN UPDATE SET v
 = ai_generate(name)
"""


class PlainAnswers(InstantGenerator):
    """Answers what the functions ``plain_...`` do."""

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        assert prepared.call.messages is not None
        digest = md5(prepared.call.messages[-1].content.encode(), usedforsecurity=False).hexdigest()
        odds = (0.4, 0.4, 0.1, 0.1) if digest < "8" else (0.1, 0.1, 0.4, 0.4)
        async for event in super().stream(prepared):
            if event.label_probabilities:
                yield replace(event, label_probabilities=odds)
            else:
                yield replace(event, text=f"a{digest[0]}" if event.text else "")


@pytest.fixture
def generator() -> InstantGenerator:
    return PlainAnswers()


@pytest.fixture
def doors(
    postgres: PostgresServer, ai_relay: RunningRelay
) -> Iterator[tuple[psycopg.Connection, psycopg.Connection]]:
    with (
        psycopg.connect(postgres.dsn, autocommit=True) as direct,
        psycopg.connect(ai_relay.dsn, autocommit=True) as relayed,
    ):
        for connection in (direct, relayed):
            connection.execute("SET search_path = shapes")
        yield direct, relayed
        direct.execute("DROP SCHEMA shapes CASCADE")


def statements(text: str) -> list[str]:
    return text.strip().replace("\n ", " ").split("\n")


def plain(statement: str) -> str:
    return statement.replace("ai_", "plain_")


def outcome(connection: psycopg.Connection, statement: str) -> list[str]:
    """Rows in any order and the command tag, or the SQLSTATE."""
    try:
        cursor = connection.execute(statement)
        said = sorted(map(str, cursor.fetchall())) if cursor.description else []
        said.append(str(cursor.statusmessage))
    except psycopg.Error as error:
        said = [str(error.sqlstate)]
    return said


def test_queries(
    doors: tuple[psycopg.Connection, psycopg.Connection], generator: InstantGenerator
) -> None:
    direct, relayed = doors
    direct.execute(TABLES)
    for statement in statements(QUERIES):
        generator.calls.clear()
        expected = outcome(direct, plain(statement))
        assert len(expected) > 1, f"nothing is shown by {statement}: {expected}"
        assert outcome(relayed, statement) == expected, statement
        assert generator.calls and len(set(generator.calls)) == len(generator.calls), statement


@pytest.mark.parametrize("block", [False, True])
def test_writes(doors: tuple[psycopg.Connection, psycopg.Connection], block: bool) -> None:
    direct, relayed = doors
    for statement in statements(WRITES):
        results: list[list[list[str]]] = []
        for connection, text in ((direct, plain(statement)), (relayed, statement)):
            direct.execute(TABLES)
            if block:
                connection.execute("BEGIN; INSERT INTO u VALUES (11, 'mine'); SAVEPOINT before")
            said = outcome(connection, text)
            if block and len(said) == 1 and said[0].isdigit():
                connection.execute("ROLLBACK TO before")
            connection.execute("COMMIT" if block else "SELECT 1")
            tables = ("TABLE w", "SELECT what FROM audit", "TABLE u")
            results.append([said, *(outcome(direct, table) for table in tables)])
        assert results[0] == results[1], statement
