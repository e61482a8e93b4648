"""Streamed statements: first rows early, nothing made ahead, and they end as cleanly as others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pytest

from tests.fix_sql import TABLES, InstantGenerator, answer_text
from tests.property.test_sql_replay import is_it
from tierkv.dbfront.contracts import ClientInfo, PreparedCall, TextEvent
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.dbfront.statement_results import RowStream, StatementResult
from tierkv.kvcore.errors import (
    CancelledByUserError,
    FeatureNotSupportedError,
    RowLevelError,
    SqlError,
)


@dataclass
class HeldGenerator(InstantGenerator):
    """Holds back answers to prompts with ``held`` in them; ``waiting`` is set when one waits."""

    held: str = "\0"
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, prepared: PreparedCall) -> AsyncIterator[TextEvent]:
        assert prepared.call.messages is not None
        if self.held in prepared.call.messages[-1].content:
            self.waiting.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        async for event in InstantGenerator.stream(self, prepared):
            yield event


@pytest.fixture
def generator() -> HeldGenerator:
    return HeldGenerator()


async def opened(session: DuckDbSession, sql: str) -> RowStream:
    stream = await session.execute_rows(sql)
    assert not isinstance(stream, StatementResult)
    return stream


async def rest(stream: RowStream) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    while batch := await stream.next_rows():
        rows += batch
    return rows


async def big(session: DuckDbSession, rows: int = 1000) -> None:
    await session.execute(f"CREATE TABLE big AS SELECT i, 'p' || i AS p FROM range({rows}) r(i)")
    await session.execute("SET tierkv.max_concurrency = 4")


async def test_first_rows_come_before_the_last_answers(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session)
    await session.execute("SET tierkv.max_calls = 0")
    generator.held = "p999"
    stream = await opened(session, "SELECT i, ai_generate(p) AS a FROM big")
    assert [column.name for column in stream.columns] == ["i", "a"]
    rows = list(await stream.next_rows())
    assert rows == [(i, answer_text(f"p{i}")) for i in range(4)]
    reading = asyncio.create_task(rest(stream))
    await generator.waiting.wait()
    assert not reading.done()
    generator.release.set()
    rows += await reading
    assert rows == [(i, answer_text(f"p{i}")) for i in range(1000)]
    assert stream.result == StatementResult("SELECT 1000", stream.columns, [])


async def test_rows_that_nobody_takes_stop_the_statement(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session)
    stream = await opened(session, "SELECT ai_generate(p) FROM big")
    assert len(await stream.next_rows()) == 4
    for _ in range(100):
        await asyncio.sleep(0)
    asked = len(generator.prompts)
    assert asked == 4
    await stream.next_rows()
    assert len(generator.prompts) == 12
    await stream.close()
    assert (await session.execute("SELECT 1")).rows == [(1,)]
    assert len(generator.prompts) == 12


async def test_cancel_stops_calls_and_the_session_goes_on(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session)
    generator.held = "p5"
    stream = await opened(session, "SELECT ai_generate(p) FROM big")
    await stream.next_rows()
    reading = asyncio.create_task(rest(stream))
    await generator.waiting.wait()
    await session.cancel()
    with pytest.raises(CancelledByUserError):
        await reading
    assert generator.cancelled
    assert session.transaction_status == "I"
    assert (await session.execute("SELECT count(*) FROM big")).rows == [(1000,)]


async def test_it_sees_the_transaction_and_leaves_it_usable(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await session.execute("BEGIN")
    await session.execute("CREATE TEMP TABLE mine AS SELECT i, 'p' || i AS p FROM range(300) r(i)")
    stream = await opened(session, "SELECT i, ai_generate(p) FROM mine")
    await stream.next_rows()
    await stream.close()
    assert session.transaction_status == "T"
    await session.execute("INSERT INTO mine VALUES (7, 'seven')")
    found = await session.execute("SELECT i FROM mine WHERE ai_generate(p) <> '' LIMIT 2")
    assert found.rows == [(0,), (1,)]
    await session.execute("COMMIT")
    assert (await session.execute("SELECT count(*) FROM mine")).rows == [(301,)]


async def test_all_rows_are_of_one_snapshot(
    server: DuckDbSqlServer, session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session, 200)
    stream = await opened(session, "SELECT i, ai_generate(p) FROM big")
    rows = list(await stream.next_rows())
    other = await server.open_session(ClientInfo(user="bob"))
    await other.execute("INSERT INTO big VALUES (1000, 'late')")
    await other.execute("DELETE FROM big WHERE i = 150")
    rows += await rest(stream)
    assert [row[0] for row in rows] == list(range(200))


async def test_the_next_statement_keeps_the_rest(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session, 100)
    stream = await opened(session, "SELECT i, ai_generate(p) FROM big")
    rows = list(await stream.next_rows())
    await session.execute("DELETE FROM big")
    rows += await rest(stream)
    assert [row[0] for row in rows] == list(range(100))


async def test_a_failing_call_ends_the_stream(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session, 100)
    await session.execute("SET tierkv.on_error = error")
    generator.failing["p50"] = RowLevelError("no")
    stream = await opened(session, "SELECT i, ai_generate(p) FROM big")
    with pytest.raises(RowLevelError):
        await rest(stream)
    assert (await session.execute("SELECT 1")).rows == [(1,)]


async def test_failures_are_told_at_the_end(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session, 100)
    generator.failing["p50"] = RowLevelError("no")
    stream = await opened(session, "SELECT i, ai_generate(p) FROM big")
    rows = await rest(stream)
    assert rows[50] == (50, None)
    assert stream.result is not None
    (notice,) = stream.result.notices
    assert notice.message.startswith("1 of 100 AI calls failed")


async def test_filters_are_asked_by_what_they_save(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    """The second filter is short and drops most rows, so it goes first once that is known."""
    await big(session, 400)
    await session.execute("SET tierkv.execution = stream")
    long = "'" + "x" * 200 + "' || p"
    text = f"SELECT i FROM big WHERE ai_generate({long}) <> 'red' AND ai_generate(p) = 'red'"
    found = (await session.execute(text)).rows
    red = [i for i in range(400) if answer_text(f"p{i}") == "red"]
    assert found == [(i,) for i in red if answer_text("x" * 200 + f"p{i}") != "red"]
    asked_long = [prompt for prompt in generator.prompts if prompt.startswith("x")]
    measured = 4 + 8 + 16
    assert len(asked_long) <= measured + len([i for i in red if i >= measured])
    assert len(generator.prompts) - len(asked_long) == 400


async def test_a_huge_source_with_a_limit_ends_at_once(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    text = "SELECT i FROM range(10_000_000) r(i) WHERE ai_generate('n' || i % 10) <> '' LIMIT 5"
    assert (await session.execute(text)).rows == [(i,) for i in range(5)]
    assert len(generator.prompts) <= 10


async def test_order_by_a_column_stops_early_too(
    session: DuckDbSession, generator: HeldGenerator
) -> None:
    await big(session)
    text = "SELECT i FROM big WHERE ai_generate(p) <> 'no' ORDER BY i DESC LIMIT 3"
    expected = [(i,) for i in range(999, 0, -1) if answer_text(f"p{i}") != "no"][:3]
    assert (await session.execute(text)).rows == expected
    assert len(generator.prompts) == 16


async def test_execution_can_be_asked_for(session: DuckDbSession, generator: HeldGenerator) -> None:
    await session.execute("SET tierkv.execution = stream")
    with pytest.raises(FeatureNotSupportedError, match="an aggregate needs all rows"):
        await session.execute("SELECT count(ai_generate(body)) FROM docs")
    await session.execute("CREATE TYPE mood AS ENUM ('sad', 'glad')")
    await session.execute("CREATE TABLE moods AS SELECT 'sad'::mood AS m, 'p' AS p")
    statement = "SELECT CASE WHEN ai_generate(p) <> '' THEN m END FROM moods"
    with pytest.raises(FeatureNotSupportedError, match="type ENUM"):
        await session.execute(statement)
    await session.execute("SET tierkv.execution = replay")
    whole = await session.execute_rows(statement)
    assert isinstance(whole, StatementResult)
    assert whole.rows == [("sad",)]


async def test_old_answers_are_forgotten_and_asked_again(
    session: DuckDbSession, generator: HeldGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is bounded; rows that ask for something older get the same answer again."""
    monkeypatch.setattr("tierkv.dbfront.statement.stream_executor.KEPT_ANSWERS", 8)
    await big(session, 120)
    stream = await opened(session, "SELECT i, ai_generate('q' || i % 30) FROM big")
    assert await rest(stream) == [(i, answer_text(f"q{i % 30}")) for i in range(120)]
    assert 30 < len(generator.prompts) <= 120


async def test_answers_are_compared_by_the_collation_of_what_was_asked(
    session: DuckDbSession,
) -> None:
    await session.execute("SET tierkv.execution = stream")
    word = str(answer_text("body 1")).upper()
    plain = f"SELECT id FROM docs WHERE ai_generate(body) = '{word}' ORDER BY id"
    assert await rest(await opened(session, plain)) == []
    await session.execute("CREATE TABLE notes (id INT, body VARCHAR COLLATE NOCASE)")
    await session.execute("INSERT INTO notes SELECT id, body FROM docs")
    text = plain.replace("docs", "notes")
    with pytest.raises(FeatureNotSupportedError, match="collation"):
        await session.execute_rows(text)
    await session.execute("SET tierkv.execution = auto")
    found = await session.execute_rows(text)
    assert isinstance(found, StatementResult) and (1,) in found.rows
    filtered = "SELECT id FROM notes WHERE ai_filter('q', body) = true ORDER BY id"
    assert await rest(await opened(session, filtered))


async def test_a_column_may_have_a_name_of_ours(session: DuckDbSession) -> None:
    text = "SELECT id AS tierkv_item_0, ai_generate(body) AS a FROM docs WHERE id < 2 ORDER BY id"
    found = await session.execute_rows(text)
    assert isinstance(found, StatementResult)
    assert list(found.rows) == [(0, answer_text("body 0")), (1, answer_text("body 1"))]


@pytest.mark.parametrize(
    "made",
    [
        ["/* mine */ CREATE TEMP MACRO upper(x) AS 'mine'"],
        ["CREATE SCHEMA own", "USE own", "BEGIN", "CREATE MACRO own.upper(x) AS 'mine'"],
        ["CREATE SCHEMA own", "CREATE FUNCTION own.upper(x) AS 'mine'", "USE own"],
    ],
    ids=["temporary", "uncommitted", "in the session's path"],
)
async def test_a_macro_may_have_the_name_of_a_function(
    session: DuckDbSession, made: list[str]
) -> None:
    """Then only the session sees it: not the connection that works on windows."""
    text = "SELECT id, upper(ai_generate(body)) FROM main.docs WHERE id < 2 ORDER BY id"
    plain = [(i, str(answer_text(f"body {i}")).upper()) for i in range(2)]
    await session.execute("CREATE MACRO other(x) AS 'other'")
    assert await rest(await opened(session, text)) == plain
    for statement in made:
        await session.execute(statement)
    found = await session.execute_rows(text)
    assert isinstance(found, StatementResult)
    assert list(found.rows) == [(0, "mine"), (1, "mine")]


TWO = "(SELECT *, 's' || body AS more FROM docs)"
MOVED = {
    "by number": "SELECT ai_generate(body) AS a, id FROM docs ORDER BY #1, #2",
    "in brackets": "SELECT ai_generate(body) AS a, id FROM docs ORDER BY (1), ((2))",
    "in an expression": "SELECT ai_generate(body) AS a, -id AS n FROM docs ORDER BY #1 || '', #2",
    "the first by number": "SELECT id, ai_generate(body) AS a, ai_generate('s' || body) AS b "
    "FROM docs ORDER BY #2, id LIMIT 2",
    "the first in brackets": "SELECT id, ai_generate(body) AS a, ai_generate('s' || body) AS b "
    "FROM docs ORDER BY (2), id LIMIT 2",
    "alias in brackets": "SELECT id, ai_generate(body) AS a, ai_generate('s' || body) AS b "
    "FROM docs ORDER BY (a), id LIMIT 2",
    "several columns": "SELECT id, ai_generate(COLUMNS('body|more')) FROM " + TWO + " ORDER BY id",
    "in an expression of it": "SELECT upper(ai_generate(COLUMNS('body|more'))) FROM "
    + TWO
    + " ORDER BY id",
    "unpacked": "SELECT id, ai_generate(concat(*COLUMNS('id|body'))) FROM docs ORDER BY id",
    "several conditions": "SELECT id FROM " + TWO + " WHERE ai_filter('q', COLUMNS('body|more')) "
    "ORDER BY id",
    "an alias used twice": "SELECT id AS x, id * 10 AS x FROM docs "
    "WHERE ai_filter('q', 'n' || x) ORDER BY id",
}


@pytest.mark.parametrize("name", MOVED)
async def test_what_the_base_would_read_differently_is_right(
    session: DuckDbSession, name: str
) -> None:
    """Rows are taken as they come, which streams what can be; the first rows have a way too."""
    with duckdb.connect() as plain:
        for function, made, types, result in (
            ("ai_generate", lambda prompt: answer_text(prompt), ["VARCHAR"], "VARCHAR"),
            ("ai_filter", is_it, ["VARCHAR", "VARCHAR"], "BOOLEAN"),
        ):
            plain.create_function(function, made, types, result, null_handling="special")
        plain.execute(TABLES)
        expected = plain.execute(MOVED[name]).fetchall()
    found = await session.execute_rows(MOVED[name])
    got = list(found.rows) if isinstance(found, StatementResult) else await rest(found)
    assert got == expected
    assert list((await session.execute(MOVED[name])).rows) == expected


@pytest.mark.parametrize(
    "text",
    [
        "SELECT id AS x, ai_generate('n' || x) AS a, id * 10 AS x FROM docs",
        "SELECT y || ai_generate(body), id AS y FROM docs",
        "SELECT 1 FROM docs WHERE ai_filter('q', max(body))",
        "SELECT 1 FROM docs WHERE ai_filter('q', unnest([body, 'b']))",
        "SELECT 1 FROM docs WHERE ai_filter('q', lag(body) OVER ())",
    ],
)
async def test_what_the_engine_refuses_is_not_streamed(session: DuckDbSession, text: str) -> None:
    with pytest.raises(SqlError):
        await session.execute_rows(text)
