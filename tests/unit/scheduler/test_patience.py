"""How long the directory is waited for, and when it is asked at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvcore.clock import ManualClock
from kvcore.ids import BlockKey, HostId
from metaserver.client import MAX_LISTED_REPLICAS, LocateReply
from scheduler.config import SchedulerConfig
from scheduler.directory_client import DirectoryClient
from scheduler.patience import Patience
from scheduler.routing_stats import RoutingStats
from tests.fix_scheduler import LAYOUT, FakeMeta, make_model, make_request


def experienced(took_s: float) -> Patience:
    patience = Patience(longest_s=0.25, backoff_s=1.0)
    for _ in range(8):
        patience.answered(took_s)
    return patience


def test_nobody_is_hurried_before_the_pace_is_known() -> None:
    patience = Patience(longest_s=0.25, backoff_s=1.0)
    patience.answered(0.001)
    assert patience.timeout_s() == 0.25


@pytest.mark.parametrize(
    ("took_s", "timeout_s"), [(0.0001, 0.02), (0.01, 0.08), (0.1, 0.25)], ids=str
)
def test_an_answer_may_take_eight_times_the_usual(took_s: float, timeout_s: float) -> None:
    assert experienced(took_s).timeout_s() == pytest.approx(timeout_s)


def test_a_directory_that_became_slower_is_given_more_time_each_try() -> None:
    patience, now, timeouts = experienced(0.001), 0.0, []
    for _ in range(5):
        timeouts.append(patience.timeout_s())
        patience.failed(now)
        now += 10.0
    assert timeouts == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.25])


def test_after_a_failure_one_question_at_a_time_tries_again() -> None:
    patience = experienced(0.001)
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
    patience.answered(0.001)
    assert patience.may_ask(0.45) and patience.failures == 0


def test_a_question_that_was_given_up_does_not_silence_the_next() -> None:
    patience = experienced(0.001)
    patience.failed(0.0)
    patience.ask()
    patience.gave_up()
    assert patience.may_ask(1.0)


class HangingMeta(FakeMeta):
    """Answers only while ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply:
        self.asked += 1
        await self.gate.wait()
        return LocateReply(prefix_blocks=1, memory_blocks=1)


async def test_of_a_crowd_only_the_first_wait_for_a_directory_that_hangs() -> None:
    meta, clock, stats = HangingMeta(), ManualClock(), RoutingStats(8)
    config = SchedulerConfig(locate_timeout_s=0.03, directory_backoff_s=8.0)
    client = DirectoryClient(meta, config=config, stats=stats, clock=clock)

    async def locate() -> LocateReply:
        return await client.locate(make_request(), LAYOUT)

    assert (await locate()).prefix_blocks == 1
    meta.gate.clear()
    await asyncio.gather(*(locate() for _ in range(5)))
    assert meta.asked == 6
    assert await locate() == LocateReply()
    clock.advance(1.0)
    await asyncio.gather(*(locate() for _ in range(5)))
    assert meta.asked == 7
    meta.gate.set()
    clock.advance(2.0)
    assert (await locate()).prefix_blocks == 1
    assert stats.cache_errors["directory_unavailable"] == 6


async def test_a_grant_that_ran_out_is_good_while_the_directory_is_away() -> None:
    meta, clock, stats = HangingMeta(), ManualClock(), RoutingStats(8)
    client = DirectoryClient(meta, config=SchedulerConfig(), stats=stats, clock=clock)
    grant = await client.namespace("one", make_model())
    clock.advance(60.0)
    meta.down = True
    assert await client.namespace("one", make_model()) == grant
