"""Bytes of indexes by tier: sampled, kept for some seconds, NULL where they are not known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

import duckdb

from tests.fix_sql import InstantGenerator, make_model
from tierkv.dbfront.views.index_places import IndexPlaces, SampledIndex
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import NoNodeError
from tierkv.sql.job_view_columns import SAMPLED
from tierkv.sql.jobs.job_tables import MAKE_TABLES, SCHEMA
from tierkv.sql.views import Row

INDEX = SampledIndex(
    "", "i", 1.0, "prefix", "", "Be brief.", tenant="ann", tokens=0, refreshed_s="5"
)
NOTHING: Row = {"l1_bytes": None, "memory_bytes": None, "disk_bytes": None}


class Look:
    """A database of texts, a model that locates them, and a clock."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.database = duckdb.connect()
        for text in MAKE_TABLES:
            self.database.execute(text)
        for number, text in enumerate(texts):
            self.database.execute(
                f"INSERT INTO {SCHEMA}.kv_index_texts VALUES ('', 'i', ?, ?, ?, '')",
                [f"{number:032x}", text, len(text)],
            )
        self.generator = InstantGenerator()
        self.clock = ManualClock()
        self.places = IndexPlaces(self.generator, self.clock)
        self.index = replace(INDEX, tokens=sum(map(len, texts)))

    async def read(self, query: str) -> list[tuple[str | None, ...]]:
        rows = self.database.execute(query).fetchall()
        return [tuple(None if value is None else str(value) for value in row) for row in rows]

    async def row(self, index: SampledIndex | None = None, tenant: str | None = None) -> Row:
        row: Row = {"name": "i", SAMPLED: asdict(index or self.index)}
        (found,) = await self.places.add_to([row], self.read, tenant)
        assert found.pop("name") == "i" and set(found) == set(NOTHING)
        return found


async def test_a_small_index_is_counted_exactly_and_as_it_was_warmed() -> None:
    look = Look(["a", "bb", "ccc"])
    assert await look.row() == {"l1_bytes": 0, "memory_bytes": 60, "disk_bytes": 1}
    assert look.generator.prompts == ["", "a", "bb", "ccc"], "what all share is counted once"
    calls = look.generator.calls
    assert {call.tenant for call in calls} == {"ann"}
    assert all(call.messages and call.messages[0].content == "Be brief." for call in calls)


async def test_a_large_index_is_a_sample_scaled_by_tokens() -> None:
    look = Look(["x" * 50] * 640)
    found = await look.row()
    assert found["memory_bytes"] == 640 * 500 and len(look.generator.calls) == 65
    long = Look(["x" * 1_000] + ["y" * 200_000] * 3)
    long.generator.served = (make_model(context_tokens=1_000_000),)
    await long.row()
    assert len(long.generator.calls) == 3, "a sample has a bounded size"


async def test_an_answer_is_kept_until_it_is_old_or_the_index_is_refreshed() -> None:
    look = Look(["a"])
    first = await look.row()
    for _ in range(5):
        assert await look.row() == first
    assert len(look.generator.calls) == 2
    assert await asyncio.gather(*(look.row(replace(look.index, refreshed_s="6")) for _ in "abc"))
    assert len(look.generator.calls) == 4
    look.clock.advance(11)
    await look.row(replace(look.index, refreshed_s="6"))
    assert len(look.generator.calls) == 6


async def test_documents_are_located_as_chunks() -> None:
    look = Look(["a text"])
    await look.row(replace(look.index, kind="chunk", system_prompt=""))
    assert [call.documents for call in look.generator.calls] == [(), ("a text",)]


async def test_who_writes_another_tenant_into_an_index_learns_nothing() -> None:
    look = Look(["a"])
    assert await look.row(tenant="bob") == NOTHING
    assert look.generator.calls == []
    assert await look.row(tenant="ann") == await look.row() != NOTHING
    assert await look.row(tenant="bob") == NOTHING, "not from what others looked up, either"


async def test_what_is_not_known_is_null() -> None:
    look = Look(["a"])
    assert await look.row(replace(look.index, tenant=None)) == NOTHING
    look.generator.failing["a"] = NoNodeError("away")
    assert await look.row() == NOTHING
    look.clock.advance(11)
    look.generator.failing.clear()
    assert await look.row() != NOTHING
    empty = Look([])
    assert await empty.row() == {"l1_bytes": 0, "memory_bytes": 0, "disk_bytes": 0}
