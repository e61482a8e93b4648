"""What an expression is known to begin with; DuckDB is the judge."""

from __future__ import annotations

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.sql.calls.prompt_text import static_prefix
from tierkv.sql.text.lexer import tokenize


def prefix_of(expression: str) -> str:
    return static_prefix(tokenize(expression))


@pytest.mark.parametrize(
    ("expression", "prefix"),
    [
        ("'Summarise: ' || body", "Summarise: "),
        ("'It''s ' || body || ' end'", "It's "),
        ("E'a\\nb ' || body", "a\nb "),
        ("$$Note: $$ || body", "Note: "),
        ("'a' || 'b' || 'c'", "abc"),
        ("'a whole prompt'", "a whole prompt"),
        ("'a ' || 'b ' || id || 'c'", "a b "),
        ("('a ' || 'b ') || body", "a b "),
        ("'a ' || ('b ' || body) || 'c'", "a b "),
        ("'a '::text || body", "a "),
        ("'a ' || CASE WHEN id = 1 AND true THEN 'x' ELSE 'y' END", "a "),
        ("'a ' || id::text || body[1:2]", "a "),
        ("'a ' || coalesce(body, 'b' || id > 'c')", "a "),
        ("concat('Summarise: ', body)", "Summarise: "),
        ("concat('a ', 'b ', id, 'c')", "a b "),
        ("concat('[1, 2', body)", "[1, 2"),
        ("CONCAT('a ', 'b ' || body, 'c')", "a "),
        ("concat('a ', 'b ' || 'c ', body)", "a b c "),
        ("concat('a ', NULL, 'c')", "a "),
        ("ai_prompt('Is {0} about {1}?', body, id)", "Is "),
        ("ai_prompt('{{ {0}', body)", "{ "),
        ("ai_prompt('nothing to fill')", "nothing to fill"),
    ],
)
def test_literals_at_the_head(expression: str, prefix: str) -> None:
    assert prefix_of(expression) == prefix


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "body",
        "body || ' end'",
        "'a' = body",
        "'a' || body = 'b'",
        "'a' || body LIKE 'b'",
        "'a' || body IS NULL",
        "'a' || body IN ('b')",
        "'a' || body -> 'b'",
        "'a' || body || body > 'b'",
        "'a' || body ? 'b'",
        "'a' || id + 1",
        "'1' + id",
        "CASE WHEN id = 1 THEN 'a' || body END",
        "upper('a ' || body)",
        "coalesce('a ' || body, 'b')",
        "other.concat('a', body)",
        "concat_ws(' ', 'a', body)",
        "concat(body, 'a')",
        "concat()",
        "'a' 'b' || body",
        "DATE '2026-01-01' || body",
        "X'41' || body",
        "'{\"a\": 1}' || body",
        "'[1]' || body",
        "'\\x41' || body",
        "'12' || body",
        "'null' || body",
        "'[1]'::jsonb || body",
        "(('[1]')) || body",
        "concat('[1]' || body)",
        "ai_prompt(body, id)",
        "ai_prompt('{0} is it', body)",
        "ai_prompt('{1}', body)",
        "('a' || body",
        "['a'] || body",
        "lower('a') || (body)",
        "('a') || (body) = ('b')",
    ],
)
def test_where_nothing_is_known_nothing_is_guessed(expression: str) -> None:
    assert prefix_of(expression) == ""


pieces = st.sampled_from(
    (
        "'a '", "'b''c '", "'{x} '", "E'd\\n'", "$$e $$", "body", "id", "('f ')", "'g '::VARCHAR",
        "CASE WHEN id = 1 THEN 'h' ELSE 'i' END", "upper(body)", "NULL", "(body || 'j')", "'12'",
        "id::text",
    )
)  # fmt: skip
operators = st.sampled_from(
    (" || ", " || ", " || ", " || ", " = ", " > ", " LIKE ", " AND ", " + ")
)
chains = st.builds(
    lambda first, rest: first + "".join(f"{operator}{piece}" for operator, piece in rest),
    pieces,
    st.lists(st.tuples(operators, pieces), max_size=4),
)
expressions = chains | st.builds("concat({}, {})".format, chains, chains)


@given(expressions)
def test_what_the_engine_computes_begins_with_it(expression: str) -> None:
    prefix = prefix_of(expression)
    with duckdb.connect() as connection:
        try:
            (value,) = connection.execute(
                f"SELECT CAST(({expression}) AS VARCHAR) FROM (VALUES (7, 'B')) v(id, body)"
            ).fetchone() or (None,)
        except duckdb.Error:
            return
    assert value is None or value.startswith(prefix)


@given(st.text(max_size=8).filter(lambda text: "\0" not in text))
def test_any_literal_is_the_prefix_of_its_concat(text: str) -> None:
    literal = "'" + text.replace("'", "''") + "'"
    assert prefix_of(f"concat({literal}, body)") == text
