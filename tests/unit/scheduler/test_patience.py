"""How long the directory is waited for, and when it is asked at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.fix_scheduler import LAYOUT, FakeMeta, make_model, make_request
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import BlockKey, HostId
from tierkv.metaserver.client import MAX_LISTED_REPLICAS, LocateReply
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient, Patience
from tierkv.scheduler.routing_stats import RoutingStats


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
    assert meta.asked == 2
    assert await locate() == LocateReply()
    clock.advance(1.0)
    await asyncio.gather(*(locate() for _ in range(5)))
    assert meta.asked == 3
    meta.gate.set()
    clock.advance(2.0)
    assert (await locate()).prefix_blocks == 1
    assert stats.cache_errors["directory_unavailable"] == 2


class SlowMeta(FakeMeta):
    """Answers a question when it is told to; says what each one held."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[list[Sequence[BlockKey]]] = []
        self.answers: list[asyncio.Future[None]] = []

    async def locate_many(
        self, chains: Sequence[Sequence[BlockKey]], *, reserve_s: float = 0.0
    ) -> list[LocateReply]:
        self.questions.append(list(chains))
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]
        return [LocateReply(prefix_blocks=len(chain)) for chain in chains]


async def test_a_wave_is_one_question_and_what_comes_meanwhile_the_next() -> None:
    meta = SlowMeta()
    client = DirectoryClient(
        meta, config=SchedulerConfig(), stats=RoutingStats(8), clock=ManualClock()
    )
    key = BlockKey(bytes(16))
    first = [asyncio.create_task(client.find([key] * n)) for n in (1, 2, 3)]
    while not meta.questions:
        await asyncio.sleep(0)
    later = [asyncio.create_task(client.find([key] * n)) for n in (4, 5)]
    await asyncio.sleep(0)
    later[0].cancel()
    meta.answers[0].set_result(None)
    assert [(await task).prefix_blocks for task in first] == [1, 2, 3]
    while len(meta.questions) < 2:
        await asyncio.sleep(0)
    meta.answers[1].set_result(None)
    assert (await later[1]).prefix_blocks == 5
    assert [[len(chain) for chain in asked] for asked in meta.questions] == [[1, 2, 3], [5]]


async def test_a_grant_that_ran_out_is_good_while_the_directory_is_away() -> None:
    meta, clock, stats = HangingMeta(), ManualClock(), RoutingStats(8)
    client = DirectoryClient(meta, config=SchedulerConfig(), stats=stats, clock=clock)
    grant = await client.namespace("one", make_model())
    clock.advance(60.0)
    meta.down = True
    assert await client.namespace("one", make_model()) == grant
