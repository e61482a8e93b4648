"""What may stand between EXPLAIN and its statement, and what the engine is told of it."""

from __future__ import annotations

import pytest

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlSyntaxError
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.explain_options import ExplainOptions, explain_options
from tierkv.sql.plan.plan import Explain, plan_statement
from tierkv.sql.text.lexer import tokenize

CALL = "SELECT missing, ai_generate(body) FROM docs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EXPLAIN SELECT 1", ExplainOptions(1)),
        ("explain analyse select 1", ExplainOptions(2, analyze=True)),
        ("EXPLAIN ANALYZE VERBOSE SELECT 1", ExplainOptions(3, analyze=True, verbose=True)),
        ("EXPLAIN (AI_ESTIMATE) SELECT 1", ExplainOptions(4, estimate=True)),
        ("EXPLAIN (ai_estimate off) SELECT 1", ExplainOptions(5)),
        ("EXPLAIN (ANALYZE 1, FORMAT 'json') SELECT 1", ExplainOptions(8, True, format="JSON")),
        ("EXPLAIN ANALYZE (FORMAT JSON) SELECT 1", ExplainOptions(6, True, format="JSON")),
        ("EXPLAIN (ANALYZE, ANALYZE false) SELECT 1", ExplainOptions(7)),
        ("EXPLAIN (COSTS OFF, WAL) SELECT 1", ExplainOptions(7, others=("COSTS OFF", "WAL"))),
        ("EXPLAIN (SELECT 1) UNION SELECT 2", ExplainOptions(1)),
        ("EXPLAIN ((SELECT 1))", ExplainOptions(1)),
        ("EXPLAIN", ExplainOptions(1)),
    ],
)
def test_options(text: str, expected: ExplainOptions) -> None:
    assert explain_options(tokenize(text)) == expected


@pytest.mark.parametrize("text", ["", "SELECT 1", '"explain" 1', "WITH explain AS (SELECT 1)"])
def test_other_statements_have_none(text: str) -> None:
    assert explain_options(tokenize(text)) is None


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        explain_options(tokenize("EXPLAIN (VERBOSE, AI_ESTIMATE perhaps) SELECT 1"))
    assert caught.value.position == 19


def test_the_engine_is_told_what_is_its_own() -> None:
    text = f"EXPLAIN (ANALYZE, AI_ESTIMATE off, VERBOSE, COSTS OFF, FORMAT json) {CALL}"
    prefixes = {
        dialect: plan_statement(text, dialect=dialect).engine_sql.text.split(" SELECT")[0]
        for dialect in Dialect
    }
    assert prefixes == {
        Dialect.DUCKDB: "EXPLAIN (ANALYZE, FORMAT JSON, COSTS OFF)",
        Dialect.POSTGRES: "EXPLAIN (ANALYZE, FORMAT JSON, VERBOSE, COSTS OFF)",
    }


def test_what_can_not_be_said_of_ai_calls() -> None:
    with pytest.raises(FeatureNotSupportedError, match="format HTML"):
        plan_statement(f"EXPLAIN (FORMAT html) {CALL}")
    with pytest.raises(SqlSyntaxError, match="ANALYZE and AI_ESTIMATE cannot be used together"):
        plan_statement(f"EXPLAIN (ANALYZE, AI_ESTIMATE) {CALL}")
    with pytest.raises(SqlSyntaxError, match="can't explain an EXPLAIN"):
        plan_statement(f"EXPLAIN EXPLAIN {CALL}")


def test_the_explained_statement_is_planned_as_if_it_stood_alone() -> None:
    text = f"EXPLAIN /* why */ (AI_ESTIMATE)\n{CALL}"
    plan, alone = plan_statement(text), plan_statement(CALL)
    assert plan.explained is not None
    assert plan.explain is Explain.ESTIMATE
    assert plan.explained.explain is Explain.NO
    assert plan.explained.engine_sql.text == alone.engine_sql.text
    assert plan.forms == alone.forms
    shift = text.index(CALL)
    assert [site.position for site in plan.sites] == [site.position + shift for site in alone.sites]
    for sql in (plan.engine_sql, plan.explained.engine_sql):
        position = sql.text.index("missing") + 1
        assert sql.source_position(position) == text.index("missing") + 1


def test_without_ai_calls_the_engine_has_the_text_as_it_is() -> None:
    plan = plan_statement("EXPLAIN (FORMAT html, WAL) SELECT 1")
    assert plan.engine_sql.text == "EXPLAIN (FORMAT html, WAL) SELECT 1"
    assert plan.explained is None
    estimated = plan_statement("EXPLAIN (AI_ESTIMATE) SELECT 1")
    assert estimated.engine_sql.text == "EXPLAIN SELECT 1"
    assert estimated.explained is not None


@pytest.mark.parametrize("explain", ["EXPLAIN", "EXPLAIN (AI_ESTIMATE)"])
def test_only_analyze_writes(explain: str) -> None:
    write = "DELETE FROM docs WHERE ai_generate(body) = 'x'"
    assert not plan_statement(f"{explain} {write}").writes
    assert plan_statement(f"EXPLAIN ANALYZE {write}").writes
