"""The function family over an instant model: what is asked, what comes of it, and NULL."""

from __future__ import annotations

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
    SqlError,
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


@pytest.mark.parametrize(
    ("given", "state"),
    [("'late'", "22P02"), ("'{1,2}'", "22P02"), ("'late'::varchar", "42883"), ("$1", "22P02")],
)
@pytest.mark.parametrize("operator", ["<=>", "<->"])
async def test_a_text_beside_a_vector_operator_is_told_how_to_write_vectors(
    session: DuckDbSession, given: str, state: str, operator: str
) -> None:
    sql = f"SELECT v {operator} {given} FROM (VALUES ([1.0, 0.0]::FLOAT[])) t(v)"
    with pytest.raises(SqlError) as refused:
        await session.execute(sql, ["late"] if given == "$1" else None)
    assert refused.value.sqlstate == state
    assert "'[0.1, 0.2]'::FLOAT[2]" in refused.value.hint and "ai_embed" in refused.value.hint


# -- ai_extract


# -- spellings, detail


# -- ai_agg


async def test_the_instruction_may_be_a_parameter_or_belong_to_the_group(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = "SELECT ai_agg(body, $1) FROM docs WHERE id = 1"
    assert await value(session, sql, "why?") == answer_text("body 1\nQuestion: why?")
    sql = "SELECT ai_agg(body, 'of ' || topic) FROM docs WHERE id < 2 GROUP BY topic ORDER BY topic"
    assert await rows(session, sql) == [
        (answer_text("body 0\nQuestion: of 0"),), (answer_text("body 1\nQuestion: of 1"),)
    ]  # fmt: skip


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
    assert "is too small for the instruction, rows and an answer" in result.notices[0].message
    await session.execute("SET tierkv.on_error = 'error'")
    with pytest.raises(ContextTooLongError) as caught:
        await session.execute("SELECT ai_agg(body, 'q') FROM docs")
    assert caught.value.position == 8
    assert "Set max_tokens lower" in caught.value.hint


# -- what can't work


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
