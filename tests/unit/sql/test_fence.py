"""What keeps an AI filter above PostgreSQL's joins, and what it reads to do so."""

from __future__ import annotations

import pytest

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement


@pytest.mark.parametrize(
    ("text", "fence"),
    [
        ("SELECT d.id FROM docs d JOIN topics t ON t.id = d.topic", '"d"."id", "t"."id"'),
        ("SELECT 1 FROM t JOIN (VALUES (1)) v(x) ON v.x = T.Y", '"t"."y", "v"."x"'),
        ('SELECT "D"."Id", t.a FROM docs "D", t', '"D"."Id", "t"."a"'),
        ("SELECT 1 FROM t, generate_series(1, 5) g", '"t"."b", "g".*'),
        ("SELECT t.* FROM t JOIN u USING (i)", '"t"."b", "u"."i"'),
        ("SELECT t.* FROM t JOIN u ON g = k", '"t"."b", "g", "k"'),
        ("WITH u AS (SELECT 1) SELECT 1 FROM t, u", '"t"."b", "u".*'),
    ],
)
def test_a_fence_reads_what_is_read_anyway(text: str, fence: str) -> None:
    plan = plan_statement(f"{text} WHERE ai_filter('q', t.b)", dialect=Dialect.POSTGRES)
    assert f"pg_catalog.num_nulls({fence}) OPERATOR(pg_catalog.>=) 0 THEN" in plan.engine_sql.text


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("SELECT 1 FROM t", Dialect.POSTGRES),
        ("SELECT 1 FROM t JOIN (u JOIN v USING (i)) USING (i)", Dialect.POSTGRES),
        ("SELECT (SELECT max(u.x) FROM v u) FROM t, u", Dialect.POSTGRES),
        ("SELECT 1 FROM a.t JOIN b.t ON a.t.i = b.t.i", Dialect.POSTGRES),
        ("SELECT 1 FROM t JOIN u USING (i)", Dialect.DUCKDB),
    ],
)
def test_there_may_be_none(text: str, dialect: Dialect) -> None:
    plan = plan_statement(f"{text} WHERE ai_filter('q', t.b)", dialect=dialect)
    assert "num_nulls" not in plan.engine_sql.text
