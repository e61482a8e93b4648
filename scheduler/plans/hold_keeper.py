"""Leases on KV shared by the pending calls of a statement, renewed while calls need the KV.

Used by scheduler/plans/statement_run.py, once per statement. A single task asks the directory,
question by question, and delays no call. Without a directory nothing is held, and the statement
runs unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.ids import BlockKey
from tierkv.metaserver.client import LocateReply

log = logging.getLogger("tierkv.scheduler")

LEASE_S = 15.0
"""How long a lost front holds blocks; a lease is renewed after a third of this time."""

FIRST_RETRY_S = 0.05
"""A block is in the directory some 20 ms after its computation, and in the pool a little later."""

MAX_HELD = 256
"""Stems of one statement held at once; the first stems asked for are shared most."""


class LeaseDesk(Protocol):
    """The part of DirectoryClient used here; a failure means "nothing found" or False."""

    async def find(self, keys: Sequence[BlockKey], *, reserve_s: float = 0.0) -> LocateReply: ...

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool: ...

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool: ...


@dataclass(slots=True, eq=False)
class _Held:
    """One held chain; ``in_pool`` when the lease covers the whole chain in pool memory."""

    keys: Sequence[BlockKey]
    due_s: float
    lease: LeaseId = NO_LEASE
    in_pool: bool = False
    retry_s: float = FIRST_RETRY_S


class HoldKeeper:
    """The leases of one statement, by stem of its prefix tree."""

    def __init__(self, desk: LeaseDesk, clock: Clock, *, lease_s: float = LEASE_S) -> None:
        self._desk = desk
        self._clock = clock
        self._lease_s = lease_s
        self._held: dict[int, _Held] = {}
        self._ending: list[tuple[LeaseId, bool]] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._told_full = False
        self._task: asyncio.Task[None] | None = None

    def hold(self, stem: int, keys: Sequence[BlockKey]) -> None:
        """Hold a chain from now on; a repeated call locates its blocks again."""
        held = self._held.get(stem)
        if held is None:
            if len(self._held) >= MAX_HELD:
                self._tell_full()
                return
            self._held[stem] = _Held(keys, self._clock.now())
        elif not held.in_pool:
            held.due_s, held.retry_s = self._clock.now(), FIRST_RETRY_S
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="plan-holds")

    def _tell_full(self) -> None:
        """Log, once per statement, that further stems are not held."""
        if not self._told_full:
            self._told_full = True
            log.info("a statement holds %d shared beginnings of prompts, the maximum", MAX_HELD)

    def let_go(self, stem: int) -> None:
        """Stop holding the chain."""
        held = self._held.pop(stem, None)
        if held is not None:
            self._end(held, used=True)
            self._wake.set()

    async def close(self) -> None:
        """End every lease. Waits for a question under way, because the reply may bring a lease."""
        self._closing = True
        for stem in list(self._held):
            self.let_go(stem)
        if self._task is not None:
            self._wake.set()
            await self._task
            self._task = None

    async def _keep(self) -> None:
        try:
            while True:
                self._wake.clear()
                await self._renew_due()
                await self._end_leases()
                if self._closing:
                    return
                await self._rest()
        except TierKVError as error:
            log.warning("the shared blocks of a statement are no longer held: %s", error)

    async def _renew_due(self) -> None:
        for stem, held in list(self._held.items()):
            if held.due_s <= self._clock.now() and self._held.get(stem) is held:
                await self._renew(stem, held)

    async def _end_leases(self) -> None:
        while self._ending:
            lease, used = self._ending.pop()
            await self._desk.end_lease(lease, used=used)

    async def _rest(self) -> None:
        """Wait for the next wake-up or due time."""
        due_s = min((held.due_s for held in self._held.values()), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - self._clock.now())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    async def _renew(self, stem: int, held: _Held) -> None:
        """Extend the lease, or take new leases until a lease covers the whole chain in the pool."""
        if held.in_pool and await self._desk.extend_lease(held.lease, ttl_s=self._lease_s):
            held.due_s = self._clock.now() + self._lease_s / 3
            return
        reply = await self._desk.find(held.keys, reserve_s=self._lease_s)
        self._end(held, used=False)
        held.lease = reply.lease
        if self._held.get(stem) is not held:  # The stem was let go during the question.
            self._end(held, used=False)
        held.in_pool = held.lease != NO_LEASE and reply.memory_blocks >= len(held.keys)
        held.due_s = self._clock.now() + (self._lease_s / 3 if held.in_pool else held.retry_s)
        held.retry_s = min(2 * held.retry_s, self._lease_s / 3)

    def _end(self, held: _Held, *, used: bool) -> None:
        if held.lease != NO_LEASE:
            self._ending.append((held.lease, used))
            held.lease = NO_LEASE
