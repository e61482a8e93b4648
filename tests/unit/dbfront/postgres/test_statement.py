"""What the relay reads out of a SQL text: plans, positions, settings."""

from __future__ import annotations

import pytest

from tierkv.dbfront.postgres.statements.statement import StatementPlanner, may_matter
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, UserError


@pytest.mark.parametrize(
    ("text", "matters"),
    [
        (b"SELECT AI_FILTER ('x')", True),
        (b'SELECT "ai_generate"(x)', True),
        (b"SET tierkv.model = ''", True),
        (b"SELECT * FROM tierkv.nodes", True),
        (b"SELECT email_address, thai_ai_generated FROM t", False),
        (b"SELECT 1", False),
    ],
)
def test_what_matters(text: bytes, matters: bool) -> None:
    assert may_matter(text) is matters


def test_calls_become_lookups_with_keys_of_their_own() -> None:
    planner = StatementPlanner()
    text = "SELECT 1; SELECT ai_generate(body) FROM docs -- why\n; SELECT ai_generate('b')"
    first, second, third = planner.statements(text)
    assert first.plan is None and first.engine_text == "SELECT 1"
    assert "tierkv.ai_call(" in second.engine_text and second.offset == text.index("SELECT ai_")
    keys = [statement.plan.forms[0].key for statement in (second, third) if statement.plan]
    assert len(set(keys)) == 2


def test_positions_lead_back_to_the_text() -> None:
    text = "SELECT 1; SELECT ai_generate(body), nothing FROM docs"
    statement = StatementPlanner().statements(text)[1]
    sent = statement.engine_text.index("nothing") + 1
    assert statement.position(sent) == text.index("nothing") + 1


def test_the_query_of_a_cursor_is_planned() -> None:
    text = "DECLARE c NO SCROLL CURSOR WITH HOLD FOR SELECT ai_generate(body), nothing FROM docs"
    [statement] = StatementPlanner().statements(text)
    assert statement.has_calls and statement.engine_text.startswith(text[: statement.declare])
    assert statement.inner.text.startswith("SELECT ")
    sent = statement.engine_text.index("nothing") + 1
    assert statement.position(sent) == text.index("nothing") + 1


def test_errors_have_positions_in_the_whole_text() -> None:
    text = "SELECT 1; DECLARE c CURSOR FOR SELECT ai_generate(modle => 'x')"
    with pytest.raises(UserError) as refused:
        StatementPlanner().statements(text)
    assert refused.value.position == text.index("modle") + 1


@pytest.mark.parametrize("text", ["SET tierkv.modle = 'x'", "SET tierkv.max_calls = 'many'"])
def test_settings_are_checked(text: str) -> None:
    with pytest.raises((SqlError, UserError)):
        StatementPlanner().statements(text)
    assert StatementPlanner().statements("SET tierkv.max_calls TO DEFAULT")[0].plan is None


@pytest.mark.parametrize(
    "text",
    [
        "CREATE VIEW v AS SELECT ai_generate('x')",
        "PREPARE p AS SELECT ai_generate('x')",
        "COPY t FROM STDIN WHERE ai_filter(c)",
        "CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$ SELECT ai_generate('x') $$",
        "DO $$ BEGIN PERFORM ai_generate('x'); END $$",
    ],
)
def test_what_can_not_hold_calls(text: str) -> None:
    with pytest.raises(FeatureNotSupportedError):
        StatementPlanner().statements(text)


def test_text_that_only_mentions_a_function_is_no_call() -> None:
    text = "CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$ SELECT 'see ai_generate' $$"
    assert StatementPlanner().statements(text)[0].plan is None
    text = "CREATE TABLE t (code text DEFAULT 'SELECT ai_generate(c)')"
    assert StatementPlanner().statements(text)[0].plan is None
