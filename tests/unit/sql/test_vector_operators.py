"""Embeddings beside vector operators: where a cast is written for PostgreSQL, and where none is."""

from __future__ import annotations

import pytest

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.text.lexer import tokenize


@pytest.mark.parametrize("operator", ["<=>", "<->", "<#>", "<+>"])
def test_a_vector_operator_is_one_token(operator: str) -> None:
    assert [token.text for token in tokenize(f"a{operator}b")] == ["a", operator, "b"]


@pytest.mark.parametrize("text", ["a<=b", "a<>b", "a->b", "a<-1", "a#>b", "f(x=>1)", "a<#1"])
def test_other_operators_stay_themselves(text: str) -> None:
    tokens = {token.text for token in tokenize(text)}
    assert tokens.isdisjoint({"<=>", "<->", "<#>", "<+>"})


@pytest.mark.parametrize(
    ("expression", "converts"),
    [
        ("e <=> ai_embed('a')", 1),
        ("ai_embed('a') <#> e", 1),
        ("(e <-> ai_embed('a')) < 1", 1),
        ("ai_embed(b) <+> ai_embed('a')", 2),
        ("e <=> ai_embed('a')::real[]", 0),
        ("ai_embed('a')::vector(8)", 0),
        ("ai_embed('a') = e", 0),
        ("x <=> ai_score('a')", 0),
    ],
)
def test_an_embedding_beside_an_operator_becomes_a_vector(expression: str, converts: int) -> None:
    text = f"SELECT {expression} FROM mem"
    postgres = plan_statement(text, dialect=Dialect.POSTGRES).engine_sql.text
    assert postgres.count(" AS vector)") == converts
    assert " AS vector)" not in plan_statement(text).engine_sql.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT id FROM mem ORDER BY e {} ai_embed('a') LIMIT 2", "ORDER BY"),
        ("SELECT id FROM mem WHERE e {} ai_embed('a') < 0.5", "WHERE"),
    ],
)
@pytest.mark.parametrize("operator", ["<=>", "<->", "<#>", "<+>", "<~>"])
def test_statements_with_vector_operators_are_understood(
    operator: str, text: str, expected: str
) -> None:
    for dialect in Dialect:
        (site,) = plan_statement(text.format(operator), dialect=dialect).sites
        assert site.clause == expected


def test_an_error_in_a_conversion_is_placed_at_the_call() -> None:
    text = "SELECT id FROM mem ORDER BY e <=> ai_embed(body)"
    engine_sql = plan_statement(text, dialect=Dialect.POSTGRES).engine_sql
    at = engine_sql.text.index("vector)") + 1
    assert engine_sql.source_position(at) == text.index("ai_embed") + 1
