"""Arguments as the engine sends them: NULL, exact numbers, names of fields, text by number."""

from __future__ import annotations

import duckdb
import pytest

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import UdfArgumentError

PRICE = "12345678901234567.0"


async def rows(session: DuckDbSession, sql: str, *params: object) -> list[tuple[object, ...]]:
    return list((await session.execute(sql, params)).rows)


@pytest.mark.parametrize(
    "call",
    [
        "ai_classify('x', {})",
        "ai_classify_multi('x', {})",
        "ai_extract('x', {})",
        "ai_generate_json('x', {})",
    ],
)
@pytest.mark.parametrize(
    "null", ["NULL", "$1", "CASE WHEN id > 100 THEN ['a', 'b'] END", "CAST(NULL AS JSON)"]
)
async def test_no_choice_and_no_schema_make_no_call(
    session: DuckDbSession, generator: InstantGenerator, call: str, null: str
) -> None:
    given = null if "JSON" not in null or "classify" not in call else "NULL"
    sql = f"SELECT DISTINCT {call.format(given)} FROM topics"
    params = [None] if null == "$1" else []
    assert await rows(session, sql, *params) == [(None,)]
    assert generator.calls == []


@pytest.mark.parametrize(
    "context",
    [
        "{{'price': {0}::DECIMAL(20, 2)}}",
        "{{'price': {0}}}",
        "'{{\"price\": {0}}}'",
        "'{{\"price\": {0}}}'::JSON",
        "('{{\"price\": ' || {0}::DECIMAL(20, 2) || '}}')",
        "json_object('price', {0}::DECIMAL(20, 2)::VARCHAR)",
    ],
)
async def test_prices_that_differ_in_the_last_digit_are_two_questions(
    session: DuckDbSession, generator: InstantGenerator, context: str
) -> None:
    first, second = (context.format(f"{PRICE}{digit}") for digit in (1, 2))
    await rows(
        session,
        f"SELECT ai_generate('x', context => {first}), ai_generate('x', context => {second})",
    )
    assert sorted(generator.prompts) == [f"x\nprice: {PRICE}1", f"x\nprice: {PRICE}2"]


@pytest.mark.parametrize("field", ["Product", '"Product"', "'Product'"])
@pytest.mark.parametrize("value", ["'sport'", "name"])
async def test_fields_of_a_struct_keep_their_case(
    session: DuckDbSession, generator: InstantGenerator, field: str, value: str
) -> None:
    await rows(
        session,
        f"SELECT ai_generate('x', context => {{{field}: {value}}}) FROM topics WHERE id = 0",
    )
    assert generator.prompts == ["x\nProduct: sport"]


async def test_json_of_a_column_of_text_is_read(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    given = "CASE WHEN id = 0 THEN '{{\"{}\": {}}}' ELSE NULL END"
    sql = (
        f"SELECT ai_generate('x', options => {given.format('seed', 7)}, "
        f"context => {given.format('a', 8)}) FROM topics WHERE id < 2"
    )
    await rows(session, sql)
    assert sorted((call.options.seed, prompt) for call, prompt in zip(
        generator.calls, generator.prompts, strict=True
    ) if call.options.seed) == [(7, "x\na: 8")]  # fmt: skip
    assert sorted(generator.prompts) == ["x", "x\na: 8"]


async def test_what_says_nothing_makes_no_call_of_its_own(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    others = (
        "ai_generate('x', options => '{}'), ai_generate('x', documents => []), "
        "ai_generate('x', context => {}), ai_generate('x', documents => [NULL, ' ']), "
        "ai_generate('x', context => {'a': NULL})"
    )
    sql = f"SELECT CASE WHEN ai_generate('x') IS NOT NULL THEN [{others}] END"
    ((answers,),) = await rows(session, sql)
    assert len(set(answers)) == 1  # type: ignore[call-overload]  # a list of text
    assert generator.prompts == ["x"]


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r"E'caf\xc3\xa9'", "caf\u00e9"),
        (r"E'\101'", "A"),
        (r"E'a\tb'", "a\tb"),
    ],
)
async def test_characters_by_number_are_the_engines_to_read(
    session: DuckDbSession, generator: InstantGenerator, literal: str, text: str
) -> None:
    if duckdb.__version__.startswith("1.") and "x" in literal:
        pytest.skip("DuckDB 1.5 has no bytes by number in text")
    ((plain,),) = await rows(session, f"SELECT {literal}")
    assert plain == text
    await rows(session, f"SELECT ai_generate('x', system_prompt => {literal})")
    assert generator.calls[0].messages is not None
    assert generator.calls[0].messages[0].content == text


async def test_half_a_character_is_refused_before_anything_runs(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    with pytest.raises(UdfArgumentError, match="unpaired surrogate"):
        await session.execute("""SELECT ai_generate('x', context => '{"a": "\\ud800"}')""")
    assert generator.calls == []


@pytest.mark.parametrize("model", ["NULL", "$1", "nullif(name, name)", "CAST(NULL AS VARCHAR)"])
async def test_no_model_is_the_sessions_model(
    session: DuckDbSession, generator: InstantGenerator, model: str
) -> None:
    params = [None] if model == "$1" else []
    sql = f"SELECT ai_generate('x', model => {model}), ai_classify('x', ['a', 'b'], {model})"
    ((text, category),) = await rows(session, f"{sql} FROM topics WHERE id = 0", *params)
    assert text is not None
    assert category in ("a", "b")
    assert [call.model for call in generator.calls] == [None, None]


@pytest.mark.parametrize("items", ["1.50, 2", "true, false", "1e3, 2"])
async def test_lists_of_other_types_are_written_as_the_engine_writes_them(
    session: DuckDbSession, generator: InstantGenerator, items: str
) -> None:
    ((first, second),) = await rows(
        session,
        f"SELECT ai_classify('x', [{items}]), ai_classify('x', list_value({items}))",
    )
    assert first == second
    assert len(generator.prompts) == 1


async def test_a_replaced_column_keeps_its_name(session: DuckDbSession) -> None:
    for star in ("*", "t.*"):
        sql = f"SELECT {star} REPLACE (ai_generate(name) AS name) FROM topics t"
        columns = (await session.execute(sql)).columns
        assert columns is not None
        assert [column.name for column in columns] == ["id", "name"]
    columns = (await session.execute("SELECT -id * ai_score('q', name) FROM topics")).columns
    assert columns is not None
    assert [column.name for column in columns] == ["-id * ai_score('q', name)"]


async def test_equal_texts_are_exactly_alike(session: DuckDbSession) -> None:
    sql = "SELECT DISTINCT ai_similarity(body, body), ai_similarity(body, body || '') FROM docs"
    assert sorted(await rows(session, sql), key=str) == [(1.0, 1.0), (None, None)]
