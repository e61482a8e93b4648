"""How long the directory is waited for, and when it is asked at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fix_meta import BreakableMeta, chain_of, make_pool_node, store_chain
from tests.fix_scheduler import LAYOUT, make_model, make_request
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import ManualClock
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient, Patience
from tierkv.scheduler.routing_stats import RoutingStats

PROMPT = make_request(token_ids=tuple(range(5 * LAYOUT.block_tokens)))
CHAIN = chain_of(PROMPT)


def test_after_a_failure_one_question_at_a_time_tries_again() -> None:
    patience = Patience(backoff_s=1.0)
    patience.failed(0.0)
    patience.failed(0.0)
    assert patience.failures == 1
    assert not patience.may_ask(0.1)
    assert patience.may_ask(0.125)
    patience.ask()
    assert not patience.may_ask(0.125)
    patience.failed(0.2)
    assert not patience.may_ask(0.44) and patience.may_ask(0.45)
    patience.ask()
    patience.answered()
    assert patience.may_ask(0.45) and patience.failures == 0


def test_a_question_that_was_given_up_does_not_silence_the_next() -> None:
    patience = Patience(backoff_s=1.0)
    patience.failed(0.0)
    patience.ask()
    patience.gave_up()
    assert patience.may_ask(1.0)


@pytest.fixture
async def meta() -> AsyncIterator[BreakableMeta]:
    """A directory that knows ``CHAIN``."""
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), CHAIN, [Tier.L2] * len(CHAIN))
    yield meta
    await meta.close()


async def test_of_a_crowd_only_the_first_wait_for_a_directory_that_hangs(
    meta: BreakableMeta,
) -> None:
    clock, stats = ManualClock(), RoutingStats(8)
    config = SchedulerConfig(locate_timeout_s=0.03, directory_backoff_s=8.0)
    client = DirectoryClient(meta, config=config, stats=stats, clock=clock)

    async def locate() -> LocateReply:
        return await client.locate(PROMPT, LAYOUT)

    assert (await locate()).prefix_blocks == 5
    meta.gate.clear()
    await asyncio.gather(*(locate() for _ in range(5)))
    assert len(meta.asked["locate_many"]) == 2
    assert await locate() == LocateReply()
    clock.advance(1.0)
    await asyncio.gather(*(locate() for _ in range(5)))
    assert len(meta.asked["locate_many"]) == 3
    meta.gate.set()
    clock.advance(2.0)
    assert (await locate()).prefix_blocks == 5
    assert stats.cache_errors["directory_unavailable"] == 2


async def test_a_wave_is_one_question_and_what_comes_meanwhile_the_next(
    meta: BreakableMeta,
) -> None:
    client = DirectoryClient(
        meta, config=SchedulerConfig(), stats=RoutingStats(8), clock=ManualClock()
    )
    meta.gate.clear()
    first = [asyncio.create_task(client.find(CHAIN[:n])) for n in (1, 2, 3)]
    while not meta.asked["locate_many"]:
        await asyncio.sleep(0)
    later = [asyncio.create_task(client.find(CHAIN[:n])) for n in (4, 5)]
    await asyncio.sleep(0)
    later[0].cancel()
    meta.gate.set()
    assert [(await task).prefix_blocks for task in first] == [1, 2, 3]
    assert (await later[1]).prefix_blocks == 5
    waves = [[len(chain) for chain in chains] for (chains,) in meta.asked["locate_many"]]
    assert waves == [[1, 2, 3], [5]]


async def test_a_grant_that_ran_out_is_good_while_the_directory_is_away(
    meta: BreakableMeta,
) -> None:
    clock, stats = ManualClock(), RoutingStats(8)
    client = DirectoryClient(meta, config=SchedulerConfig(), stats=stats, clock=clock)
    grant = await client.namespace("one", make_model())
    clock.advance(60.0)
    meta.down = True
    assert await client.namespace("one", make_model()) == grant
