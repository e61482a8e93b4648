from __future__ import annotations

import pytest

from tierkv.dbfront.postgres_dialect.inference.open_parameters import (
    inferred_types,
    lookup_sql,
    parameter_uses,
)

COLUMNS = (("id", "INTEGER", 1), ("name", "VARCHAR", 2), ("at", "TIMESTAMP", 3))


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("INSERT INTO t VALUES ($1, $2, $3)", {1: "INTEGER", 2: "VARCHAR", 3: "TIMESTAMP"}),
        ("INSERT INTO t (at, id) VALUES ($1, $2), ($3, $4) RETURNING id",
         {1: "TIMESTAMP", 2: "INTEGER", 3: "TIMESTAMP", 4: "INTEGER"}),
        ("INSERT INTO t VALUES ($1 + 1, lower($2), 5)", {}),
        ("SELECT * FROM t WHERE id = $1 AND t.at >= $2", {1: "INTEGER", 2: "TIMESTAMP"}),
        ("SELECT * FROM t WHERE id + 1 = $1 OR abs(id) = $2 OR id = $3 * 2 OR id = $4::TEXT", {}),
        ("SELECT * FROM t WHERE id IN ($1, $2) AND at NOT IN ($3)",
         {1: "INTEGER", 2: "INTEGER", 3: "TIMESTAMP"}),
        ("SELECT * FROM t WHERE id BETWEEN $1 AND $2", {1: "INTEGER", 2: "INTEGER"}),
        ("UPDATE t SET at = $1, name = 'x' WHERE (id = $2)", {1: "TIMESTAMP", 2: "INTEGER"}),
        ("SELECT * FROM t LIMIT $1 OFFSET $2", {1: "BIGINT", 2: "BIGINT"}),
        ("SELECT $1 || name, f($2) FROM t", {}),
        ("SELECT * FROM t WHERE name || at = $1", {}),
    ],
)  # fmt: skip
def test_what_is_inferred(sql: str, expected: dict[int, str]) -> None:
    assert inferred_types(parameter_uses(sql), COLUMNS) == expected


def test_a_name_with_two_types_tells_nothing() -> None:
    uses = parameter_uses("SELECT * FROM t JOIN u ON true WHERE id = $1")
    assert inferred_types(uses, (*COLUMNS, ("id", "UUID", 1))) == {}


def test_tables_are_looked_up_by_name_and_schema() -> None:
    uses = parameter_uses('SELECT * FROM sales.t, range(3) JOIN "O\'x" ON a = $1')
    assert uses.tables == {("sales", "t"), ("", "O'x")}
    assert "lower('O''x')" in lookup_sql(uses)
    assert "lower(schema_name) = lower('sales')" in lookup_sql(uses)
    assert parameter_uses("INSERT INTO a.t (x) VALUES ($1)").tables == {("a", "t")}
