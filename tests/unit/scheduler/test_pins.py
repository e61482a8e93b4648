"""Pins: recorded, leased wherever their blocks are, taken over by other fronts, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta, make_pool_node, store_chain
from tierkv.kvcore import limits
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import ManualClock, SystemClock
from tierkv.kvcore.errors import SqlError
from tierkv.kvcore.ids import BlockKey
from tierkv.metaserver.client import ClusterRecord
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.pins import PIN_RECORDS, Pin, PinKeeper, pins_of, records_of
from tierkv.scheduler.routing_stats import RoutingStats

KEYS = tuple(BlockKey(bytes([n]) * 16) for n in range(1, 5))
CLOCK = SystemClock()


def pin_for(seconds: float, keys: tuple[BlockKey, ...] = KEYS, tenant: str = "ann") -> Pin:
    return Pin(tenant, "demo", keys, 16 * len(keys), 100 * len(keys), CLOCK.wall() + seconds)


def keeper_of(meta: BreakableMeta) -> PinKeeper:
    config = SchedulerConfig(locate_timeout_s=20.0, directory_backoff_s=0.01)
    directory = DirectoryClient(meta, config=config, stats=RoutingStats(1), clock=CLOCK)
    return PinKeeper(directory, meta, CLOCK)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_pin_is_leased_and_its_blocks_are_counted() -> None:
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), KEYS, [Tier.L2, Tier.L2, Tier.L4, Tier.L4])
    keeper = keeper_of(meta)
    pin = pin_for(60)
    assert await keeper.add(pin) == 2, "two blocks are in memory"
    assert keeper.all() == [(pin, 2)] and keeper.size_bytes(["ann", "bob"]) == 400
    assert keeper.size_bytes(["bob"]) == 0 and meta.leases_live == 1
    longer = replace(pin, until_s=pin.until_s + 60)
    await keeper.add(longer)
    assert keeper.all() == [(longer, 2)] and meta.leases_live == 1
    assert await keeper.end([pin.name, "nobody"]) == 1
    assert keeper.all() == [] and meta.leases_live == 0
    assert await meta.list_records(PIN_RECORDS) == ()
    await keeper.stop()


async def test_another_front_keeps_what_one_pinned_until_it_is_ended() -> None:
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), KEYS, [Tier.L2] * 4)
    one, other = keeper_of(meta), keeper_of(meta)
    await one.add(pin_for(60))
    await one.stop()
    other.start()
    await until(lambda: other.all() != [])
    assert other.all()[0][0] == one.all()[0][0]
    await until(lambda: other.all()[0][1] == 4)
    assert await other.end_with([BlockKey(bytes(16))]) == 0
    assert await other.end_with([KEYS[1]]) == 1
    assert await meta.list_records(PIN_RECORDS) == ()
    await other.stop()


async def test_a_pin_ends_with_its_time() -> None:
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), KEYS, [Tier.L2] * 4)
    keeper = keeper_of(meta)
    await keeper.add(pin_for(0.2))
    await until(lambda: keeper.all() == [])
    await until(lambda: meta.leases_live == 0)
    await keeper.stop()


async def test_too_many_pins_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PINS", 1)
    keeper = PinKeeper(keeper_of(BreakableMeta())._desk, None, ManualClock())
    await keeper.add(replace(pin_for(60), until_s=2e9))
    with pytest.raises(SqlError) as refused:
        await keeper.add(pin_for(60, KEYS[:2]))
    assert refused.value.sqlstate == "53400"
    await keeper.stop()


async def test_pins_that_come_together_count_before_they_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_PINS", 1)
    meta, recording, go_on = BreakableMeta(), asyncio.Event(), asyncio.Event()
    put = meta.put_record

    async def slow(record: ClusterRecord) -> None:
        recording.set()
        await go_on.wait()
        await put(record)

    monkeypatch.setattr(meta, "put_record", slow)
    keeper = keeper_of(meta)
    first, second = pin_for(60), pin_for(60, KEYS[:2])
    adding = asyncio.create_task(keeper.add(first))
    await recording.wait()
    assert keeper.others(second.name) == [first] and keeper.others(first.name) == []
    with pytest.raises(SqlError, match="pinned already"):
        await keeper.add(second)
    go_on.set()
    await adding
    assert keeper.others(second.name) == [first]
    await keeper.stop()


@pytest.mark.parametrize("blocks", [1, 160, 161, 2_000])
def test_pins_come_back_from_their_records(blocks: int) -> None:
    keys = tuple(BlockKey(number.to_bytes(16, "big")) for number in range(blocks))
    pin, other = pin_for(60, keys), pin_for(9, KEYS, tenant="bob")
    records = [*records_of(pin), *records_of(other)]
    assert all(len(record.body) <= limits.MAX_RECORD_CHARS for record in records)
    assert pins_of(reversed(records)) == [other, pin]
    junk = [ClusterRecord(PIN_RECORDS, "x.0000", body) for body in ("", "{}", "[1]")]
    assert pins_of([*junk, *records[1:]]) == [other], "a part is missing"
