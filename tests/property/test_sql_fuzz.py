"""Token soup at the SQL entrance: a plan or a UserError, never anything else."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import UserError
from sql.lexer import tokenize
from sql.parameters import parameter_types
from sql.plan import plan_statement
from sql.settings import setting_command
from sql.statement import split_statements

_TEXT = (
    "SELECT INSERT INTO UPDATE DELETE FROM WHERE SET WITH a AS ( ) ( ) [ ] { } , , ; ; ' ' \" $$ "
    "ai_generate( ai_generate(a) ai_generate('x') ai_generate model => := :: options "
    "'{\"seed\":1}' '{' NULL VALUES RETURNING ON CONFLICT DEFAULT CREATE TABLE COPY TO EXPLAIN "
    "ANALYZE ( EXPLAIN LIMIT 1 5 ORDER BY CASE WHEN THEN ELSE END = AND OR NOT $1 ? tierkv . "
    "SHOW RESET LOCAL OVER DISTINCT * - -- /* */ UNION EXISTS IF DATA NO tierkv_ai_call t é \x00"
)
_WORDS = _TEXT.split(" ")
soup = st.lists(st.sampled_from(_WORDS), max_size=25).map(" ".join)


@settings(max_examples=600, deadline=None)
@given(soup)
def test_planning_never_breaks(text: str) -> None:
    with suppress(UserError):
        split_statements(text)
    with suppress(UserError):
        parameter_types(text)
    with suppress(UserError):
        setting_command(tokenize(text))
    with suppress(UserError):
        plan = plan_statement(text)
        plan.engine_sql.source_position(len(plan.engine_sql.text))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["SELECT", "INSERT INTO t", "UPDATE t SET", "DELETE FROM", "COPY",
                        "CREATE TABLE x AS", "EXPLAIN"]), soup)  # fmt: skip
def test_planning_calls_never_breaks(start: str, text: str) -> None:
    with suppress(UserError):
        plan_statement(f"{start} {text} ai_generate(a) {text}")
