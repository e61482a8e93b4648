"""The function family over an instant model: what is asked, what comes of it, and NULL."""

from __future__ import annotations

import json

import pytest

from tests.fix_sql import (
    InstantGenerator,
    answer_text,
    embedding,
    label_odds,
    make_model,
)
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import (
    ContextTooLongError,
    RowLevelError,
    SqlError,
    UdfArgumentError,
    UnknownModelError,
)
from tierkv.kvcore.request import FinishReason

YES_NO = ("yes", "Yes", "no", "No")
DIGITS = tuple("0123456789")


async def rows(session: DuckDbSession, sql: str, *params: object) -> list[tuple[object, ...]]:
    return list((await session.execute(sql, params)).rows)


async def value(session: DuckDbSession, sql: str, *params: object) -> object:
    return (await rows(session, sql, *params))[0][0]


def says_yes(prompt: str) -> bool:
    return sum(label_odds(prompt, YES_NO)[:2]) > 0.5


# -- ai_filter


async def test_filter_asks_behind_the_document_and_reads_yes(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    found = await rows(
        session, "SELECT DISTINCT body FROM docs WHERE ai_filter('Is it good?', body) ORDER BY body"
    )
    bodies = await rows(session, "SELECT DISTINCT body FROM docs WHERE body IS NOT NULL ORDER BY 1")
    prompts = {body: f"{body}\nQuestion: Is it good?\nAnswer yes or no." for (body,) in bodies}
    assert set(generator.prompts) == set(prompts.values())
    assert found == [(body,) for (body,) in bodies if says_yes(prompts[str(body)])]
    assert 0 < len(found) < len(bodies)
    assert {call.labels for call in generator.calls} == {YES_NO}


async def test_filter_with_one_argument_sends_the_whole_prompt(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    asked = await value(session, "SELECT ai_if('Is ' || 7 || ' odd?')")
    assert generator.prompts == ["Is 7 odd?"]
    assert asked is says_yes("Is 7 odd?")


async def test_filter_is_null_where_predicate_or_input_is(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    calls = ("ai_filter(NULL)", "ai_if('a', NULL)", "ai_filter(name, 'x')", "NOT ai_if('a', name)")
    assert await rows(session, f"SELECT {', '.join(calls)} FROM topics WHERE id = 2") == [
        (None,) * 4
    ]
    assert generator.calls == []


# -- ai_classify


async def test_classify_takes_the_likeliest_category(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    categories = ("sport", "music", "food")
    got = await rows(
        session,
        "SELECT DISTINCT body, ai_classify(body, ['sport', 'music', 'food']) FROM docs ORDER BY 1",
    )
    for body, category in got:
        if body is None:
            assert category is None
            continue
        prompt = f"{body}\nQuestion: Which category fits best: sport, music, food?"
        odds = label_odds(prompt, categories)
        assert category == categories[odds.index(max(odds))]
    assert {call.labels for call in generator.calls} == {categories}


async def test_classify_takes_categories_of_the_row_and_an_instruction(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = (
        "SELECT ai_classify('t', list_value('a', name), instruction => 'What is it?') FROM topics "
        "WHERE id < 2 ORDER BY id"
    )
    got = [category for (category,) in await rows(session, sql)]
    expected = []
    for name in ("sport", "music"):
        odds = label_odds("t\nQuestion: What is it?", ("a", name))
        expected.append(("a", name)[odds.index(max(odds))])
    assert got == expected


async def test_classify_multi_keeps_the_order_of_the_list(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    names = ["zebra", "apple", "mango", "kiwi", "plum", "fig"]
    got = await value(session, f"SELECT ai_classify_multi('text', {names})")
    prompts = {name: f"text\nQuestion: Is it about {name}?" for name in names}
    assert got == [name for name in names if says_yes(prompts[name])]
    assert sorted(generator.prompts) == sorted(prompts.values())
    got = await value(
        session, f"SELECT ai_classify_multi('text', {names}, 'Would you eat a {{0}}?')"
    )
    assert got == [n for n in names if says_yes(f"text\nQuestion: Would you eat a {n}?")]


# -- ai_score, ai_embed, ai_similarity, ai_count_tokens


async def test_score_is_the_expected_digit(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = "SELECT ai_score('How polite?', 'Hello.'), ai_score('How polite is: Hello.')"
    ((two, one),) = await rows(session, sql)
    question = "How polite?\nAnswer with a digit from 0 (not at all) to 9 (completely)."
    for got, prompt in ((two, f"Hello.\nQuestion: {question}"), (one, "How polite is: Hello.")):
        expected = sum(n * odds for n, odds in enumerate(label_odds(prompt, DIGITS))) / 9
        assert got == round(expected, 5)
        assert 0 <= got <= 1  # type: ignore[operator]


async def test_score_orders_all_rows(session: DuckDbSession, generator: InstantGenerator) -> None:
    sql = "SELECT name FROM topics WHERE name IS NOT NULL ORDER BY ai_score('Fun?', name) DESC"
    best = await rows(session, f"{sql} LIMIT 2")
    assert best == (await rows(session, sql))[:2]


async def test_embeddings_are_unit_vectors_and_equal_texts_are_embedded_once(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = (
        "SELECT ai_embed(t), ai_similarity(t, 'red'), ai_similarity('red', t) "
        "FROM (VALUES ('red'), ('blue'), (NULL)) v(t)"
    )
    got = await rows(session, sql)
    assert sorted(generator.prompts) == ["blue", "red"]
    assert got[0][0] == pytest.approx(embedding("red"), abs=1e-6)
    assert got[0][1:] == (pytest.approx(1.0), pytest.approx(1.0))
    cosine = sum(a * b for a, b in zip(embedding("red"), embedding("blue"), strict=True))
    assert got[1][1:] == (pytest.approx(cosine), pytest.approx(cosine))
    assert got[2] == (None, None, None)


async def test_an_empty_text_has_no_embedding(session: DuckDbSession) -> None:
    result = await session.execute("SELECT ai_embed('')")
    assert list(result.rows) == [(None,)]
    assert "an empty text has no embedding" in result.notices[0].message


async def test_count_tokens_asks_no_model_and_is_no_call(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_calls = 1")
    got = await rows(session, "SELECT DISTINCT body, ai_count_tokens(body) FROM docs")
    assert all(count == (None if body is None else len(str(body))) for body, count in got)
    assert len(got) > 20
    assert generator.calls == []
    assert session.last_ai_stats.distinct_calls == 0
    with pytest.raises(UnknownModelError) as caught:
        await session.execute("SELECT ai_count_tokens(body, 'gpt') FROM docs WHERE false")
    assert caught.value.position == 8 + len("ai_count_tokens(body, ")


# -- ai_extract


async def test_extract_asks_one_question_per_name(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await value(session, "SELECT ai_extract('a note', ['city', 'order number'])")
    questions = {
        name: f"a note\nQuestion: Extract the {name}." for name in ("city", "order number")
    }
    assert generator.prompts == list(questions.values())
    assert json.loads(str(got)) == {name: answer_text(asked) for name, asked in questions.items()}


async def test_extract_asks_the_questions_it_is_given(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    fields = '{"type": "Which type?", "who": "Who?"}'
    sql = f"SELECT ai_extract('a note', '{fields}', 'Be brief.') ->> 'who'"
    got = await value(session, sql)
    assert got == answer_text("a note\nBe brief.\nQuestion: Who?")
    assert "a note\nBe brief.\nQuestion: Which type?" in generator.prompts


async def test_extract_gives_null_for_what_is_not_there(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    for name, said in {"a": "None.", "b": " ", "c": "N/A", "d": " Rome. "}.items():
        generator.texts[f"t\nQuestion: Extract the {name}."] = said
    got = await value(session, "SELECT ai_extract('t', ['a', 'b', 'c', 'd'])")
    assert json.loads(str(got)) == {"a": None, "b": None, "c": None, "d": "Rome."}


async def test_extract_holds_one_answer_to_a_json_schema(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    got = await value(session, f"SELECT ai_extract('t', '{json.dumps(schema)}')")
    prompt = "t\nQuestion: Extract the data as JSON."
    assert generator.prompts == [prompt]
    assert json.loads(generator.calls[0].json_schema) == schema
    assert json.loads(str(got)) == {"n": len(f"{prompt}|n"), "s": answer_text(f"{prompt}|s")}


async def test_calls_may_stand_in_calls(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = "SELECT ai_generate('Praise ' || (ai_extract('t', ['product']) ->> 'product'))"
    product = answer_text("t\nQuestion: Extract the product.")
    assert await value(session, sql) == answer_text(f"Praise {product}")


async def test_context_stands_before_document_and_question(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute(
        "SELECT ai_filter('Good?', 'doc', context => {'a': 1, 'b': NULL, 'c': 'x'})"
    )
    assert generator.prompts == ["a: 1\nc: x\n\ndoc\nQuestion: Good?\nAnswer yes or no."]


# -- spellings, detail


async def test_spellings_of_a_function_share_answers(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute(
        "SELECT ai_complete('other', 'p'), ai_generate('p', model => 'other'), "
        "ai_generate('p', 'other'), ai_filter('q'), ai_if(predicate := 'q'), "
        "(ai_generate_detail('p', 'other')).value"
    )
    assert sorted(generator.prompts) == ["p", "q"]


async def test_detail_tells_what_it_cost_and_never_fails_a_write(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing["bad"] = RowLevelError("it broke")
    await session.execute(
        "CREATE TABLE d AS SELECT p, ai_generate_detail(p) AS r FROM (VALUES ('bad'), ('ok')) v(p)"
    )
    got = await rows(
        session,
        "SELECT r.value, r.error, r.error_code, r.model, r.finish_reason, r.prompt_tokens, "
        "r.cached_tokens, r.completion_tokens, r.ttft_ms, r.latency_ms FROM d ORDER BY p",
    )
    assert got[0][:3] == (None, "it broke", "22000")
    assert got[1] == (answer_text("ok"), None, None, "tiny", "stop", 8, 3, 1, 500.0, 1000.0)


# -- ai_agg


async def test_agg_asks_once_per_group_about_all_its_rows(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await rows(
        session,
        "SELECT topic, ai_agg(body, 'Which is best?' ORDER BY id) FROM docs WHERE id < 12 "
        "GROUP BY topic ORDER BY topic",
    )
    for topic, answer in got:
        bodies = [f"body {n}" for n in range(12) if n % 4 == topic and n % 10 != 7]
        assert answer == answer_text("\n".join(bodies) + "\nQuestion: Which is best?")
    assert len(generator.prompts) == 4


async def test_agg_of_nothing_is_null(session: DuckDbSession, generator: InstantGenerator) -> None:
    sql = "SELECT ai_agg(body, 'x'), ai_summarize_agg(body), ai_agg(body, NULL) FROM docs"
    assert await rows(session, f"{sql} WHERE id > 99") == [(None, None, None)]
    assert await rows(session, f"{sql} WHERE id = 7") == [(None, None, None)]
    assert generator.calls == []


async def test_agg_takes_distinct_filter_and_windows(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    def asked(*bodies: str) -> str | None:
        return answer_text("\n".join(bodies) + "\nQuestion: q")

    sql = "SELECT ai_agg(DISTINCT body, 'q' ORDER BY body) FROM docs WHERE id IN (1, 2, 31)"
    assert await value(session, sql) == asked("body 1", "body 2")
    sql = "SELECT ai_agg(body, 'q' ORDER BY id DESC) FILTER (WHERE id > 1) FROM docs WHERE id < 4"
    assert await value(session, sql) == asked("body 3", "body 2")
    sql = "SELECT ai_agg(body, 'q') OVER (ORDER BY id ROWS 1 PRECEDING) FROM docs WHERE id < 3"
    assert await rows(session, f"{sql} ORDER BY id") == [
        (asked("body 0"),), (asked("body 0", "body 1"),), (asked("body 1", "body 2"),)
    ]  # fmt: skip


async def test_the_instruction_may_be_a_parameter_or_belong_to_the_group(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = "SELECT ai_agg(body, $1) FROM docs WHERE id = 1"
    assert await value(session, sql, "why?") == answer_text("body 1\nQuestion: why?")
    sql = "SELECT ai_agg(body, 'of ' || topic) FROM docs WHERE id < 2 GROUP BY topic ORDER BY topic"
    assert await rows(session, sql) == [
        (answer_text("body 0\nQuestion: of 0"),), (answer_text("body 1\nQuestion: of 1"),)
    ]  # fmt: skip


async def test_the_same_rows_in_another_order_are_the_same_question(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await rows(
        session,
        "SELECT ai_agg(t, 'q') FROM (VALUES (1, 'a'), (1, 'b'), (2, 'b'), (2, 'a')) v(g, t) "
        "GROUP BY g",
    )
    assert len(generator.prompts) == 1
    assert got[0] == got[1]
    generator.prompts.clear()
    await session.execute(
        "SELECT ai_agg(t, 'q' ORDER BY i) FROM (VALUES (1, 'a', 1), (1, 'b', 2), (2, 'b', 1), "
        "(2, 'a', 2)) v(g, t, i) GROUP BY g"
    )
    assert sorted(generator.prompts) == ["a\nb\nQuestion: q", "b\na\nQuestion: q"]


async def test_a_group_beyond_the_context_is_answered_in_levels(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.served = (make_model(context_tokens=300),)
    await session.execute("SET tierkv.max_tokens = 20")
    await session.execute("SELECT ai_summarize_agg('row ' || i ORDER BY i) FROM range(200) r(i)")
    question = "\nQuestion: Summarise the texts above in a few sentences."
    assert all(prompt.endswith(question) for prompt in generator.prompts)
    assert all(len(prompt) + 20 < 300 for prompt in generator.prompts)
    about_rows = [p.removesuffix(question) for p in generator.prompts if p.startswith("row ")]
    about_rows.sort(key=lambda text: int(text.split()[1]))
    assert "\n".join(about_rows).split("\n") == [f"row {i}" for i in range(200)]
    answers = [str(answer_text(text + question)) for text in about_rows]
    assert len(answers) > 3
    others = generator.prompts[len(about_rows) :]
    assert "\n".join(p.removesuffix(question) for p in others).startswith("\n".join(answers[:3]))
    assert session.last_ai_stats.requests == len(generator.prompts)
    assert session.last_ai_stats.distinct_calls == 1


async def test_a_row_beyond_the_context_is_cut_and_nothing_is_lost(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.served = (make_model(context_tokens=200),)
    await session.execute("SET tierkv.max_tokens = 10")
    text = " ".join(f"w{n}" for n in range(150)) + "é" * 100
    await session.execute("SELECT ai_agg($1, 'q')", [text])
    parts = [p.removesuffix("\nQuestion: q") for p in generator.prompts if p[0] in "wé"]
    parts.sort(key=lambda part: text.index(part.split("\n")[0]))
    assert "".join(parts).replace("\n", "") == text
    assert len(parts) > 3


async def test_levels_that_do_not_get_smaller_fail_the_row(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.served = (make_model(context_tokens=200),)
    await session.execute("SET tierkv.max_tokens = 195")
    result = await session.execute("SELECT ai_agg(body, 'q') FROM docs")
    assert list(result.rows) == [(None,)]
    assert "has no room for rows" in result.notices[0].message
    await session.execute("SET tierkv.on_error = 'error'")
    with pytest.raises(ContextTooLongError) as caught:
        await session.execute("SELECT ai_agg(body, 'q') FROM docs")
    assert caught.value.position == 8
    assert "Set max_tokens lower" in caught.value.hint


# -- what can't work


@pytest.mark.parametrize(
    ("sql", "message", "at"),
    [
        ("SELECT ai_classify(body, []) FROM docs", "the list of categories is empty", "[]"),
        ("SELECT ai_classify('a', ['x', 'y', 'x'])", '"x" is given twice', "['x'"),
        ("SELECT ai_classify('a', ['x', NULL])", "NULL or empty", "['x'"),
        ("SELECT ai_classify('a', 'x')", "must be a list of text", "'x'"),
        ("SELECT ai_classify('a', list_value('x', 'x'))", "given twice", "list_value"),
        ("SELECT ai_extract('a', '{')", "schema is not JSON", "'{'"),
        ("SELECT ai_extract('a', '3')", "must be a JSON object or a list of names", "'3'"),
        ("SELECT ai_extract('a', ['x', 'x'])", 'the field "x" is given twice', "['x'"),
        ("SELECT ai_extract('a', '{\"x\": \"\"}')", 'the field "x" has no question', "'{"),
        ("SELECT ai_generate_json('a', '[\"x\"]')", "must be a JSON object", "'["),
        ("SELECT ai_generate_json('a', '{\"unsupported\": 1}')", "can't be compiled", "'{"),
        ("SELECT ai_generate_json(body, '{\"unsupported\": 1}') FROM docs", "compiled", "'{"),
        ("SELECT ai_agg(body) FROM docs", 'needs the argument "instruction"', "ai_agg"),
        ("SELECT ai_filter('a') OVER () FROM docs", "not an aggregate", "OVER"),
        ("SELECT ai_classify('a')", 'needs the argument "categories"', "ai_classify"),
        ("SELECT ai_score()", 'needs the argument "criteria"', "ai_score"),
    ],
)  # fmt: skip
async def test_bad_arguments_are_refused_with_their_place(
    session: DuckDbSession, generator: InstantGenerator, sql: str, message: str, at: str
) -> None:
    with pytest.raises(UdfArgumentError) as caught:
        await session.execute(sql)
    assert message in caught.value.message
    assert caught.value.position == sql.index(at) + 1
    assert generator.calls == []
    assert await value(session, "SELECT 1") == 1


@pytest.mark.parametrize(
    ("sql", "sqlstate"),
    [
        ("SELECT id FROM docs WHERE ai_agg(body, 'x') = 'y'", "42803"),
        ("SELECT ai_agg(ai_agg(body, 'x'), 'y') FROM docs", "42803"),
        ("SELECT ai_agg(body, 'x' || topic) FROM docs", "42803"),
    ],
)
async def test_what_holds_for_aggregates_holds_for_ai_agg(
    session: DuckDbSession, sql: str, sqlstate: str
) -> None:
    with pytest.raises(SqlError) as caught:
        await session.execute(sql)
    assert caught.value.sqlstate == sqlstate
    assert await value(session, "SELECT 1") == 1


@pytest.mark.parametrize(
    ("text", "reason", "value"),
    [
        ('{"a": 1}', FinishReason.LENGTH, '{"a": 1}'),
        ("12", FinishReason.LENGTH, None),
        ('{"a": 1', FinishReason.LENGTH, None),
        ("12", FinishReason.STOP, "12"),
        ("true", FinishReason.LENGTH, "true"),
    ],
)
async def test_json_that_was_cut_is_never_taken_for_whole(
    session: DuckDbSession,
    generator: InstantGenerator,
    text: str,
    reason: FinishReason,
    value: str | None,
) -> None:
    generator.texts["p"] = text
    generator.finish_reason = reason
    result = await session.execute("""SELECT ai_generate_json('p', '{"type": "integer"}')""")
    assert list(result.rows) == [(value,)]
    assert any("cut at max_tokens" in notice.message for notice in result.notices) == (
        value is None
    )


# -- what ends a statement, and what only a row


async def test_a_row_that_fails_keeps_a_write_from_happening(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    for write in (
        "DELETE FROM docs WHERE NOT ai_filter('Good?', body)",
        "UPDATE docs SET body = ai_classify(body, ['a', 'b'])",
        "CREATE TABLE new AS SELECT ai_extract(body, ['x']) FROM docs",
        "INSERT INTO topics SELECT 100 + id, ai_agg(body, 'q') FROM docs GROUP BY id",
    ):
        generator.failing["body 11"] = RowLevelError("broken")
        with pytest.raises(RowLevelError) as caught:
            await session.execute(write)
        assert caught.value.position == write.index("ai_") + 1
    assert await rows(session, "SELECT count(*), count(body) FROM docs") == [(60, 54)]
    assert await value(session, "SELECT count(*) FROM topics") == 4


async def test_a_failed_question_fails_its_call_and_no_other(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing["Extract the b."] = RowLevelError("broken")
    result = await session.execute("SELECT ai_extract('t', ['a', 'b']), ai_extract('t', ['a'])")
    ((both, one),) = result.rows
    assert both is None
    assert json.loads(one) == {"a": answer_text("t\nQuestion: Extract the a.")}
    assert "1 of 2 AI calls failed" in result.notices[0].message


@pytest.mark.parametrize("on_error", ["null", "error"])
async def test_an_unknown_model_of_a_row_ends_the_statement(
    session: DuckDbSession, generator: InstantGenerator, on_error: str
) -> None:
    await session.execute(f"SET tierkv.on_error = '{on_error}'")
    sql = "SELECT ai_classify('a', ['x', 'y'], model => m) FROM (VALUES ('tiny'), ('gpt')) v(m)"
    with pytest.raises(UnknownModelError) as caught:
        await session.execute(sql)
    assert caught.value.position == sql.index("m)") + 1
    assert generator.calls == []


async def test_an_answer_is_the_same_for_all_who_ask(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    got = await rows(
        session,
        "SELECT ai_generate(p), (ai_generate_detail(p)).value, "
        "ai_extract(d, {'x': 'Who?'}) ->> 'x', ai_generate(d || E'\\nQuestion: Who?') "
        "FROM (VALUES ('p', 'd'), ('p', 'd')) v(p, d)",
    )
    assert got == [(answer_text("p"),) * 2 + (answer_text("d\nQuestion: Who?"),) * 2] * 2
    assert sorted(generator.prompts) == ["d\nQuestion: Who?", "p"]


async def test_a_text_too_long_to_count_fails_alone(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.uncountable = "long"
    result = await session.execute(
        "SELECT ai_count_tokens('long'), ai_count_tokens('ab'), ai_agg(t, 'q') "
        "FROM (VALUES ('c')) v(t)"
    )
    assert list(result.rows) == [(None, 2, answer_text("c\nQuestion: q"))]
    assert "1 of 3 AI calls failed and gave NULL: a text is too long" in result.notices[0].message
    result = await session.execute("SELECT ai_count_tokens('long')")
    assert list(result.rows) == [(None,)]
