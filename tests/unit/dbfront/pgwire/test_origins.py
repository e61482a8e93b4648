"""Where output columns come from: the walk of the tree alone, over a look-up given by hand."""

from __future__ import annotations

import pytest

from tierkv.dbfront.postgres_dialect.catalog.table_numbers import _Catalogue, _Named
from tierkv.dbfront.postgres_dialect.inference.origins import origins, tables_of_output
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import Naming


def rows_of(oid: int, schema: str, table: str, *columns: str) -> list[tuple[object, ...]]:
    """What the look-up of a table returns (dbfront/postgres_dialect/catalog/table_numbers.py)."""
    return [
        (table, "db", schema, oid, name, at, "BIGINT" if name == "big" else "INTEGER")
        for at, name in enumerate(columns, start=1)
    ]


def tables() -> _Named:
    """Tables t and u of the search path, and a t of another schema."""
    catalogue = _Catalogue()
    path = ("[]", "db", "main", 0, "", 1, "")
    t = [*rows_of(1, "main", "t", "a", "b", "big"), *rows_of(3, "s", "t", "a")]
    catalogue.add(["t", "u", "unknown"], [path, *t, *rows_of(2, "main", "u", "a", "c")])
    return _Named(catalogue, Naming("db"))


def numbers(sql: str) -> str:
    """Write each column as table.column, or 0."""
    return " ".join(
        f"{one.origin.table_oid}.{one.origin.attnum}" if one.origin else "0"
        for one in origins(sql, tables())
    )


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a, t.b, t.* FROM t", "1.1 1.2 1.1 1.2 1.3"),
        ("SELECT * EXCLUDE (b) FROM t", "1.1 1.3"),
        ("SELECT * REPLACE (1 AS b) FROM t", ""),
        ("SELECT a FROM t, u", "0"),
        ("SELECT c, b FROM t, u", "2.2 1.2"),
        ("SELECT a, c FROM u JOIN t USING (a)", "2.1 2.2"),
        ("SELECT * FROM t RIGHT JOIN u USING (a)", "2.1 1.2 1.3 2.2"),
        ("SELECT a, t.a FROM t FULL JOIN u USING (a)", "0 1.1"),
        ("SELECT big FROM t JOIN (SELECT c AS big FROM u) x USING (big)", "0"),
        ("SELECT * FROM t NATURAL JOIN u", "1.1 1.2 1.3 2.2"),
        ("SELECT * FROM t JOIN u USING (a) JOIN (SELECT a FROM s.t) v USING (a)",
         "1.1 1.2 1.3 2.2"),
        ("SELECT * FROM t SEMI JOIN u USING (a)", ""),
        ("SELECT x, y FROM (SELECT b, 1 FROM t) AS q (x, y)", "1.2 0"),
        ("SELECT a FROM (SELECT c FROM u) q, t", "1.1"),
        ("SELECT * FROM (t JOIN u ON true)", "1.1 1.2 1.3 2.1 2.2"),
        ("WITH t AS (SELECT c FROM u) SELECT * FROM t", "2.2"),
        ("WITH q AS (SELECT a FROM t UNION SELECT a FROM u) SELECT a FROM q", "0"),
        ("WITH RECURSIVE q AS (SELECT a FROM t UNION SELECT a FROM q) SELECT q.a, u.a FROM q, u",
         "0 2.1"),
        ("SELECT s.t.a FROM s.t", "3.1"),
        ("SELECT s.t.a FROM t", "0"),
        ("SELECT t.a FROM t, s.t", ""),
        ("SELECT b FROM t, unknown", "1.2"),
        ("SELECT d FROM t, unknown", "0"),
        ("SELECT * FROM t, unknown", ""),
        ("SELECT t.*, unknown.a FROM t, unknown", "1.1 1.2 1.3 0"),
        ("SELECT unknown.* FROM t, unknown", ""),
        ("SELECT t, (t).a, -a, $1, a::int FROM t", "0 0 0 0 0"),
        ("SELECT COLUMNS('a'), b FROM t", "0 1.2"),
        ("SELECT t.*::text FROM t", ""),
        ("SELECT (SELECT a FROM t), l.z FROM u, LATERAL (SELECT u.c AS z) l", "0 2.2"),
        ("SELECT x FROM t, LATERAL (SELECT a AS x FROM unknown) l", "0"),
        ("SELECT * FROM t PIVOT (sum(a) FOR b IN (1, 2))", ""),
        ("SELECT a FROM t UNION SELECT a FROM u", "0"),
        ("(SELECT a FROM t) ORDER BY a", "1.1"),
        ("TABLE u", "2.1 2.2"),
        ("VALUES (1)", ""),
        ("INSERT INTO u (c) SELECT a FROM t RETURNING c, *", "2.2 2.1 2.2"),
        ("UPDATE u AS x SET c = 1 FROM t RETURNING x.c, a, b", "2.2 2.1 0"),
        ("DELETE FROM s.t RETURNING a + 1, t.a", "0 3.1"),
        ("WITH q AS (DELETE FROM u RETURNING c) SELECT * FROM q", "2.2"),
        ("CREATE TABLE x AS SELECT a FROM t", ""),
        ("SELECT FROM WHERE", ""),
    ],
)  # fmt: skip
def test_each_column_names_its_table_or_nothing(sql: str, expected: str) -> None:
    assert numbers(sql) == expected


def test_only_outputs_with_plain_columns_need_their_tables() -> None:
    assert tables_of_output("SELECT a FROM T JOIN s.u USING (a)") == {"t", "u"}
    assert tables_of_output("SELECT count(*), a + 1 FROM t") == frozenset()
    assert tables_of_output("INSERT INTO t SELECT a FROM u") == frozenset()
    assert tables_of_output("EXPLAIN SELECT a FROM t") == frozenset()
