"""A LIMIT bounds the calls of the select list, in every statement that has one."""

from __future__ import annotations

import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tierkv.dbfront.statement.session import DuckDbSession

ROWS = 400
QUERIES = {
    "ORDER BY": ("SELECT i, {} FROM big ORDER BY i LIMIT 60", range(60)),
    "joined": (
        "SELECT b.i, {} AS a FROM big b JOIN (SELECT 1 AS k) s ON b.g = s.k ORDER BY b.i LIMIT 60",
        range(1, 241, 4),
    ),
    "OFFSET": ("SELECT i, {} FROM big ORDER BY i OFFSET 330", range(330, ROWS)),
    "percent": ("SELECT i, {} FROM big ORDER BY i LIMIT 15%", range(60)),
    "expression": ("SELECT i, {} FROM big ORDER BY i LIMIT (SELECT 60)", range(60)),
    "subquery": ("SELECT * FROM (SELECT i, {} AS a FROM big ORDER BY i DESC LIMIT 60)",
                 range(340, ROWS)),
    "WITH": ("WITH x AS (SELECT i, {} FROM big ORDER BY i LIMIT 60) SELECT * FROM x", range(60)),
    "star": ("SELECT *, {} FROM big ORDER BY i LIMIT 60", range(60)),
    "around": ("SELECT i, upper({}) || g FROM big ORDER BY g, i LIMIT 60", range(0, 240, 4)),
}  # fmt: skip
STATEMENTS = (
    "{}",
    "CREATE TABLE made AS {}",
    "INSERT INTO target {}",
    "EXPLAIN ANALYZE {}",
)


@pytest.fixture
async def big(session: DuckDbSession) -> DuckDbSession:
    await session.execute(
        f"CREATE TABLE big AS SELECT i, i % 4 AS g, 'p' || i AS p FROM range({ROWS}) r(i)"
    )
    await session.execute("CREATE MACRO plain(x) AS 'a ' || x")
    await session.execute("SET tierkv.max_calls = 0")
    return session


@pytest.mark.parametrize("name", QUERIES)
async def test_calls_and_rows(big: DuckDbSession, generator: InstantGenerator, name: str) -> None:
    text, rows = QUERIES[name]
    await big.execute("SET tierkv.execution = 'replay'")
    result = await big.execute(text.format("ai_generate(p)"))
    assert sorted(generator.prompts) == sorted(f"p{i}" for i in rows)
    assert [row[0] for row in result.rows] == [
        row[0] for row in (await big.execute(text.format("plain(p)"))).rows
    ]
    answers = [answer_text(f"p{row[0]}") or "" for row in result.rows]
    seen = [row[-1] for row in result.rows]
    assert seen == answers or seen == [answer.upper() + "0" for answer in answers]


@pytest.mark.parametrize("statement", STATEMENTS)
async def test_every_statement(
    big: DuckDbSession, generator: InstantGenerator, statement: str
) -> None:
    await big.execute("CREATE TABLE target (i BIGINT, a TEXT)")
    await big.execute(statement.format(QUERIES["ORDER BY"][0].format("ai_generate(p)")))
    assert len(generator.prompts) == 60


async def test_an_estimate_counts_the_same(big: DuckDbSession) -> None:
    text = QUERIES["ORDER BY"][0].format("ai_generate(p)")
    made = await big.execute(f"EXPLAIN (AI_ESTIMATE) {text}")
    text = "\n".join(str(row[-1]) for row in made.rows)
    assert "rows 60" in text, text


async def test_a_name_that_is_there_twice_stays(big: DuckDbSession) -> None:
    result = await big.execute("SELECT i, i, g + 1, ai_generate(p) FROM big ORDER BY i LIMIT 60")
    assert result.columns is not None
    assert [column.name for column in result.columns] == ["i", "i", "(g + 1)", "ai_generate"]


@pytest.mark.parametrize("params", [["3", "2"], [3, 2], [None, 2], [3, None]])
async def test_a_limit_by_parameter_stops_filters(
    big: DuckDbSession, generator: InstantGenerator, params: list[object]
) -> None:
    text = "SELECT i FROM big WHERE ai_generate(p) <> 'red' ORDER BY i LIMIT {} OFFSET {}"
    made = await big.execute(text.format("$1", "$2"), params)
    asked = len(generator.prompts)
    values = ["ALL" if value is None and at == 0 else value or 0 for at, value in enumerate(params)]
    literal = await big.execute(text.format(*values))
    assert list(made.rows) == list(literal.rows)
    assert asked < 40 or not isinstance(params[0], int)
