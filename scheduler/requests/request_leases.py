"""Leases of requests on their way: prolonged while they wait, ended in the background.

Used by scheduler/dispatcher.py and scheduler/requests/stage_runner.py. Nobody waits for the
directory here: an end that does not get through is counted, and the lease runs out by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from tierkv.kvcore.hold import NO_LEASE, LeaseId
from tierkv.scheduler.locating.directory_client import DirectoryClient
from tierkv.scheduler.routing_stats import RoutingStats

QUESTIONS_AT_ONCE = 16
MAX_ENDINGS = 10_000
"""Ends not told yet; beyond it the oldest are left to run out."""


class RequestLeases:
    """The live leases of one dispatcher's requests."""

    def __init__(self, directory: DirectoryClient, stats: RoutingStats, *, lease_s: float) -> None:
        self._directory = directory
        self._stats = stats
        self._lease_s = lease_s
        self._live: set[LeaseId] = set()
        self._endings: deque[tuple[LeaseId, bool]] = deque(maxlen=MAX_ENDINGS)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def __len__(self) -> int:
        return len(self._live)

    def keep(self, lease: LeaseId) -> None:
        """Prolong a lease from now on, until it is ended."""
        if lease == NO_LEASE or self._stopped:
            return
        self._stats.leases_reserved += 1
        self._live.add(lease)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="scheduler-leases")

    def commit(self, lease: LeaseId) -> None:
        """End a lease whose blocks are being read: the node holds them itself by now."""
        if lease in self._live:
            self._stats.leases_committed += 1
            self._end(lease, used=True)

    def abort(self, lease: LeaseId) -> None:
        """End a lease whose blocks are not wanted any more."""
        if lease in self._live:
            self._stats.leases_aborted += 1
            self._end(lease, used=False)

    def _end(self, lease: LeaseId, *, used: bool) -> None:
        self._live.discard(lease)
        self._endings.append((lease, used))
        self._wake.set()

    async def stop(self, *, timeout_s: float) -> None:
        """Abort what is left, but don't wait for it longer than that; what comes later runs out."""
        self._stopped = True
        for lease in tuple(self._live):
            self.abort(lease)
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tell_endings()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._lease_s / 3
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._tell_endings()
            if loop.time() >= due_s:
                await self._prolong()
                due_s = loop.time() + self._lease_s / 3

    async def _tell_endings(self) -> None:
        while self._endings:
            count = min(len(self._endings), QUESTIONS_AT_ONCE)
            some = [self._endings.popleft() for _ in range(count)]
            told = await asyncio.gather(
                *(self._directory.end_lease(lease, used=used) for lease, used in some)
            )
            self._stats.leases_lost += told.count(False)

    async def _prolong(self) -> None:
        leases = list(self._live)
        for start in range(0, len(leases), QUESTIONS_AT_ONCE):
            some = leases[start : start + QUESTIONS_AT_ONCE]
            known = await asyncio.gather(
                *(self._directory.extend_lease(lease, ttl_s=self._lease_s) for lease in some)
            )
            for lease, is_known in zip(some, known, strict=True):
                if not is_known and lease in self._live:
                    self._live.discard(lease)
                    self._stats.leases_lost += 1
