"""What is refused says where it stands in the user's text and what to do, in both dialects."""

from __future__ import annotations

import pytest

from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.call_sites import MAX_FORMS
from tierkv.sql.plan.plan import plan_statement


def refused(sql: str, dialect: Dialect) -> UserError:
    with pytest.raises(UserError) as caught:
        plan_statement(sql, dialect=dialect)
    return caught.value


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    ("sql", "state", "at"),
    [
        ("SELECT id FROM t WHERE n > 1 AND ai_agg(b, 'x') = 'y'", "42803", "ai_agg"),
        ("SELECT 1 FROM t GROUP BY ai_summarize_agg(b)", "42803", "ai_summarize_agg"),
        ("SELECT 1 FROM t JOIN u ON ai_agg(t.b, 'x') = u.b", "42803", "ai_agg"),
        ("UPDATE t SET b = ai_agg(b, 'x')", "42803", "ai_agg"),
        ("DELETE FROM t WHERE ai_agg(b, 'x') = 'y'", "42803", "ai_agg"),
        ("SELECT max(ai_agg(b, 'x')) FROM t", "42803", "ai_agg"),
        ("SELECT ai_agg(upper(ai_summarize_agg(b)), 'x') FROM t", "42803", "ai_summarize_agg"),
        ("SELECT ai_generate(b) OVER () FROM t", "22023", "OVER"),
        ("CREATE VIEW v AS SELECT 1, ai_generate(b) FROM t", "0A000", "ai_generate"),
        ("PREPARE p AS SELECT ai_filter('x', b) FROM t", "0A000", "ai_filter"),
        ("SELECT ai_generate(b), random() FROM t", "0A000", "random"),
        ("SELECT ai_classify(b, ARRAY[]) FROM t", "22023", "ARRAY"),
        ("SELECT ai_classify(b, ARRAY['a', '']) FROM t", "22023", "ARRAY"),
        ("SELECT ai_classify(b, ARRAY['a', 'a']) FROM t", "22023", "ARRAY"),
        ("SELECT ai_generate_json(b, '{}') FROM t", "22023", "'{}'"),
        ("SELECT ai_generate_json(b, '[1]') FROM t", "22023", "'[1]'"),
        ("SELECT ai_generate(b, options => '{\"temprature\": 1}') FROM t", "22023", "'{"),
    ],
)
def test_state_position_and_hint(sql: str, state: str, at: str, dialect: Dialect) -> None:
    error = refused(sql, dialect)
    assert error.sqlstate == state
    assert error.position == sql.index(at) + 1
    assert error.hint
    moved = refused(f"/* ä */\n {sql}", dialect)
    assert moved.position == error.position + len("/* ä */\n ")


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ("CREATE OR REPLACE TEMP VIEW v AS SELECT ai_generate('x')", "CREATE VIEW"),
        ("CREATE MATERIALIZED VIEW v AS SELECT ai_generate('x')", "CREATE MATERIALIZED VIEW"),
        ("CREATE UNIQUE INDEX ON t (ai_generate(b))", "CREATE INDEX"),
        ("ALTER TABLE t ADD COLUMN z text DEFAULT ai_generate('x')", "ALTER TABLE"),
    ],
)
def test_what_cant_hold_calls_has_its_whole_name(sql: str, name: str) -> None:
    for dialect in Dialect:
        assert refused(sql, dialect).message == f"{name} can't contain AI calls"


def test_too_many_different_calls() -> None:
    calls = [f"ai_generate('question {number}')" for number in range(MAX_FORMS + 1)]
    sql = f"SELECT {', '.join(calls)}"
    error = refused(sql, Dialect.DUCKDB)
    assert error.position == sql.index(calls[-1]) + 1
    assert error.hint


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT g FROM t GROUP BY g HAVING ai_agg(b, 'x') = 'y' ORDER BY ai_summarize_agg(b)",
        "SELECT g, ai_agg(ai_generate(b), 'x') FROM t WHERE ai_filter('x', b) GROUP BY g",
        "SELECT ai_generate(ai_agg(b, 'x')) FROM t",
        "SELECT g FROM t WHERE g IN (SELECT max(g) FROM u HAVING ai_agg(u.b, 'x') = 'y')",
        "SELECT g FROM t GROUP BY g HAVING EXISTS (SELECT 1 FROM u WHERE ai_agg(t.b, 'x') = u.b)",
        "SELECT ai_agg((SELECT ai_agg(b, 'x') FROM u), 'y') FROM t",
        "UPDATE t SET b = (SELECT ai_agg(u.b, 'x') FROM u)",
        "INSERT INTO t SELECT ai_agg(b, 'x') FROM u",
        "SELECT ai_agg(b, 'x') OVER (ORDER BY id) FROM t",
        "SELECT id FROM (SELECT id, ai_agg(b, 'x') AS a FROM t GROUP BY id) WHERE a = 'y'",
    ],
)
def test_aggregates_where_they_may_stand(sql: str) -> None:
    for dialect in Dialect:
        assert plan_statement(sql, dialect=dialect).sites
