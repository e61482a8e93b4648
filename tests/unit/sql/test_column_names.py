"""What an unnamed column with an AI call is called; PostgreSQL must not see our function's name."""

from __future__ import annotations

import pytest

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("ai_generate(b)", "ai_generate"),
        ("(ai_generate(b))", "ai_generate"),
        ("((ai_score('q', b)))::int", "ai_score"),
        ("ai_generate(b) COLLATE \"C\"", "ai_generate"),
        ("(ai_embed(b))[1]", "ai_embed"),
        ("CASE WHEN k THEN 'x' ELSE ai_generate(b) END", "ai_generate"),
        ("CASE WHEN k THEN ai_generate(b) ELSE 'x' END", ""),
        ("(ai_generate_detail(b)).value", ""),
        ("ai_generate(b) || 'x'", ""),
        ("upper(ai_generate(b))", ""),
        ("ai_generate(b) AS x", ""),
        ("(ai_generate(b)) x", ""),
    ],
)  # fmt: skip
def test_postgres_names_columns_as_if_the_functions_were_its_own(item: str, name: str) -> None:
    plan = plan_statement(f"SELECT {item} FROM t", dialect=Dialect.POSTGRES)
    added = f' AS "{name}" FROM t' if name else " FROM t"
    assert plan.engine_sql.text.endswith(added)
    assert plan.engine_sql.text.count(' AS "') == bool(name)


def test_a_column_of_select_into_has_a_name() -> None:
    plan = plan_statement("SELECT ai_generate(b) INTO u FROM t", dialect=Dialect.POSTGRES)
    assert plan.engine_sql.text.endswith(' AS "ai_generate" INTO u FROM t')


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("items", "tail"),
    [
        ("g, percentile_cont(0.5) WITHIN GROUP (ORDER BY i)", " GROUP BY g"),
        ("i AS order, p", " ORDER BY i"),
        ("g AS group, count(*)", " GROUP BY g"),
        ("t.limit, t.for", " ORDER BY t.where"),
    ],
)
def test_words_that_begin_no_clause(dialect: Dialect, items: str, tail: str) -> None:
    text = f"SELECT {items} FROM t WHERE ai_filter('q', p) AND ai_filter('r', p) AND g > 0{tail}"
    written = plan_statement(text, dialect=dialect).engine_sql.text
    assert written.startswith(f"SELECT {items} FROM t WHERE")
    assert written.endswith(f"END{tail}")


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("item", ["i AS union", "d1.for", "i AS returning", "d2.select"])
def test_names_that_end_no_select_list(dialect: Dialect, item: str) -> None:
    plan = plan_statement(f"SELECT {item}, ai_generate(b) FROM t", dialect=dialect)
    assert plan.engine_sql.text.endswith(' AS "ai_generate" FROM t')


def test_a_name_stands_in_front_of_on_conflict() -> None:
    tail = " ON CONFLICT (id) DO UPDATE SET a = excluded.a"
    plan = plan_statement(f"INSERT INTO u SELECT 'x', ai_generate('q'){tail}")
    assert plan.engine_sql.text.endswith(f' AS "ai_generate"{tail}')
