"""Statements over long texts: asked in waves and rounds of bounded size, with the same answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fix_sql import InstantGenerator
from tierkv.dbfront.calls import answers, evaluation
from tierkv.dbfront.contracts import CallPlan, ClientInfo, PreparedCall
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession

ROWS, CHARS = 40, 400
STATEMENTS = [
    "SELECT id, ai_generate(body) FROM long ORDER BY id",
    "SELECT count(DISTINCT ai_generate(body)), max(length(ai_generate('x' || body))) FROM long",
    "SELECT id FROM long WHERE ai_filter('long?', body) AND ai_generate(body) <> '' ORDER BY id",
    "SELECT max(ai_generate(ai_generate(body) || body)) FROM long",
    "SELECT id, ai_generate(body) FROM long WHERE ai_filter('long?', body) LIMIT 7",
    "SELECT id, ai_generate('y' || body) FROM long WHERE ai_filter('z', body) ORDER BY id LIMIT 5",
    "SELECT id % 3, count(ai_classify(body, ['a', 'b'])) FROM long GROUP BY 1 ORDER BY 1",
    "SELECT ai_summarize_agg(body ORDER BY id) FROM long WHERE id < 5",
]


class CountingGenerator(InstantGenerator):
    """Remembers how many calls were prepared at once."""

    most_prepared: int = 0

    def plan(self, calls: Sequence[PreparedCall], *, max_in_flight: int) -> CallPlan:
        self.most_prepared = max(self.most_prepared, len(calls))
        return super().plan(calls, max_in_flight=max_in_flight)


@pytest.fixture
def generator() -> CountingGenerator:
    return CountingGenerator()


@pytest.fixture
async def session(server: DuckDbSqlServer) -> DuckDbSession:
    session = await server.open_session(ClientInfo(user="ann"))
    body = f"repeat('note ', {CHARS // 5}) || i"
    await session.execute(
        f"CREATE TABLE long AS SELECT i AS id, {body} AS body FROM range({ROWS}) r(i)"
    )
    return session


@pytest.mark.parametrize("sql", STATEMENTS)
async def test_small_waves_and_rounds_give_the_same_answers(
    session: DuckDbSession,
    generator: CountingGenerator,
    monkeypatch: pytest.MonkeyPatch,
    sql: str,
) -> None:
    wanted = (await session.execute(sql)).rows
    asked = sorted(generator.prompts)
    generator.prompts.clear()
    generator.most_prepared = 0
    monkeypatch.setattr(evaluation, "_WAVE_TOKENS", 5 * CHARS)
    monkeypatch.setattr(answers, "_MOST_CHARS", 20 * CHARS)
    assert (await session.execute(sql)).rows == wanted
    assert sorted(generator.prompts) == asked, "every prompt is asked once"
    assert generator.most_prepared <= 8


async def test_a_dry_run_counts_all_waves(
    session: DuckDbSession, generator: CountingGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_WAVE_TOKENS", 5 * CHARS)
    await session.execute("SET tierkv.dry_run = on")
    result = await session.execute("SELECT count(ai_generate(body)) FROM long")
    assert f"{ROWS} AI calls" in result.notices[-1].message
    assert generator.calls == []


async def test_waves_are_in_the_order_of_prompts(
    session: DuckDbSession, generator: CountingGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_WAVE_TOKENS", 5 * CHARS)
    monkeypatch.setattr(evaluation, "_SORTED_CHARS", 5 * CHARS)
    await session.execute("SET tierkv.max_concurrency = 1")
    await session.execute(
        f"SELECT count(ai_generate((id % 2) || repeat('note ', {CHARS // 5}) || id)) FROM long"
    )
    beginnings = [prompt.removeprefix("user: ")[0] for prompt in generator.prompts]
    assert beginnings == sorted(beginnings)


def test_answers_are_remembered_without_their_long_texts() -> None:
    short, long = "a" * 256, "a" * 257
    assert answers._brief(short) == short
    assert len(answers._brief(long)) == 16 and answers._brief(long) != answers._brief(long + "a")
    assert answers._brief("\ud800" * 300) != answers._brief("\udfff" * 300)
