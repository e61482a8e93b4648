"""Which statements are streamed, in which texts, and why the others are not."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.text.clauses import conjunct_ranges, select_clauses
from tierkv.sql.text.lexer import tokenize


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SELECT count(ai_generate(b)) FROM t", "an aggregate needs all rows"),
        ("SELECT any_value(g), ai_generate('x') FROM t", "an aggregate needs all rows"),
        ("SELECT row_number() OVER (), ai_generate(b) FROM t", "window functions need all rows"),
        ("SELECT unnest(l), ai_generate(b) FROM t", "UNNEST in its select list adds rows"),
        ("SELECT DISTINCT ai_generate(b) FROM t", "DISTINCT needs all rows"),
        ("SELECT ai_generate(b) FROM t GROUP BY b", "GROUP BY needs all rows"),
        ("SELECT b FROM t QUALIFY ai_filter(b)", "QUALIFY needs all rows"),
        ("SELECT ai_generate(b) FROM t UNION SELECT 'a'", "it is not one plain SELECT"),
        ("SELECT b FROM t ORDER BY ai_score('x', b)", "an AI call is in ORDER BY"),
        ("SELECT t.b FROM t JOIN u ON ai_filter(t.b || u.b)", "an AI call is in JOINS"),
        ("SELECT x FROM (SELECT ai_generate(b) AS x FROM t)", "an AI call is in FROM"),
        (
            "WITH w AS (SELECT ai_generate(b) AS x FROM t) SELECT * FROM w",
            "an AI call is in WITH",
        ),
        (
            "SELECT ai_generate(b) AS v FROM t ORDER BY v",
            '"v" may refer to an AI answer elsewhere',
        ),
        ("SELECT b, ai_generate(b) FROM t ORDER BY 2", "ORDER BY needs all answers"),
        ("SELECT *, ai_generate(b) FROM t ORDER BY 2", "its ORDER BY may order by answers"),
        ("SELECT ai_generate(b) FROM t ORDER BY ai_generate", '"ai_generate" may refer to'),
        ("SELECT ai_generate(ai_generate(b)) FROM t", "an AI call is an argument of another"),
        ("SELECT mine(ai_generate(b)) FROM t", "an AI call is inside mine()"),
        ("SELECT ai_generate(b)::TIMESTAMPTZ FROM t", "an answer is cast to TIMESTAMPTZ"),
        ("SELECT mine(b), ai_generate('a') FROM t", "a function in its select list may be an agg"),
        ("SELECT a / 2 FROM t WHERE ai_filter(b)", "a / 2 may fail for rows that don't need it"),
        ("SELECT CASE WHEN a > 0 THEN ai_generate(b::INT) END FROM t", "CAST(b AS INT) may fail"),
        ("SELECT s = 7 AS k FROM t WHERE ai_filter(b)", "s = 7 may fail for rows that don't need"),
        ("SELECT s IN (1, 7) FROM t WHERE ai_filter(b)", "s IN (1, 7) may fail"),
        ("SELECT s = g FROM t WHERE ai_filter(b)", "s = g may fail"),
        ("SELECT s BETWEEN 1 AND 2 FROM t WHERE ai_filter(b)", "s BETWEEN 1 AND 2 may fail"),
        ("SELECT CASE s WHEN 7 THEN 1 END FROM t WHERE ai_filter(b)", "CASE s WHEN 7"),
        ("SELECT CASE WHEN s THEN 1 END FROM t WHERE ai_filter(b)", "CASE WHEN s THEN 1 END may"),
        ("SELECT NOT s FROM t WHERE ai_filter(b)", "NOT s may fail"),
        ("SELECT s = $1 FROM t WHERE ai_filter(b)", "s = $1 may fail"),
        (
            "SELECT CASE WHEN g > 0 THEN ai_generate(b || (s > 1)) END FROM t",
            "s > 1 may fail for rows that don't need it",
        ),
        ("SELECT b FROM t WHERE ai_filter(b) LIMIT $1 + 1", "its LIMIT is not a plain number"),
        (
            "SELECT a FROM (SELECT b COLLATE NOCASE AS b, a FROM t) WHERE ai_generate(b) = 'x'",
            "COLLATE may affect how an AI answer is compared",
        ),
        ("INSERT INTO t SELECT ai_generate(b) FROM t", "it writes"),
    ],
)
def test_why_a_statement_is_not_streamed(text: str, why: str) -> None:
    plan = plan_statement(text)
    assert plan.stream is None
    assert plan.why_not_stream.startswith(why)


@pytest.mark.parametrize(
    "item",
    [
        "s = 'a'",
        "s IN ('a', NULL)",
        "CASE s WHEN 'a' THEN g END",
        "s IS NULL OR NOT (s <> 'b')",
        "CASE WHEN s >= 'a' THEN b ELSE g END",
        "coalesce(s, '')",
        "g IS NOT NULL",
    ],
)
def test_what_compares_with_text_never_fails(item: str) -> None:
    assert plan_statement(f"SELECT {item} AS x FROM t WHERE ai_filter(b)").stream is not None


def test_the_base_query_and_the_windows_statements() -> None:
    plan = plan_statement(
        "SELECT t.*, CASE WHEN ai_filter('q', b) THEN g END AS x FROM t "
        "WHERE g > 1 AND NOT ai_filter(b) AND a BETWEEN 1 AND 2 ORDER BY g LIMIT 5 OFFSET 2"
    )
    stream = plan.stream
    assert stream is not None and plan.why_not_stream == ""
    assert " ".join(stream.base_sql.text.split()) == (
        "SELECT t.*, NULL AS tierkv_item_0 , CAST(b AS VARCHAR) AS tierkv_bound_0, "
        "CAST(b AS VARCHAR) AS tierkv_bound_1, CAST(g AS VARCHAR) AS tierkv_bound_2 FROM t "
        "WHERE g > 1 AND TRUE AND a BETWEEN 1 AND 2 ORDER BY g"
    )
    (only,) = stream.filters
    assert only.text == (
        "SELECT tierkv_n FROM tierkv_rows "
        "WHERE (NOT CAST(tierkv_ai_call_kept(1, tierkv_bound_0) AS BOOLEAN))"
    )
    assert stream.outputs_sql is not None
    assert stream.outputs_sql.text == (
        "SELECT CASE WHEN CAST(tierkv_ai_call(0, tierkv_bound_1) AS BOOLEAN) "
        "THEN tierkv_bound_2 END AS x FROM tierkv_rows ORDER BY tierkv_n"
    )
    assert (stream.limit, stream.offset) == (5, 2)


def test_a_limit_without_filters_is_the_engines() -> None:
    stream = plan_statement("SELECT ai_generate(b) FROM t LIMIT 5").stream
    assert stream is not None and stream.limit is None
    assert stream.base_sql.text.endswith("LIMIT 5")


@pytest.mark.parametrize(
    ("clauses", "limit", "offset"),
    [
        ("LIMIT $1", "1", 0),
        ("LIMIT CAST($1 AS INTEGER) OFFSET CAST($2 AS BIGINT)", "1", "2"),
        ("OFFSET ($2::int8) ROWS LIMIT 3::int", 3, "2"),
        ("OFFSET 2 ROWS FETCH NEXT 3 ROWS ONLY", 3, 2),
        ("FETCH FIRST ROW ONLY", 1, 0),
        ("LIMIT ALL OFFSET 4", None, 4),
        ("", None, 0),
    ],
)
def test_a_limit_counts_rows_that_passed(
    clauses: str, limit: int | str | None, offset: int | str
) -> None:
    stream = plan_statement(f"SELECT a FROM t WHERE ai_filter(b) ORDER BY a {clauses}").stream
    assert stream is not None
    assert stream.base_sql.text.rstrip().endswith("ORDER BY a")
    assert (stream.limit_name or stream.limit, stream.offset_name or stream.offset) == (
        limit,
        offset,
    )


@pytest.mark.parametrize("clause", ["LIMIT 5 %", "LIMIT CAST($1 AS TEXT)", "LIMIT 2 + 1"])
def test_other_limits_are_not_read(clause: str) -> None:
    assert plan_statement(f"SELECT a FROM t WHERE ai_filter(b) {clause}").stream is None


@pytest.mark.parametrize(("value", "limit"), [(3, 3), (Decimal("3"), 3), (None, None), (0, 0)])
def test_a_parameters_value_is_the_limit(value: object, limit: int | None) -> None:
    stream = plan_statement("SELECT a FROM t WHERE ai_filter(b) LIMIT $1 OFFSET $2").stream
    assert stream is not None
    bounded = stream.with_limits({"1": value, "2": None})
    assert bounded is not None and (bounded.limit, bounded.offset) == (limit, 0)
    for wrong in (-1, Decimal("1.5"), "3", True):
        assert stream.with_limits({"1": wrong, "2": 0}) is None


def test_parameters_side_by_side_are_no_quotes() -> None:
    text = "SELECT a||$1||$2 FROM t WHERE ai_filter($1||b,$2) AND a=$3 ORDER BY a LIMIT $4"
    stream = plan_statement(text).stream
    assert stream is not None and stream.limit_name == "4"


def test_postgresql_runs_it_whole() -> None:
    plan = plan_statement("SELECT ai_generate(b) FROM t", dialect=Dialect.POSTGRES)
    assert plan.stream is None and plan.why_not_stream


@pytest.mark.parametrize(
    ("predicate", "pieces"),
    [
        ("a AND b", ["a", "b"]),
        ("a OR b AND c", ["a OR b AND c"]),
        ("(a OR b) AND c", ["( a OR b )", "c"]),
        ("a BETWEEN 1 AND 2 AND b", ["a BETWEEN 1 AND 2", "b"]),
        ("CASE WHEN a AND b THEN c OR d END AND e", ["CASE WHEN a AND b THEN c OR d END", "e"]),
    ],
)
def test_predicates_are_cut_at_their_ands(predicate: str, pieces: list[str]) -> None:
    tokens = tokenize(predicate)
    ranges = conjunct_ranges(tokens, 0, len(tokens))
    assert [" ".join(t.text for t in tokens[first:last]) for first, last in ranges] == pieces


def test_clauses_of_a_select() -> None:
    tokens = tokenize("SELECT a, f(b, c) d FROM t JOIN u USING (x) WHERE a IS DISTINCT FROM b")
    clauses = select_clauses(tokens, 0)
    assert clauses is not None
    assert len(clauses.items) == 2 and len(clauses.conjuncts) == 1
    assert clauses.order is None and clauses.limits is None
    assert select_clauses(tokenize("FROM t"), 0) is None


def test_escaped_text_is_text() -> None:
    plan = plan_statement(
        r"SELECT ai_generate(body || E'\nQuestion: who?') || E'\n' FROM docs WHERE id > 3"
    )
    assert plan.stream is not None
