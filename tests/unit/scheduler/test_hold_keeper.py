"""Leases of a statement: taken, taken again until they cover the pool, prolonged, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BlockKey
from tierkv.metaserver.client import LocateReply
from tierkv.scheduler.plans.hold_keeper import MAX_HELD, HoldKeeper

KEYS = [BlockKey(bytes([n]) * 16) for n in range(3)]
DEADLINE_S = 20.0


class Desk:
    """A directory that says what the test wants; every question wakes ``asked``.

    Attributes:
        in_pool: blocks that are in somebody's memory.
        live: leases that were given and not ended.
        used: leases that were ended as used; ``unused`` the others.
    """

    def __init__(self) -> None:
        self.in_pool = 0
        self.gives_leases = True
        self.error: Exception | None = None
        self.live: set[LeaseId] = set()
        self.used: list[LeaseId] = []
        self.unused: list[LeaseId] = []
        self.questions: list[str] = []
        self.asked = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()

    async def _note(self, question: str) -> None:
        async with self.asked:
            self.questions.append(question)
            self.asked.notify_all()
        if self.error is not None:
            raise self.error

    async def find(self, keys: Sequence[BlockKey], *, reserve_s: float = 0.0) -> LocateReply:
        await self._note("find")
        await self.gate.wait()
        lease = LeaseId(self.questions.count("find")) if self.gives_leases else NO_LEASE
        if lease != NO_LEASE:
            self.live.add(lease)
        return LocateReply(prefix_blocks=self.in_pool, memory_blocks=self.in_pool, lease=lease)

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        await self._note("extend")
        return lease in self.live

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        known = lease in self.live
        if known:
            (self.used if used else self.unused).append(lease)
            self.live.remove(lease)
        await self._note("end")
        return known

    async def wait_for(self, question: str, times: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S), self.asked:
            await self.asked.wait_for(lambda: self.questions.count(question) >= times)


async def test_a_lease_is_taken_again_until_the_pool_has_everything_and_then_prolonged() -> None:
    desk = Desk()
    keeper = HoldKeeper(desk, SystemClock(), lease_s=0.3)
    keeper.hold(1, KEYS)
    await desk.wait_for("find", 2)
    desk.in_pool = len(KEYS)
    await desk.wait_for("extend", 2)
    assert len(desk.live) == 1
    keeper.let_go(1)
    await desk.wait_for("end", len(desk.unused) + 1)
    assert desk.live == set()
    assert len(desk.used) == 1
    await keeper.close()


async def test_closing_ends_every_lease_also_one_that_is_just_given() -> None:
    desk = Desk()
    keeper = HoldKeeper(desk, SystemClock())
    desk.in_pool = len(KEYS)
    keeper.hold(1, KEYS)
    await desk.wait_for("find")
    desk.gate.clear()
    keeper.hold(2, KEYS)
    await desk.wait_for("find", 2)
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)
    desk.gate.set()
    await closing
    assert desk.live == set()


async def test_a_lost_lease_is_taken_anew() -> None:
    desk = Desk()
    desk.in_pool = len(KEYS)
    keeper = HoldKeeper(desk, SystemClock(), lease_s=0.15)
    keeper.hold(1, KEYS)
    await desk.wait_for("extend")
    desk.live.clear()
    finds = desk.questions.count("find")
    await desk.wait_for("find", finds + 1)
    assert len(desk.live) == 1
    await keeper.close()


async def test_what_the_directory_does_not_give_is_not_ended() -> None:
    desk = Desk()
    desk.gives_leases = False
    keeper = HoldKeeper(desk, SystemClock())
    keeper.hold(1, KEYS)
    await desk.wait_for("find")
    await keeper.close()
    assert "end" not in desk.questions


async def test_a_broken_directory_ends_holding_and_nothing_else() -> None:
    desk = Desk()
    desk.error = RemoteProtocolError("nonsense")
    keeper = HoldKeeper(desk, SystemClock())
    keeper.hold(1, KEYS)
    await desk.wait_for("find")
    keeper.hold(2, KEYS)
    await keeper.close()


async def test_so_many_stems_are_held_and_no_more() -> None:
    desk = Desk()
    desk.in_pool = len(KEYS)
    keeper = HoldKeeper(desk, SystemClock())
    for stem in range(MAX_HELD + 9):
        keeper.hold(stem, KEYS)
    await desk.wait_for("find", MAX_HELD)
    await keeper.close()
    assert desk.questions.count("find") == MAX_HELD
    assert desk.live == set()
