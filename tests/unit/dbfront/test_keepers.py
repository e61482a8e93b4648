"""When AI tables that follow changes are refreshed, with a clock that stands still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tierkv.dbfront.jobs.embedded_jobs import WrittenTables
from tierkv.dbfront.jobs.keepers import AiTableKeeper, DueTable, KvIndexKeeper
from tierkv.dbfront.postgres_dialect.session.session import written_names, written_rows
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.errors import NoNodeError


class Kept:
    """A keeper over one or more tables, and the order of its refreshes."""

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self.rows = list(rows)
        self.clock = ManualClock()
        self.written = WrittenTables()
        self.fails = False
        self.during: list[str] = []
        self._refreshes: asyncio.Queue[str] = asyncio.Queue()

    async def read(self, sql: str) -> Sequence[tuple[Any, ...]]:
        return self.rows

    async def refresh(self, table: DueTable) -> None:
        self.written.note(self.during)
        self.during = []
        self._refreshes.put_nowait(table.name)
        if self.fails:
            raise NoNodeError("away")

    async def next(self) -> str:
        """Return the next table that is refreshed."""
        async with asyncio.timeout(30):
            return await self._refreshes.get()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        keeper = AiTableKeeper(self.read, self.refresh, self.clock, self.written)
        task = asyncio.create_task(keeper.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert self._refreshes.empty()


def row(name: str, *sources: str, suspended: bool = False) -> tuple[Any, ...]:
    options = {"refresh_s": -1, "suspended": suspended, "made_by": "ann", "sources": sources}
    return "", name, "main", json.dumps(options), 0.0


async def test_a_burst_of_writes_is_one_refresh_of_the_tables_that_read_it() -> None:
    kept = Kept(row("a", 'main."Docs"'), row("b", "notes", "docs"), row("c", "others"))
    async with kept.running():
        assert sorted([await kept.next() for _ in range(3)]) == ["a", "b", "c"], "the first look"
        kept.clock.advance(60)
        for _ in range(20):
            kept.written.note({"DOCS", "x"})
        kept.written.note({"unknown"})
        assert sorted([await kept.next() for _ in range(2)]) == ["a", "b"]
        kept.clock.advance(60)
        kept.written.note({"others"})
        assert await kept.next() == "c"


async def test_a_write_during_a_refresh_is_refreshed_again_later() -> None:
    kept = Kept(row("a", "docs"))
    async with kept.running():
        await kept.next()
        kept.clock.advance(60)
        kept.during = ["docs"]
        kept.written.note({"docs"})
        await kept.next()
        kept.clock.advance(60)
        kept.written.changed.set()  # As time has passed.
        assert await kept.next() == "a"


async def test_a_refresh_that_fails_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(row("a", "docs"))
    kept.fails = True
    async with kept.running():
        await kept.next()
        kept.fails = False
        kept.clock.advance(31)
        kept.written.changed.set()
        assert await kept.next() == "a"
    assert "AI table a was not refreshed: away" in caplog.text


async def test_a_suspended_table_is_refreshed_when_it_goes_on() -> None:
    kept = Kept(row("a", "docs", suspended=True), row("b", "docs"))
    async with kept.running():
        assert await kept.next() == "b"
        kept.rows[0] = row("a", "docs")
        kept.clock.advance(60)
        kept.written.changed.set()
        assert await kept.next() == "a"


async def test_an_index_with_a_period_is_refreshed_again_and_again() -> None:
    options = json.dumps({"refresh_s": 0.001, "background": True, "made_by": "ann", "kind": "x"})
    row = ("", "i", "main", options, 0.0, "docs", "fresh", "body", None, None)
    refreshes: asyncio.Queue[str] = asyncio.Queue()

    async def read(sql: str) -> Sequence[tuple[Any, ...]]:
        return [row]

    async def refresh(index: DueTable) -> None:
        refreshes.put_nowait(index.name)

    keeper = KvIndexKeeper(read, refresh, SystemClock(), WrittenTables())
    task = asyncio.create_task(keeper.run())
    async with asyncio.timeout(30):
        assert [await refreshes.get() for _ in range(4)] == ["i"] * 4
    task.cancel()
    await asyncio.wait([task])


def test_rows_are_counted_from_a_mark_on() -> None:
    written = WrittenTables()
    written.count({"docs": 5})
    assert not written.counts and written.unseen("i") is None
    mark = written.mark("Docs")
    written.count({"DOCS": 2, "others": 7})
    assert written.unseen("i") is None, "no refresh has ended yet"
    written.seen("i", "docs", mark)
    assert written.unseen("i") == 2
    written.count({"docs": None})
    assert written.unseen("i") is None, "not known how many"
    written.seen("i", "docs", written.mark("docs"))
    written.count({"docs": 1})
    assert written.unseen("i") == 1 and written.unseen("j") is None
    written.seen("j", "docs", written.mark("docs"))
    written.forget("i")
    assert written.counts and written.unseen("j") == 0 and written.unseen("i") is None
    written.forget("j")
    assert not written.counts


@pytest.mark.parametrize(("tag", "rows"), [
    ("INSERT 0 3", 3), ("UPDATE 2", 2), ("DELETE 0", 0), ("COPY 7", 7), ("MERGE 4", 4),
    ("TRUNCATE TABLE", None), ("ALTER TABLE", None), ("DROP TABLE", None), ("CREATE TABLE", None),
    ("CREATE INDEX", 0), ("CREATE KV INDEX", 0), ("SELECT 9", 0), ("UNKNOWN", None),
])  # fmt: skip
def test_rows_of_a_command_tag(tag: str, rows: int | None) -> None:
    assert written_rows(tag) == rows


@pytest.mark.parametrize(("sql", "names"), [
    ("INSERT INTO made (id) SELECT id FROM docs", {"made", "id"}),
    ('INSERT INTO s."Made" VALUES (1)', {"s", "made"}),
    ("UPDATE made SET a = docs.a FROM docs", {"made", "docs", "a"}),
    ("WITH x AS (SELECT 1) INSERT INTO made SELECT * FROM x", {"made", "x"}),
])  # fmt: skip
def test_names_of_written_tables(sql: str, names: set[str]) -> None:
    assert names <= written_names(sql)
    assert ("docs" in written_names(sql)) == ("docs" in names)
