"""PostgreSQL as the judge of what an expression begins with: it gives literals their types."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_postgres import PostgresServer
from tierkv.sql.calls.prompt_text import static_prefix
from tierkv.sql.text.lexer import tokenize

pytestmark = pytest.mark.integration

ROW = "(VALUES (7, 'B'::text, '{\"k\": 1}'::jsonb, B'101')) v(id, body, doc, bits)"
pieces = st.sampled_from(
    (
        "'a '", "'[1, 2]'", "'{\"a\": 1}'", "'{a}'", "'\\x41'", "'101'", "' 5 '", "'\"s\"'",
        "'null'", "'b'::text", "E'c\\n'", "$$d $$", "('[3]')", "body", "id", "doc", "bits",
        "CASE WHEN id = 7 THEN 'e' END", "upper(body)", "(body || 'f')", "NULL",
    )
)  # fmt: skip
operators = st.sampled_from((*4 * (" || ",), " = ", " > ", " LIKE ", " -> ", " ? ", " COLLATE "))
chains = st.builds(
    lambda first, rest: first + "".join(f"{operator}{piece}" for operator, piece in rest),
    pieces,
    st.lists(st.tuples(operators, pieces), max_size=3),
)
expressions = chains | st.builds("concat({}, {})".format, chains, chains)


@pytest.fixture(scope="module")
def connection(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        yield connection


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(expression=expressions)
def test_what_the_server_computes_begins_with_it(
    connection: psycopg.Connection, expression: str
) -> None:
    prefix = static_prefix(tokenize(expression))
    try:
        row = connection.execute(f"SELECT CAST(({expression}) AS text) FROM {ROW}").fetchone()
    except psycopg.Error:
        return
    assert row is not None
    assert row[0] is None or row[0].startswith(prefix)


def test_a_literal_before_json_is_json(connection: psycopg.Connection) -> None:
    expression = "'[1]' || doc"
    row = connection.execute(f"SELECT CAST({expression} AS text) FROM {ROW}").fetchone()
    assert row == ('[1, {"k": 1}]',)
    assert static_prefix(tokenize(expression)) == ""
