"""When AI tables that follow changes are refreshed, with a clock that stands still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tierkv.dbfront.jobs.embedded_jobs import WrittenTables
from tierkv.dbfront.jobs.keepers import AiTableKeeper, DueTable
from tierkv.dbfront.postgres_dialect.session.session import written_names
from tierkv.kvcore.clock import ManualClock
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


@pytest.mark.parametrize(("sql", "names"), [
    ("INSERT INTO made (id) SELECT id FROM docs", {"made", "id"}),
    ('INSERT INTO s."Made" VALUES (1)', {"s", "made"}),
    ("UPDATE made SET a = docs.a FROM docs", {"made", "docs", "a"}),
    ("WITH x AS (SELECT 1) INSERT INTO made SELECT * FROM x", {"made", "x"}),
])  # fmt: skip
def test_names_of_written_tables(sql: str, names: set[str]) -> None:
    assert names <= written_names(sql)
    assert ("docs" in written_names(sql)) == ("docs" in names)
