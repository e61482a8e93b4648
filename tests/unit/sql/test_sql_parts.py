"""The small parts of the SQL room: lexer, statement kinds, literals, settings, parameters."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError, UserError
from tierkv.sql.calls.arguments import parse_options
from tierkv.sql.plan.changes import may_change, query_writes
from tierkv.sql.plan.parameters import parameter_types
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.settings import parse_setting, setting_command
from tierkv.sql.text.exact_values import NotConstantError, literal_value
from tierkv.sql.text.lexer import SqlText, TokenKind, string_value, tokenize
from tierkv.sql.text.statement import StatementKind, classify, split_statements
from tierkv.sql.view_columns import VIEW_COLUMNS
from tierkv.sql.views import view_ddl


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("'it''s'", "it's"),
        (r"E'a\tb\'c\x41\u00e9\101'", "a\tb'cA\u00e9A"),
        ("$$a'b$$", "a'b"),
        ("$tag$ $$ $tag$", " $$ "),
    ],
)
def test_string_value(sql: str, value: str) -> None:
    (token,) = tokenize(sql)
    assert string_value(token) == value


@pytest.mark.parametrize("sql", ["'a", '"a', "/* a /* b */", "$$a", "E'a\\'", "$x$ a $y$"])
def test_text_without_an_end_is_a_syntax_error(sql: str) -> None:
    with pytest.raises(SqlSyntaxError) as raised:
        tokenize("SELECT " + sql)
    assert raised.value.position == 8


def test_tokens_of_a_line() -> None:
    tokens = tokenize('a.b::INT=>$1 -- c\n"x y" 1.5e3 ? /* d */ := .5')
    assert [token.text for token in tokens] == [
        *("a", ".", "b", "::", "INT", "=>", "$1", '"x y"', "1.5e3", "?", ":=", ".5"),
    ]
    assert tokens[6].kind is TokenKind.PARAMETER


@given(st.text(alphabet="aA1'\"$?/*-; \n()=>:.,é", max_size=40))
def test_lexer_never_loses_text(text: str) -> None:
    try:
        tokens = tokenize(text)
    except SqlSyntaxError as error:
        assert 1 <= error.position <= len(text)
        return
    assert all(text[token.start : token.end] == token.text for token in tokens)
    ends = [0, *(token.end for token in tokens)]
    starts = [*(token.start for token in tokens), len(text)]
    for end, start in zip(ends, starts, strict=True):
        between = text[end:start]
        assert not between.strip() or between.strip()[:2] in ("--", "/*")
    for statement in split_statements(text):
        assert statement in text


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("select 1", StatementKind.QUERY),
        ("-- hi\n(select 1) union select 2", StatementKind.QUERY),
        ("with a as (select 1), b(x) as (select 2) insert into t select 1", StatementKind.INSERT),
        ("with recursive a as (select 1 union all select 2) select * from a", StatementKind.QUERY),
        ("from t", StatementKind.QUERY),
        ("create temp table a as select 1", StatementKind.CREATE_TABLE_AS),
        ("create table a (b int default (1))", StatementKind.CREATE),
        ("create or replace table a(x) as from t", StatementKind.CREATE_TABLE_AS),
        ("create view a as select 1", StatementKind.CREATE),
        ("explain analyze select 1", StatementKind.EXPLAIN),
        ("begin isolation level serializable read only", StatementKind.BEGIN),
        ("start transaction", StatementKind.BEGIN),
        ("end", StatementKind.COMMIT),
        ("abort", StatementKind.ROLLBACK),
        ("rollback to savepoint a", StatementKind.SAVEPOINT),
        ("release a", StatementKind.SAVEPOINT),
        ("pragma version", StatementKind.OTHER),
        ("", StatementKind.OTHER),
        ("with a as (select 1)", StatementKind.OTHER),
    ],
)
def test_classify(sql: str, kind: StatementKind) -> None:
    assert classify(tokenize(sql)) is kind


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("NULL", None),
        ("-5", -5),
        ("'{\"a\": 1}'::jsonb", '{"a": 1}'),
        ("JSON '{}'", "{}"),
        ("{'a': [1, 2.5], b: {\"c\": true}}", {"a": [1, 2.5], "b": {"c": True}}),
    ],
)
def test_literals(sql: str, value: object) -> None:
    assert literal_value(tokenize(sql)) == value


@pytest.mark.parametrize("sql", ["a", "1 + 1", "f(1)", "[a]", "{'a': b}", "$1", "'a' || 'b'", "["])
def test_what_is_not_a_literal(sql: str) -> None:
    with pytest.raises(NotConstantError):
        literal_value(tokenize(sql))


def test_options() -> None:
    text = '{"temperature": 1, "stop": "x", "cache": false, "timeout_ms": 5, "seed": null}'
    assert parse_options(text) == CallOptions(
        temperature=1.0, stop=("x",), cache=False, timeout_s=0.005
    )
    shaped = '{"top_k": 5, "logit_bias": {"12": -100, "7": 1.5}, "min_tokens": 2}'
    assert parse_options(shaped) == CallOptions(
        top_k=5, logit_bias=((7, 1.5), (12, -100.0)), min_tokens=2
    )
    assert parse_options(None) == parse_options("null") == parse_options({}) == CallOptions()


@pytest.mark.parametrize(
    "options",
    [
        '{"temperature": "hot"}',
        '{"top_p": 0}',
        '{"max_tokens": 1.5}',
        '{"stop": [""]}',
        '{"stop": 1}',
        '{"seed": true}',
        '{"cache": "no"}',
        '{"nothing": 1}',
        '{"top_k": -2}',
        '{"repetition_penalty": 0}',
        '{"logit_bias": [1]}',
        '{"logit_bias": {"x": 1}}',
        '{"logit_bias": {"7": 101}}',
        '{"logit_bias": {"7": 1, "07": 2}}',
        "[]",
        "{",
        "5",
    ],
)
def test_bad_options(options: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_options(options)
    assert raised.value.sqlstate == "22023"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tierkv.max_calls", "0", 0),
        ("TierKV.Temperature", "0.5", 0.5),
        ("tierkv.request_timeout", "1500", 1.5),
        ("tierkv.request_timeout", "2 min", 120.0),
        ("tierkv.prefix_order", "off", False),
        ("tierkv.plan", "off", False),
        ("tierkv.seed", "", None),
        ("tierkv.on_error", "NULL", "null"),
    ],
)
def test_setting_values(name: str, text: str, value: object) -> None:
    assert parse_setting(name, text) == value


def test_setting_commands() -> None:
    command = setting_command(tokenize("SET LOCAL tierkv.temperature TO -1"))
    assert command is not None
    assert (command.name, command.value, command.local) == ("tierkv.temperature", "-1", True)
    assert setting_command(tokenize("SET search_path = tierkv")) is None
    default = setting_command(tokenize("SET tierkv.model = DEFAULT"))
    assert default is not None
    assert default.value is None


def test_parameter_types() -> None:
    assert parameter_types("SELECT $2::int4, CAST($1 AS date), $4 LIMIT $3") == (
        "DATE",
        "INTEGER",
        "BIGINT",
        "VARCHAR",
    )
    assert parameter_types("SELECT ?, ?::text") == ("VARCHAR", "VARCHAR")
    assert parameter_types("SELECT 1") == ()


def test_every_view_has_its_ddl() -> None:
    ddl = view_ddl()
    for view, columns in VIEW_COLUMNS.items():
        assert f"CREATE OR REPLACE VIEW tierkv.{view} AS" in ddl
        body = ddl.split(f"VIEW tierkv.{view} AS")[1].split(";")[0]
        for name, type_name in columns.items():
            assert f'"{name}":"{type_name}"' in body


@pytest.mark.parametrize("text", ["0", "-1", "2", "nan", "inf"])
def test_a_recompute_ratio_out_of_range_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(UserError, match="must be above 0, up to 1"):
        parse_setting("tierkv.recompute_ratio", text)


def test_lists_of_ai_functions_are_lists() -> None:
    text = (
        "SELECT ai_classify($1, $2), ai_generate($3, documents => $4), "
        "ai_classify_multi('a', instruction => $6, categories => $5)"
    )
    lists, text_type = "VARCHAR[]", "VARCHAR"
    assert parameter_types(text) == (text_type, lists, text_type, lists, lists, text_type)
    assert parameter_types("SELECT ai_classify($1, nonsense => $2)") == (text_type, text_type)


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        ("SELECT a INTO u FROM t", True),
        ("SELECT a INTO TEMP u FROM t", True),
        ("WITH w AS (INSERT INTO t SELECT 1 RETURNING *) SELECT * FROM w", True),
        ("WITH w AS MATERIALIZED (UPDATE t SET a = 1 RETURNING *) SELECT * FROM w", True),
        ("WITH w AS (DELETE FROM t RETURNING *) SELECT * FROM w", True),
        ("SELECT a FROM t FOR UPDATE", False),
        ("WITH w AS (WITH v AS (SELECT 1) INSERT INTO t FROM v) SELECT 1", True),
        ("WITH w AS (TRUNCATE t) SELECT 1", True),
        ("WITH w AS (COPY (SELECT 1) TO 'f') SELECT 1", True),
        ("WITH update AS (SELECT 1), delete AS (SELECT 2) SELECT * FROM update, delete", False),
        ("SELECT (update) FROM t", False),
        ("SELECT (copy(a)), a AS into, t.into FROM t", False),
        ("SELECT 'INTO', \"into\" FROM t", False),
    ],
)
def test_queries_that_write(text: str, writes: bool) -> None:
    assert classify(tokenize(text)) is StatementKind.QUERY
    assert query_writes(tokenize(text)) is writes
    assert may_change(tokenize(text)) is writes
    assert may_change(tokenize(f"EXPLAIN ANALYZE {text}")) is writes
    assert may_change(tokenize(f"DECLARE c CURSOR FOR {text}")) is writes
    assert not may_change(tokenize(f"EXPLAIN (AI_ESTIMATE) {text}"))


@pytest.mark.parametrize(
    ("text", "writes"),
    [
        ("CREATE TABLE t AS SELECT 1", True),
        ("WITH w AS (SELECT 1) INSERT INTO t FROM w", True),
        ("EXECUTE p", True),
        ("CALL p()", True),
        ("EXPLAIN (ANALYZE maybe) SELECT 1", True),
        ("EXPLAIN INSERT INTO t VALUES (1)", False),
        ("SET a = 1", False),
        ("FETCH 3 FROM c", False),
        ("DESCRIBE t", False),
        ("", False),
    ],
)
def test_statements_that_may_change(text: str, writes: bool) -> None:
    assert may_change(tokenize(text)) is writes


@pytest.mark.parametrize("text", ["'a''", "'a''b", "1, 'a'' '' x", '"a""', "E'a\\'", "e'a'' b"])
def test_text_without_end_is_told_where_it_starts(text: str) -> None:
    with pytest.raises(SqlSyntaxError, match="unterminated quoted") as caught:
        tokenize(text)
    assert caught.value.position == (4 if text.startswith("1") else 1)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_long_text_is_one_token(quote: str) -> None:
    text = f"{quote}{f'x{quote * 2}' * 100_000}{quote}"
    assert [token.text for token in tokenize(f"{text} {text}")] == [text, text]


async def test_long_text_is_cut_beside_the_loop() -> None:
    text = "SELECT 1 WHERE 5 IN (" + ",".join(str(number) for number in range(40_000)) + ")"
    tokens = tokenize(text)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    statement = SqlText(text)
    async with statement.read_ahead():
        during = turns
        assert tokenize(statement) == tokens
        assert tokenize(statement) is not tokenize(statement)
    task.cancel()
    assert during > 3
    with pytest.raises(SqlError, match="more than 300000"):
        async with SqlText("SELECT 1" + ";" * 300_000).read_ahead():
            pass


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("ai_generate(p)", 'ai_generate(t."p")', True),
        ("ai_generate(p || 'x')", "AI_GENERATE((t.p) || E'x')", True),
        ("ai_generate('x' || g)", "ai_generate('x' || CAST(g AS INT))", True),
        ("ai_generate(p, model => 'a')", "ai_generate(prompt => p, model => 'a')", True),
        ("ai_generate(p, model => 'a')", "ai_generate(p, model => 'b')", False),
        ("ai_generate(p)", "ai_generate(q)", False),
        ("ai_generate(t.p)", "ai_generate(u.p)", False),
        ("ai_generate(p || 'x')", "ai_generate(p || 'X')", False),
        ("ai_generate(?)", "ai_generate(?)", False),
    ],
)
def test_calls_that_mean_the_same_are_one_form(one: str, other: str, same: bool) -> None:
    plan = plan_statement(f"SELECT {one}, {other} FROM t, u")
    assert (len(plan.forms) == 1) is same


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("ai_generate('x')", '(SELECT C AS "ai_generate") AS ai_generate'),
        ("ai_generate('x') AS a", '(SELECT C AS "a") AS a'),
        ("t, LATERAL ai_generate('x') a(b)", 't, LATERAL (SELECT C AS "a") a(b)'),
        ("t JOIN ai_generate('x') ON true", 't JOIN (SELECT C AS "ai_generate") AS ai_generate ON'),
    ],
)
def test_a_call_in_from_is_a_row_source(source: str, rewritten: str) -> None:
    text = plan_statement(f"SELECT * FROM {source}").engine_sql.text
    assert re.sub(r"tierkv_ai_call(_kept)?\(0, CAST\('x' AS VARCHAR\)\)", "C", text).startswith(
        f"SELECT * FROM {rewritten}"
    )


def test_sampling_is_a_clause_and_not_a_name() -> None:
    assert plan_statement("SELECT a AS tablesample FROM t WHERE ai_filter(b)").sites
    with pytest.raises(FeatureNotSupportedError, match="sampling"):
        plan_statement("SELECT a FROM t TABLESAMPLE 10% WHERE ai_filter(b)")
