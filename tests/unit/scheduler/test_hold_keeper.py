"""Leases of a statement: taken, taken again until they cover the pool, prolonged, ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fix_meta import BreakableMeta, make_pool_node, store_chain
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.plans.hold_keeper import LEASE_S, MAX_HELD, HoldKeeper
from tierkv.scheduler.routing_stats import RoutingStats

KEYS = [BlockKey(bytes([n]) * 16) for n in range(1, 4)]
DEADLINE_S = 20.0


@pytest.fixture
async def meta() -> AsyncIterator[BreakableMeta]:
    """A directory; what is left of a lease that ran out is one vain extension and one vain end."""
    meta = BreakableMeta()
    yield meta
    assert meta.leases_live == 0
    assert meta.leases.unknown <= 2 * meta.leases.expired
    await meta.close()


def keeper_of(meta: BreakableMeta, *, lease_s: float = LEASE_S) -> HoldKeeper:
    config = SchedulerConfig(locate_timeout_s=DEADLINE_S, directory_backoff_s=0.01)
    clock = SystemClock()
    directory = DirectoryClient(meta, config=config, stats=RoutingStats(1), clock=clock)
    return HoldKeeper(directory, clock, lease_s=lease_s)


async def fill_pool(meta: BreakableMeta, blocks: int = len(KEYS)) -> None:
    await store_chain(meta, make_pool_node(), KEYS, [Tier.L2] * blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_lease_is_taken_again_until_the_pool_has_everything_and_then_prolonged(
    meta: BreakableMeta,
) -> None:
    await fill_pool(meta, 1)
    keeper = keeper_of(meta, lease_s=0.3)
    keeper.hold(1, KEYS)
    await until(lambda: meta.leases.granted >= 2)
    await fill_pool(meta)
    await until(lambda: meta.leases.extended >= 2)
    assert meta.leases_live == 1 and meta.leases.committed == 0
    keeper.let_go(1)
    await until(lambda: meta.leases_live == 0)
    assert meta.leases.committed == 1
    assert meta.leases.aborted == meta.leases.granted - 1
    await keeper.close()


async def test_closing_ends_every_lease_also_one_that_is_just_given(meta: BreakableMeta) -> None:
    await fill_pool(meta)
    keeper = keeper_of(meta)
    keeper.hold(1, KEYS)
    await until(lambda: meta.leases.granted == 1)
    meta.gate.clear()
    keeper.hold(2, KEYS)
    await until(lambda: len(meta.chains) == 2)
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    meta.gate.set()
    await closing
    assert (meta.leases.granted, meta.leases_live) == (2, 0)


async def test_a_lost_lease_is_taken_anew(meta: BreakableMeta) -> None:
    await fill_pool(meta)
    keeper = keeper_of(meta, lease_s=0.15)
    keeper.hold(1, KEYS)
    await until(lambda: meta.leases.extended >= 1)
    meta.clock.advance(1.0)
    await until(lambda: meta.leases.granted == 2)
    assert (meta.leases.expired, meta.leases_live) == (1, 1)
    await keeper.close()


async def test_what_the_directory_does_not_give_is_not_ended(meta: BreakableMeta) -> None:
    keeper = keeper_of(meta)
    keeper.hold(1, KEYS)
    await until(lambda: len(meta.chains) >= 1)
    await keeper.close()
    assert not meta.asked["end_lease"]


async def test_a_directory_that_is_away_holds_nothing_until_it_is_back(
    meta: BreakableMeta,
) -> None:
    await fill_pool(meta)
    meta.down = True
    keeper = keeper_of(meta)
    keeper.hold(1, KEYS)
    await until(lambda: len(meta.chains) >= 2)
    assert meta.leases.granted == 0
    meta.down = False
    await until(lambda: meta.leases.granted == 1)
    await keeper.close()


async def test_so_many_stems_are_held_and_no_more(
    meta: BreakableMeta, caplog: pytest.LogCaptureFixture
) -> None:
    await fill_pool(meta)
    keeper = keeper_of(meta)
    with caplog.at_level(logging.INFO, logger="tierkv.scheduler"):
        for stem in range(MAX_HELD + 9):
            keeper.hold(stem, KEYS)
    assert [f"holds {MAX_HELD} " in text for text in caplog.messages] == [True], "told once"
    await until(lambda: meta.leases.granted >= MAX_HELD)
    await keeper.close()
    assert meta.leases.granted == MAX_HELD
