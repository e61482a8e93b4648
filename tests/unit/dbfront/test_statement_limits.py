"""Budgets, retries, dry runs, priorities and options: what a statement may cost."""

from __future__ import annotations

import json

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.accounts.statistics import StatementProgress
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore.errors import (
    DeadlineError,
    FeatureNotSupportedError,
    NodeLostError,
    RowLevelError,
    SqlError,
    TierKVError,
    UdfArgumentError,
    UserError,
)


async def value(session: DuckDbSession, sql: str) -> object:
    return (await session.execute(sql)).rows[0][0]


# -- budgets


async def test_prompt_tokens_are_bounded_before_anything_is_sent(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    sql = "SELECT ai_generate(body) FROM docs WHERE id < 5"
    needed = sum(len(f"user: body {n}") for n in range(5))
    await session.execute(f"SET tierkv.max_prompt_tokens = {needed - 1}")
    with pytest.raises(SqlError) as caught:
        await session.execute(sql)
    assert caught.value.sqlstate == "53400"
    assert f"at least {needed} prompt tokens" in caught.value.message
    assert f"SET tierkv.max_prompt_tokens = {needed}" in caught.value.hint
    assert generator.calls == []
    await session.execute(f"SET tierkv.max_prompt_tokens = {needed}")
    await session.execute(sql)
    assert len(generator.calls) == 5


async def test_prompt_tokens_of_later_rounds_count_too(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_prompt_tokens = 20")
    with pytest.raises(SqlError, match="max_prompt_tokens allows 20"):
        await session.execute("SELECT ai_generate('more of ' || ai_generate('a b c'))")
    assert generator.prompts == ["a b c"]


async def test_completion_tokens_are_bounded_by_what_answers_may_have(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_completion_tokens = 99")
    with pytest.raises(SqlError) as caught:
        await session.execute(
            "SELECT ai_generate(body, options => '{\"max_tokens\": 20}') FROM docs"
        )
    assert caught.value.sqlstate == "53400"
    assert generator.calls == []
    # Readouts generate nothing; what was generated before counts as it was.
    await session.execute("SELECT ai_filter('x', body), ai_embed(body) FROM docs")
    await session.execute("SET tierkv.max_tokens = 98")
    await session.execute("SELECT ai_generate('b' || ai_generate('a'))")
    await session.execute("SET tierkv.max_tokens = 99")
    with pytest.raises(SqlError, match="at least 100 tokens to generate"):
        await session.execute("SELECT ai_generate('d' || ai_generate('c'))")


# -- dry runs


async def test_a_large_statement_is_announced_with_an_estimate_before_its_calls(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    seen: list[tuple[str, int]] = []

    def watch(progress: StatementProgress) -> None:
        if progress.notice is not None:
            seen.append((progress.notice.message, len(generator.calls)))

    session.on_progress = watch
    await session.execute("SET tierkv.notice_calls = 20")
    result = await session.execute("SELECT max(ai_generate('body ' || i)) FROM range(20) r(i)")
    assert result.notices == ()
    result = await session.execute("SELECT max(ai_generate('body ' || i)) FROM range(30) r(i)")
    (notice,) = result.notices
    tokens = sum(len(f"user: body {n}") for n in range(30))
    assert notice.message.startswith(
        f"this statement makes at least 30 AI calls: about {tokens} prompt tokens, "
    )
    assert [(notice.message, 20)] == seen
    await session.execute("SET tierkv.notice_calls = 0")
    result = await session.execute("SELECT max(ai_generate('body ' || i)) FROM range(30) r(i)")
    assert result.notices == ()


async def test_a_stream_is_announced_by_what_it_took_so_far(session: DuckDbSession) -> None:
    await session.execute("SET tierkv.notice_calls = 20")
    await session.execute("SET tierkv.max_concurrency = 8")
    stream = await session.execute_rows("SELECT ai_generate('p' || i) FROM range(40) r(i)")
    assert not isinstance(stream, StatementResult)
    while await stream.next_rows():
        pass
    assert stream.result is not None
    (notice,) = stream.result.notices
    assert "has reached " in notice.message
    assert "AI calls and continues; so far " in notice.message
    await stream.close()


async def test_a_dry_run_counts_and_sends_nothing(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.dry_run = on")
    await session.execute("SET tierkv.max_calls = 1")
    result = await session.execute(
        "SELECT DISTINCT ai_generate(body), ai_extract(body, ['a', 'b']), ai_count_tokens('abc') "
        "FROM docs WHERE id < 3"
    )
    assert list(result.rows) == [(None, None, 3)]
    (notice,) = result.notices
    prompts = [f"user: body {n}" for n in range(3)]
    prompts += [f"user: body {n}\nQuestion: Extract the {x}." for n in range(3) for x in "ab"]
    assert notice.message == (
        f"dry run: 6 AI calls with {sum(map(len, prompts))} prompt tokens in 9 requests were not "
        "sent and gave NULL"
    )
    assert generator.calls == []
    await session.execute("RESET tierkv.dry_run")
    await session.execute("RESET tierkv.max_calls")
    assert await value(session, "SELECT ai_generate('p')") == answer_text("p")


async def test_a_dry_run_writes_nothing(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.dry_run = on")
    with pytest.raises(FeatureNotSupportedError, match=r"tierkv\.dry_run is on"):
        await session.execute("UPDATE docs SET body = ai_generate(body)")
    assert await value(session, "SELECT count(body) FROM docs") == 54
    assert generator.calls == []


# -- retries


@pytest.mark.parametrize("error", [DeadlineError("late"), NodeLostError("gone")])
async def test_what_may_pass_is_tried_again(
    session: DuckDbSession, generator: InstantGenerator, error: TierKVError
) -> None:
    await session.execute("SET tierkv.max_retries = 2")
    await session.execute("SET tierkv.on_error = 'error'")
    generator.failing["p"] = [error, error]
    assert await value(session, "SELECT ai_generate('p')") == answer_text("p")
    assert len(generator.calls) == 3
    generator.failing["p"] = [error, error, error]
    with pytest.raises(type(error)):
        await session.execute("SELECT ai_generate('p')")
    generator.failing["p"] = [error]
    with pytest.raises(type(error)):
        await session.execute("SELECT ai_generate('p', options => '{\"retries\": 0}')")


async def test_a_call_says_itself_how_often_it_is_tried_again(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing["p"] = [DeadlineError("late")]
    got = await value(session, "SELECT ai_generate('p', options => '{\"retries\": 1}')")
    assert got == answer_text("p")


async def test_what_stays_wrong_is_not_tried_again(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.max_retries = 5")
    generator.failing["p"] = RowLevelError("broken logits")
    assert await value(session, "SELECT ai_generate('p')") is None
    assert len(generator.calls) == 1


# -- options


async def test_priority_comes_from_the_session_or_the_call(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute("SET tierkv.priority = -3")
    await session.execute(
        "SELECT ai_generate('a'), ai_embed('b'), ai_generate('c', options => '{\"priority\": 7}')"
    )
    assert {call.messages is None: call.options.priority for call in generator.calls}[True] == -3
    assert sorted(call.options.priority for call in generator.calls) == [-3, -3, 7]


async def test_dedup_is_what_happens_and_can_not_be_left_out(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    await session.execute(
        "SELECT ai_generate('p', options => '{\"dedup\": true}'), ai_generate('p')"
    )
    assert len(generator.calls) == 1
    with pytest.raises(UdfArgumentError) as caught:
        await session.execute("SELECT ai_generate('p', options => '{\"dedup\": false}')")
    assert "seed" in caught.value.hint
    assert caught.value.position


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_json_is_asked_of_another_function(session: DuckDbSession, kind: str) -> None:
    options = json.dumps({"response_format": {"type": kind}})
    with pytest.raises(UdfArgumentError) as caught:
        await session.execute(f"SELECT ai_generate('p', options => '{options}')")
    assert "ai_generate_json(" in caught.value.hint
    text = json.dumps({"response_format": {"type": "text"}})
    assert await value(session, f"SELECT ai_generate('p', options => '{text}')") == answer_text("p")


@pytest.mark.parametrize(
    "option",
    ['{"retries": 11}', '{"retries": -1}', '{"retries": 1.5}', '{"dedup": 1}',
     '{"response_format": "json"}', '{"priority": 101}'],
)  # fmt: skip
async def test_options_out_of_range_are_refused(session: DuckDbSession, option: str) -> None:
    sql = f"SELECT ai_generate('p', options => '{option}')"
    with pytest.raises(UdfArgumentError) as caught:
        await session.execute(sql)
    assert caught.value.position == sql.index("'{") + 1


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_retries", "10", "11"),
        ("max_prompt_tokens", "0", "-1"),
        ("max_completion_tokens", "100000", "many"),
        ("priority", "-100", "101"),
        ("dry_run", "off", "maybe"),
        ("field_reorder", "off", "ggr"),
    ],
)
async def test_settings_have_bounds(session: DuckDbSession, name: str, good: str, bad: str) -> None:
    await session.execute(f"SET tierkv.{name} = {good}")
    assert (await session.execute(f"SHOW tierkv.{name}")).rows[0][0] == good
    with pytest.raises(UserError, match="invalid value for parameter"):
        await session.execute(f"SET tierkv.{name} = '{bad}'")


async def test_an_unknown_order_of_fields_is_told_the_known_ones(session: DuckDbSession) -> None:
    with pytest.raises(UserError) as caught:
        await session.execute("SET tierkv.field_reorder = 'ggr'")
    assert "off, stats" in f"{caught.value} {caught.value.hint}"


# -- odd text


async def test_text_that_engines_can_not_hold_does_not_break_a_statement(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.texts["nul"] = "a\0b"
    generator.texts["half"] = "a\ud800b"
    generator.texts["t\nQuestion: Extract the x."] = "a\0b\ud800"
    got = (
        await session.execute(
            "SELECT ai_generate('nul'), ai_generate('half'), ai_extract('t', ['x']) ->> 'x', "
            "(ai_generate_detail('nul')).value, ai_generate('p' || chr(0)) IS NOT NULL"
        )
    ).rows
    assert list(got) == [("a\ufffdb", "a\ufffdb", "a\ufffdb\ufffd", "a\ufffdb", True)]
    assert "p\0" in generator.prompts


async def test_ten_thousand_columns_are_refused_in_words(session: DuckDbSession) -> None:
    columns = ", ".join(f"ai_generate('{n}')" for n in range(10_000))
    with pytest.raises(UserError) as caught:
        await session.execute(f"SELECT {columns}")
    assert "more than 4096 different AI calls" in caught.value.message
    assert await value(session, "SELECT 1") == 1


@pytest.mark.parametrize("execution", ["stream", "replay"])
async def test_budgets_hold_however_rows_are_made(
    session: DuckDbSession, generator: InstantGenerator, execution: str
) -> None:
    await session.execute(f"SET tierkv.execution = {execution}")
    sql = "SELECT id, ai_generate(body) FROM docs WHERE ai_filter('x', body)"
    await session.execute("SET tierkv.dry_run = on")
    result = await session.execute(sql)
    assert list(result.rows) == []
    assert any(notice.message.startswith("dry run: 27 AI calls") for notice in result.notices)
    assert generator.calls == []
    await session.execute("SET tierkv.dry_run = off")
    await session.execute("SET tierkv.max_prompt_tokens = 300")
    with pytest.raises(SqlError, match="max_prompt_tokens allows 300"):
        await session.execute(sql)
    assert generator.calls == []


@pytest.mark.parametrize(
    ("rows", "settings", "priority"),
    [
        (32, [], 0),
        (33, [], 1),
        (33, ["tierkv.bulk_calls = 0"], 0),
        (5, ["tierkv.bulk_calls = 4"], 1),
        (33, ["tierkv.priority = -2"], -2),
    ],
)
async def test_a_statement_of_many_calls_is_bulk(
    session: DuckDbSession,
    generator: InstantGenerator,
    rows: int,
    settings: list[str],
    priority: int,
) -> None:
    for setting in settings:
        await session.execute(f"SET {setting}")
    # Not streamed, so that all are asked at once.
    await session.execute(f"SELECT max(ai_generate('n' || i)) FROM range({rows}) r(i)")
    assert [call.options.priority for call in generator.calls] == [priority] * rows


async def test_a_calls_own_priority_stands_in_bulk(
    session: DuckDbSession, generator: InstantGenerator
) -> None:
    call = """ai_generate('n' || i, options => '{"priority": 0}')"""
    await session.execute(f"SELECT max({call}) FROM range(40) r(i)")
    assert {call.options.priority for call in generator.calls} == {0}
