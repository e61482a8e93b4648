"""Which statements may stop at their LIMIT while filters are unanswered."""

from __future__ import annotations

import pytest

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("where", "stops"),
    [
        ("ai_filter('q', b)", True),
        ("NOT ai_filter('q', b)", True),
        ("(ai_filter('q', b)) AND k > 1", True),
        ("ai_score('q', b) > 0.5 AND ai_generate(b) LIKE 'a%'", True),
        ("'x' IN (ai_generate(b), 'y')", True),
        ("NOT ai_generate(b) IN ('x', 'y')", True),
        ("ai_filter('q', b) IS NOT NULL", True),
        ("NOT (ai_filter('q', b) IS NULL)", True),
        ("ai_filter('q', b) IS NULL", False),
        ("NOT (ai_filter('q', b) IS NOT NULL)", False),
        ("ai_filter('q', b) IS NOT TRUE", False),
        ("ai_filter('q', b) OR k > 1", False),
        ("coalesce(ai_filter('q', b), TRUE)", False),
        ("ai_generate(b) IS DISTINCT FROM 'x'", False),
        ("CASE WHEN ai_filter('q', b) THEN FALSE ELSE TRUE END", False),
        ("ai_filter(ai_generate(b))", False),
        ("k IN (SELECT k FROM u WHERE ai_filter('q', u.b))", False),
        ("NOT EXISTS (SELECT 1 FROM u WHERE ai_filter('q', u.b))", False),
    ],
)
def test_filters_that_need_an_answer_may_stop(dialect: Dialect, where: str, stops: bool) -> None:
    plan = plan_statement(f"SELECT k FROM t WHERE {where} LIMIT 3", dialect=dialect)
    assert plan.stop_after_rows == (3 if stops else None)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("items", "stops"),
    [
        ("unnest(ai_classify_multi(b, ARRAY['a', 'b']))", True),
        ("k, unnest(ai_classify_multi(b, ARRAY['a', 'b'])) AS x", True),
        ("ai_generate(b), unnest(ai_classify_multi(b, ARRAY['a', 'b']))", False),
        ("unnest(ai_classify_multi(b, ARRAY['a', 'b'])), unnest(l)", False),
        ("unnest(coalesce(ai_classify_multi(b, ARRAY['a', 'b']), l))", False),
    ],
)
def test_one_unnest_of_answers_may_stop(dialect: Dialect, items: str, stops: bool) -> None:
    plan = plan_statement(f"SELECT {items} FROM t LIMIT 3", dialect=dialect)
    assert plan.stop_after_rows == (3 if stops else None)
    assert plan.stops_early == (stops and dialect is Dialect.POSTGRES)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT k FROM t WHERE ai_filter('q', b) ORDER BY k LIMIT 3",
        "SELECT DISTINCT k FROM t WHERE ai_filter('q', b) LIMIT 3",
        "SELECT count(*) FROM t WHERE ai_filter('q', b) LIMIT 3",
        "SELECT k FROM t WHERE ai_filter('q', b) GROUP BY k LIMIT 3",
        "SELECT row_number() OVER () FROM t WHERE ai_filter('q', b) LIMIT 3",
        "SELECT k FROM (SELECT * FROM t WHERE ai_filter('q', b)) LIMIT 3",
        "SELECT k FROM t WHERE ai_filter('q', b) UNION ALL SELECT 1 LIMIT 3",
    ],
)
def test_what_needs_all_rows_does_not_stop(text: str) -> None:
    assert plan_statement(text).stop_after_rows is None
