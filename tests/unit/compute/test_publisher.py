"""The write-behind thread: what is worth it is waited for, a silent pool is not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from tests.fix_dmp import block_key
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.l1.page_pool import FullBlock
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.tiers.block_puts import PublishJob
from tierkv.compute.tiers.finder import Attempt, BlockFinder
from tierkv.compute.tiers.publisher import Publisher
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import HostId
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype

LAYOUT = BlockLayout(2, 1, 8, KvDtype.FLOAT32, 8)
LONG_S = 30.0


class GatedPoolNode(MemoryPoolNode):
    """Seals when its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def seal(self, grants):  # type: ignore[no-untyped-def]
        assert self.gate.wait(LONG_S)
        return super().seal(grants)


class Ticks(SystemClock):
    """A millisecond passes with each look: publishing seems equally fast on any machine."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def now(self) -> float:
        return next(self._looks) / 1_000


class Rig:
    """A publisher with room for two blocks on their way."""

    def __init__(self) -> None:
        self.pool = GatedPoolNode()
        finder = BlockFinder(
            host=HostId("here"), directory=None, absorb=self.absorb, promote=lambda node, keys: ()
        )
        finder.set_nodes([self.pool])
        self.publisher = Publisher(
            L1Pages(LAYOUT, 9, device=torch.device("cpu")),
            finder,
            queue_blocks=2,
            alone_blocks=3,
            absorb=self.absorb,
            clock=Ticks(),
        )

    @contextmanager
    def absorb(self) -> Iterator[Attempt]:
        yield Attempt()

    def offer(self, name: str, patience_s: float = 0.0, *, count: int = 2) -> bool:
        blocks = tuple(
            FullBlock(BlockSpec(block_key(f"{name}{i}"), ROOT_PARENT, 64), page=1 + i)
            for i in range(count)
        )
        job = PublishJob(1, blocks, KvCodec.NONE)
        return self.publisher.offer(job, patience_s=patience_s)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.publisher.start(lambda job, lost: None)
    assert rig.offer("first") and rig.publisher.flush(LONG_S)
    rig.pool.gate.clear()
    assert rig.offer("slow")
    try:
        yield rig
    finally:
        rig.pool.gate.set()
        rig.publisher.stop()


def test_blocks_that_nobody_waits_for_are_dropped_and_counted(rig: Rig) -> None:
    assert not rig.offer("late")
    assert rig.publisher.dropped_blocks == 2


def test_blocks_that_are_worth_it_are_waited_for(rig: Rig) -> None:
    taken: list[bool] = []
    waiting = threading.Thread(target=lambda: taken.append(rig.offer("worth", LONG_S)))
    waiting.start()
    rig.pool.gate.set()
    waiting.join(LONG_S)
    assert taken == [True] and rig.publisher.dropped_blocks == 0
    assert rig.publisher.flush(LONG_S)
    assert len(rig.pool.sealed_keys) == 6


def test_a_silent_pool_is_waited_for_once(rig: Rig) -> None:
    assert not rig.offer("in vain", 0.05)
    assert not rig.offer("again", LONG_S)
    rig.pool.gate.set()
    assert rig.publisher.flush(LONG_S)
    assert rig.offer("better", LONG_S)


def test_blocks_of_a_pass_that_goes_on_are_not_waited_for(rig: Rig) -> None:
    rig.pool.gate.set()
    assert rig.publisher.flush(LONG_S)
    block = FullBlock(BlockSpec(block_key("open"), ROOT_PARENT, 64), page=5)
    one = PublishJob(2, (block,), KvCodec.NONE)
    publication = rig.publisher.begin([one])
    assert publication is not None
    assert not rig.offer("behind it", LONG_S)
    publication.end([])
    assert rig.publisher.flush(LONG_S) and rig.offer("after it")


def test_a_prompt_longer_than_the_queue_is_taken_when_nothing_is_in_flight(rig: Rig) -> None:
    assert not rig.offer("long", count=3)
    rig.pool.gate.set()
    assert rig.publisher.flush(LONG_S)
    assert rig.offer("long", count=3) and rig.publisher.flush(LONG_S)
    assert not rig.offer("longer", count=4)
    assert rig.publisher.dropped_blocks == 3 + 4


def test_who_hears_of_an_end_may_offer_the_next_blocks_at_once() -> None:
    rig = Rig()
    heard: list[tuple[int, bool]] = []

    def ended(job: PublishJob, lost: Sequence[FullBlock]) -> None:
        if not heard:
            heard.append((rig.publisher.spare_blocks, rig.offer("next", count=3)))

    rig.publisher.start(ended)
    assert rig.offer("first", count=3)
    assert rig.publisher.flush(LONG_S)
    rig.publisher.stop()
    assert heard == [(1, True)]
    assert len(rig.pool.sealed_keys) == 6
