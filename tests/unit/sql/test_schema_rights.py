"""Tables of other users in statements: found by name, told from columns, never missed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.differential.grammar import Dialect, Grammar
from tests.differential.shapes import queries as odd_queries
from tests.differential.shapes import writes as odd_writes
from tierkv.kvcore.errors import SqlError
from tierkv.sql.schema_rights import foreign_tables, made_schema, name_readers
from tierkv.sql.text.lexer import name_value, tokenize

FOREIGN = frozenset({"ann", "sales"})
OWNER = ""


def uses(sql: str) -> list[tuple[str, str]]:
    """Return each table, and the privileges needed; OWNER if none can be granted."""
    return [
        (f"{use.schema}.{use.table}", " ".join(sorted(use.privileges)) or OWNER)
        for use in foreign_tables(sql, tokenize(sql), FOREIGN)
    ]


@pytest.mark.parametrize(
    ("sql", "privileges"),
    [
        ("SELECT * FROM ann.t", "SELECT"),
        ('SELECT * FROM memory."Ann" . t', "SELECT"),
        ("FROM ann.t SELECT x", "SELECT"),
        ("SELECT ann.t.x FROM ann.t POSITIONAL JOIN u", "SELECT"),
        ("VALUES ((SELECT x FROM ann.t))", "SELECT"),
        ("SELECT * FROM (SUMMARIZE ann.t)", "SELECT"),
        ("EXPLAIN SELECT $1 FROM ann.t WHERE x = $2", "SELECT"),
        ("CREATE VIEW v AS FROM ann.t", "SELECT"),
        ("INSERT INTO ann.t VALUES (1)", "INSERT"),
        ("INSERT INTO ann.t VALUES (1) RETURNING x", "INSERT SELECT"),
        ("INSERT OR REPLACE INTO ann.t VALUES (1)", "INSERT SELECT UPDATE"),
        ("WITH w AS (INSERT INTO ann.t VALUES (1)) SELECT 1", "INSERT"),
        ("UPDATE ann.t SET x = 1", "UPDATE"),
        ("UPDATE ann.t SET x = 1 WHERE x = 2", "SELECT UPDATE"),
        ("UPDATE ann.t SET x = DEFAULT, y = $1", "UPDATE"),
        ("UPDATE ann.t SET x = o.x FROM own o", "UPDATE"),
        ("UPDATE ann.t SET x = CAST(y AS int)", "SELECT UPDATE"),
        ("UPDATE ann.t AS a SET x = error(a.y)", "SELECT UPDATE"),
        ("UPDATE ann.t SET x = error(t)", "SELECT UPDATE"),
        ("UPDATE ann.t SET x = error(COLUMNS('y'))", "SELECT UPDATE"),
        ("UPDATE ann.t SET x = (SELECT y)", "SELECT UPDATE"),
        ("UPDATE ann.t SET (x, z) = (SELECT 1, y)", "SELECT UPDATE"),
        ("DELETE FROM ann.t WHERE x = 2", "DELETE SELECT"),
        ("MERGE INTO ann.t USING s ON t.a = s.a WHEN MATCHED THEN DELETE",
         "DELETE INSERT SELECT UPDATE"),
        ("TABLE ann.t", OWNER),
        ("SELECT * FROM (TABLE ann.t)", OWNER),
        ("PIVOT ann.t ON x", OWNER),
        ("DESCRIBE ann.t", OWNER),
        ("TRUNCATE ann.t", OWNER),
        ("CREATE TABLE ann.t AS SELECT 1", OWNER),
        ("CREATE INDEX i ON ann.t (x)", OWNER),
        ("CREATE MACRO m() AS TABLE FROM ann.t", OWNER),
        ("COMMENT ON TABLE ann.t IS 'x'", OWNER),
        ("COPY ann.t TO 'x'", OWNER),
        ("SELECT 'a'::ann.t", OWNER),
        ("SELECT ann.t(1)", OWNER),
        ("SET VARIABLE x = (SELECT max(a) FROM ann.t)", "SELECT"),
        ("SET SESSION VARIABLE x TO (FROM ann.t)", "SELECT"),
        ("SET VARIABLE x = list(ann.t(1))", OWNER),
    ],
)  # fmt: skip
def test_a_table_needs_these_privileges(sql: str, privileges: str) -> None:
    assert uses(sql) == [("ann.t", privileges)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sales.amount FROM main.sales",
        "WITH ann AS (SELECT 1 x) SELECT ann.x, ann.* FROM ann",
        "SELECT 'ann.t' /* ann.t */ -- ann.t",
        "SELECT * FROM query_table('t')",
        "SELECT * FROM query('SELECT 1')",
        "SHOW TABLES FROM ann",
        "SET x = 'ann'",
        "SET VARIABLE ann = 'ann.t'",
        "SET VARIABLE x",
        "SELECT 1",
        "",
    ],
)
def test_columns_texts_and_own_tables_are_none_of_them(sql: str) -> None:
    assert uses(sql) == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM query('FROM ann.t')",
        "SELECT * FROM query('FROM an' || 'n.t')",
        "SELECT * FROM query('FROM query(''FROM an'' || ''n.t'')')",
        "SELECT * FROM query(e'FROM \\x61nn.t')",
        "SELECT * FROM query_table('ANN.t')",
        "SELECT * FROM query_table(['t', 'ann.u'])",
        "SELECT * FROM query_table(getvariable('t'))",
        "SELECT json_serialize_plan('FROM query_table(''an'' || ''n.t'')')",
        "SELECT json_execute_serialized_sql('{}')",
        "CALL pragma_storage_info('ann.t')",
        "SELECT nextval('ann.s')",
        "SELECT * FROM duckdb_table_sample('ann.t')",
        "FROM histogram(ann.t, x)",
        "FROM histogram('an' || 'n.t', x)",
        'FROM a JOIN b ON true, histogram_values("ann.t", x)',
        "FROM a JOIN b USING (x), histogram_values(source := 't', col_name := x)",
        "CREATE MACRO m(t, c) AS TABLE FROM histogram(t, c)",
        "SELECT * FROM query_table('a\"n\"n.t')",
    ],
)
def test_text_that_may_name_a_table_is_refused(sql: str) -> None:
    with pytest.raises(SqlError) as caught:
        uses(sql)
    assert caught.value.sqlstate == "42501" and caught.value.position


@pytest.mark.parametrize(
    "sql",
    ["SET search_path = 'main,ann'", "SET search_path = 'a\"\"nn'", "SET schema = \"a\"\"nn\"",
     "SET schema = ann", "USE memory.ann", "USE ann",
     "PRAGMA storage_info('ann.t')", "DROP SCHEMA ann CASCADE", "ALTER SCHEMA ann RENAME TO b",
     "EXPORT DATABASE 'x'"],
)  # fmt: skip
def test_a_schema_is_the_owners(sql: str) -> None:
    ((name, privileges),) = uses(sql)
    assert (name, privileges) == ("ann.", OWNER)


def test_what_computes_names_is_refused_wherever_it_is_named() -> None:
    readers = name_readers(
        [
            ("fixed", "CREATE VIEW fixed AS SELECT * FROM query_table('t')"),
            ("chosen", "CREATE VIEW chosen AS SELECT * FROM query_table(getvariable('t'))"),
            ("rows_of", "SELECT * FROM query_table(name)"),
            ("above", "SELECT count(*) FROM rows_of(name)"),
            ("plain", "SELECT a + 1"),
        ]
    )
    assert readers == {"chosen", "rows_of", "above"}
    for sql in ("FROM chosen", "FROM Above('x')", "SELECT * FROM main.rows_of('t')"):
        with pytest.raises(SqlError):
            foreign_tables(sql, tokenize(sql), FOREIGN, readers)
        assert foreign_tables(sql, tokenize(sql), frozenset(), readers) == []
    sql = "CREATE TEMP MACRO mine(x) AS TABLE FROM query_table(x)"
    with pytest.raises(SqlError):
        foreign_tables(sql, tokenize(sql), frozenset())


def test_the_name_of_a_new_schema() -> None:
    for sql in ("CREATE SCHEMA bob", "create schema if not exists memory.bob"):
        token = made_schema(tokenize(sql))
        assert token is not None and name_value(token) == "bob"
    assert made_schema(tokenize("CREATE TABLE schema (a int)")) is None


def queries() -> st.SearchStrategy[str]:
    """Queries of one column, nested at random, each with ann.t somewhere."""
    base = st.sampled_from(["SELECT x FROM ann.t", 'FROM "ANN".t', "SELECT max(x) x FROM ann.t u"])
    return st.recursive(
        base,
        lambda inner: st.one_of(
            inner.map(lambda q: f"SELECT x FROM ({q}) AS ann"),
            inner.map(lambda q: f"WITH ann AS ({q}) SELECT ann.x FROM ann"),
            inner.map(lambda q: f"SELECT ({q} LIMIT 1) AS x"),
            inner.map(lambda q: f"SELECT 1 AS x WHERE EXISTS ({q})"),
            inner.map(lambda q: f"({q}) UNION ALL SELECT x FROM main.sales AS sales"),
            inner.map(lambda q: f"SELECT sales.x FROM main.sales JOIN ({q}) AS b ON sales.x = b.x"),
            inner.map(lambda q: f"SELECT x FROM main.sales WHERE x IN ({q})"),
            inner.map(lambda q: f"SELECT list(x)[1] AS x FROM ({q}) HAVING count(*) > 0"),
        ),
        max_leaves=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as opened:
        opened.execute("CREATE SCHEMA ann; CREATE TABLE ann.t (x INT); CREATE TABLE sales (x INT)")
        yield opened


@settings(max_examples=150, deadline=None)
@given(queries())
def test_no_query_hides_a_table(engine: duckdb.DuckDBPyConnection, sql: str) -> None:
    engine.execute(sql)  # It is one that the engine runs.
    assert set(uses(sql)) <= {("ann.t", "SELECT"), ("ann.t", OWNER)} and uses(sql)


def odd_statements() -> list[str]:
    """The statements with which the doors are compared: odd ones, and random ones."""
    steps = odd_queries(Dialect.DUCKDB) + odd_writes(Dialect.DUCKDB)
    for seed in range(60):
        steps += Grammar(random.Random(seed), Dialect.DUCKDB).script()
    return [step.sql for step in steps]


_TABLE = re.compile(
    r"\b(FROM|JOIN|INTO|UPDATE|USING)(\s+)(t|u|w|docs|topics)\b(?!\s*\()(?=[\s,)]|$)", re.I
)


def test_odd_statements_name_their_tables_and_no_others() -> None:
    moved = 0
    for sql in odd_statements():
        for alias in ("t", "w", "d", "docs", "a", "x"):
            assert foreign_tables(sql, tokenize(sql), frozenset({alias})) == [], sql
        there, count = _TABLE.subn(r"\1\2ann.\3", sql)
        if count:
            moved += 1
            found = foreign_tables(there, tokenize(there), frozenset({"ann"}))
            assert len(found) == count and all(use.privileges for use in found), there
    assert moved > 200
