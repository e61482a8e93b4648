"""AI filters: after everything else, the one that saves most first, and how many calls that is."""

from __future__ import annotations

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.accounts.statistics import FilterOrder
from tierkv.dbfront.statement.session import DuckDbSession

ROWS = 800
LONG = "x" * 300


def test_cheap_and_selective_filters_go_first() -> None:
    order = FilterOrder(3)
    assert order.measuring
    order.ran(0, rows=64, passed=32, cost=6400)
    order.ran(1, rows=64, passed=63, cost=640)
    order.ran(2, rows=64, passed=32, cost=640)
    assert not order.measuring
    assert order.order() == [2, 1, 0] or order.order() == [2, 0, 1]
    assert order.order()[0] == 2


def test_without_measurements_the_text_decides() -> None:
    assert FilterOrder(3).order() == [0, 1, 2]
    assert not FilterOrder(1).measuring


@pytest.fixture
async def big(session: DuckDbSession) -> DuckDbSession:
    await session.execute(
        f"CREATE TABLE big AS SELECT i, i % 4 AS g, 'p' || i AS p FROM range({ROWS}) r(i)"
    )
    await session.execute("SET tierkv.max_calls = 0")
    await session.execute("SET tierkv.execution = replay")
    return session


def passing(word: str, prefix: str = "") -> set[int]:
    return {i for i in range(ROWS) if answer_text(f"{prefix}p{i}") == word}


@pytest.mark.parametrize("turned", [False, True])
async def test_an_aggregate_over_two_filters(
    big: DuckDbSession, generator: InstantGenerator, turned: bool
) -> None:
    filters = [f"ai_generate('{LONG}' || p) <> 'red'", "ai_generate(p) = 'red'"]
    where = " AND ".join(filters[::-1] if turned else filters)
    found = await big.execute(f"SELECT count(*) FROM big WHERE {where}")
    red, not_red = passing("red"), set(range(ROWS)) - passing("red", LONG)
    assert found.rows == [(len(red & not_red),)]
    asked = [prompt for prompt in generator.prompts if prompt.startswith("x")]
    assert len(generator.prompts) - len(asked) == ROWS
    sampled = 64
    assert len(asked) <= sampled + len(red)
    assert len(generator.prompts) == len(set(generator.prompts))


async def test_plain_conjuncts_come_first_wherever_they_are_written(
    big: DuckDbSession, generator: InstantGenerator
) -> None:
    found = await big.execute("SELECT count(*) FROM big WHERE ai_generate(p) <> '' AND i % 80 = 0")
    assert found.rows == [(10,)]
    assert len(generator.prompts) == 10


async def test_few_rows_are_not_worth_a_sample(
    big: DuckDbSession, generator: InstantGenerator
) -> None:
    text = (
        "SELECT count(*) FROM big WHERE i < 7 "
        "AND ai_generate(p) = '' AND ai_generate('z' || p) = ''"
    )
    assert (await big.execute(text)).rows == [(0,)]
    assert len(generator.prompts) == 7


async def test_filters_with_errors_in_their_casts_fall_back(
    big: DuckDbSession, generator: InstantGenerator
) -> None:
    """A sample that fails says nothing about the statement; only rows that pass are cast."""
    text = (
        "SELECT count(*) FROM big WHERE try_cast(ai_generate(p) AS INT) IS NULL "
        "AND CAST(CASE WHEN ai_generate(p) = 'red' THEN '1' ELSE '0' END AS INT) = 1"
    )
    assert (await big.execute(text)).rows == [(len(passing("red")),)]


async def test_parameters_in_ordered_filters(
    big: DuckDbSession, generator: InstantGenerator
) -> None:
    text = "SELECT count(*) FROM big WHERE ai_generate(p) = $2 AND g = $1 AND ai_generate(p) <> $3"
    found = await big.execute(text, [1, "red", "blue"])
    assert found.rows == [(len([i for i in passing("red") if i % 4 == 1]),)]
    assert len(generator.prompts) == ROWS // 4


async def test_a_dry_run_counts_what_the_first_filter_asks(
    big: DuckDbSession, generator: InstantGenerator
) -> None:
    await big.execute("SET tierkv.dry_run = on")
    found = await big.execute(
        "SELECT count(*) FROM big WHERE ai_generate(p) = '' AND ai_generate('z' || p) = ''"
    )
    assert found.rows == [(0,)]
    (notice,) = found.notices
    assert notice.message.startswith(f"dry run: {ROWS} AI calls")
    assert not generator.prompts
