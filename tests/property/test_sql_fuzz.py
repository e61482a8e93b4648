"""Token soup at the SQL entrance: a plan or a UserError, never anything else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.kvcore.errors import UserError
from tierkv.sql.calls.ai_call import CallForm, resolve_call
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.plan.parameters import parameter_types
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.settings import setting_command
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import split_statements

_TEXT = (
    "SELECT INSERT INTO UPDATE DELETE FROM WHERE SET WITH a AS ( ) ( ) [ ] { } , , ; ; ' ' \" $$ "
    "ai_generate( ai_generate(a) ai_generate('x') ai_generate model => := :: options "
    "'{\"seed\":1}' '{' NULL VALUES RETURNING ON CONFLICT DEFAULT CREATE TABLE COPY TO EXPLAIN "
    "ANALYZE ( EXPLAIN LIMIT 1 5 ORDER BY CASE WHEN THEN ELSE END = AND OR NOT $1 ? tierkv . "
    "SHOW RESET LOCAL OVER DISTINCT * - -- /* */ UNION EXISTS IF DATA NO tierkv_ai_call t é \x00 "
    "ai_filter( ai_if('p',a) ai_classify( ai_classify(a,['x','y']) ai_classify_multi( ai_extract( "
    "ai_extract(a,'[\"x\"]') ai_score( ai_embed(a) ai_similarity(a,'b') ai_agg( ai_agg(a,'q') "
    "ai_summarize_agg(a) FILTER ROWS PARTITION ai_count_tokens(a) ai_complete( ai_prompt('{0}',a) "
    "ai_prompt( '{0} {1} {{' ARRAY ['x','x'] [] {'a':1} categories schema context instruction "
    "'{\"type\":\"object\"}' '[]' '\\ud800' GROUP HAVING 1e999 jsonb ::jsonb"
)
_WORDS = _TEXT.split(" ")
_ARGUMENT_TEXT = (
    "a 'x' NULL $1 ? 7 -1.5 1e999 true [] ['x','y'] ['x','x'] ['',NULL] ARRAY['x'] {'a':1} {'a':b} "
    "'{}' '{' '[]' '[\"x\"]' '{\"x\":\"q\"}' '{\"type\":7}' '{\"$ref\":\"#\"}' '\"\\ud800\"' "
    "ai_generate(a) ai_prompt('{0}',a) DISTINCT a || b (SELECT 1) 'é\x00' model=>'m' schema=>'{}' "
    "options=>'{\"retries\":1}' options=>'{\"dedup\":false}' context=>{'k':a} categories=>['x']"
)
_ARGUMENTS = _ARGUMENT_TEXT.split(" ")
dialects = st.sampled_from(Dialect)
soup = st.lists(st.sampled_from(_WORDS), max_size=25).map(" ".join)


@settings(max_examples=600, deadline=None)
@given(soup, dialects)
def test_planning_never_breaks(text: str, dialect: Dialect) -> None:
    with suppress(UserError):
        split_statements(text)
    with suppress(UserError):
        parameter_types(text)
    with suppress(UserError):
        setting_command(tokenize(text))
    with suppress(UserError):
        plan = plan_statement(text, dialect=dialect)
        plan.engine_sql.source_position(len(plan.engine_sql.text))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["SELECT", "INSERT INTO t", "UPDATE t SET", "DELETE FROM", "COPY",
                        "CREATE TABLE x AS", "EXPLAIN"]), soup, dialects)  # fmt: skip
def test_planning_calls_never_breaks(start: str, text: str, dialect: Dialect) -> None:
    with suppress(UserError):
        plan_statement(f"{start} {text} ai_generate(a) {text}", dialect=dialect)


@settings(max_examples=800, deadline=None)
@given(st.sampled_from(sorted(AI_FUNCTIONS)), st.lists(st.sampled_from(_ARGUMENTS), max_size=5),
       st.sampled_from(["", "OVER ()", "FILTER (WHERE a)"]), dialects)  # fmt: skip
def test_any_arguments_are_planned_or_refused_where_they_stand(
    function: str, arguments: list[str], after: str, dialect: Dialect
) -> None:
    text = f"SELECT {function}({', '.join(arguments)}) {after} FROM t"
    try:
        plan = plan_statement(text, dialect=dialect)
    except UserError as error:
        assert 0 < error.position <= len(text)
        assert error.message
    else:
        outer = plan.sites[0]
        assert outer.function == function
        assert outer.form.row_parameters or outer.form.always_null
        plan.engine_sql.source_position(len(plan.engine_sql.text))


rows = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(AI_FUNCTIONS)), st.lists(rows, min_size=1, max_size=4))
def test_any_row_is_a_call_or_refused(function: str, values: list[Any]) -> None:
    names = AI_FUNCTIONS[function].names[: len(values)]
    if AI_FUNCTIONS[function].aggregate:
        values[0] = values[0] if isinstance(values[0], list) else None
    form = CallForm(0, AI_FUNCTIONS[function], row_parameters=names, packed=True)
    text = json.dumps(values[: len(names)])
    with suppress(UserError):
        call = resolve_call(form, text)
        assert call == resolve_call(form, text)
        assert call is None or hash(call) == hash(resolve_call(form, text))
