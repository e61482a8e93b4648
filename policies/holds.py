"""What leases keep from eviction: who holds which block, until when, and how much in all.

A pure core shared by the page pool of a compute node and the slot table of a DMP node. It names
blocks by the cache's own numbers and reads no clock; the cache asks it before it evicts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.hold import LeaseId

_SPARE_ENTRIES: Final = 64
"""Dropping deadlines that count no more is not worth it for fewer."""


@dataclass(slots=True)
class _Lease:
    until: float
    handles: set[int] = field(default_factory=set)


class Holds:
    """Blocks under lease.

    Attributes:
        limit: what the held blocks may cost together; more is refused.
        held: what they cost now; a block under two leases counts once.
        refused: blocks that were not held for want of room, ever.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self._leases: dict[LeaseId, _Lease] = {}
        self._holders: dict[int, set[LeaseId]] = {}
        self._cost: dict[int, int] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []

    def __contains__(self, handle: int) -> bool:
        return handle in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, lease: LeaseId, blocks: Iterable[tuple[int, int]], until: float) -> None:
        """Keep blocks for a lease, as many of the first as there is room for.

        Args:
            lease: who keeps them; its earlier blocks stay, with the new deadline.
            blocks: handle and cost of each, those to keep first come first.
            until: when they are free again.
        """
        if lease not in self._leases and len(self._leases) >= limits.MAX_LEASES:
            self.refused += sum(1 for _ in blocks)
            return
        entry = self._leases.setdefault(lease, _Lease(until))
        full = False
        for handle, cost in blocks:
            known = handle in self._holders
            full = full or (not known and self.held + cost > self.limit)
            if full and not known:
                self.refused += 1
                continue
            if not known:
                self._cost[handle] = cost
                self.held += cost
            self._holders.setdefault(handle, set()).add(lease)
            entry.handles.add(handle)
        if entry.handles:
            self._expect(lease, entry, until)
        else:
            del self._leases[lease]

    def prolong(self, lease: LeaseId, until: float) -> None:
        """Give a lease another deadline; one that holds nothing here is ignored."""
        entry = self._leases.get(lease)
        if entry is not None:
            self._expect(lease, entry, until)

    def end(self, lease: LeaseId) -> list[int]:
        """End a lease; answers the blocks that nobody holds any more."""
        entry = self._leases.pop(lease, None)
        if entry is None:
            return []
        return [handle for handle in entry.handles if self._let_go(handle, lease)]

    def expire(self, now: float) -> list[int]:
        """End every lease whose deadline has come; answers the blocks nobody holds any more."""
        freed: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            until, lease = heapq.heappop(self._deadlines)
            if self._counts(until, lease):
                freed += self.end(lease)
        return freed

    def give_way(self) -> list[int]:
        """End the lease that would end first, for there is greater need."""
        while self._deadlines:
            until, lease = heapq.heappop(self._deadlines)
            if self._counts(until, lease):
                return self.end(lease)
        return []

    def gone(self, handle: int) -> None:
        """Take note that a block is not there any more."""
        for lease in self._holders.pop(handle, ()):
            entry = self._leases[lease]
            entry.handles.discard(handle)
            if not entry.handles:
                del self._leases[lease]
        self.held -= self._cost.pop(handle, 0)

    def _let_go(self, handle: int, lease: LeaseId) -> bool:
        holders = self._holders[handle]
        holders.discard(lease)
        if holders:
            return False
        del self._holders[handle]
        self.held -= self._cost.pop(handle)
        return True

    def _expect(self, lease: LeaseId, entry: _Lease, until: float) -> None:
        entry.until = until
        heapq.heappush(self._deadlines, (until, lease))
        if len(self._deadlines) > 2 * len(self._leases) + _SPARE_ENTRIES:
            self._deadlines = [(entry.until, name) for name, entry in self._leases.items()]
            heapq.heapify(self._deadlines)

    def _counts(self, until: float, lease: LeaseId) -> bool:
        entry = self._leases.get(lease)
        return entry is not None and entry.until == until

    def check_invariants(self) -> None:
        """Assert that both directions agree and costs add up; O(held blocks)."""
        pairs = {(h, name) for name, entry in self._leases.items() for h in entry.handles}
        assert pairs == {(h, name) for h, names in self._holders.items() for name in names}
        assert all(self._holders.values()) and all(e.handles for e in self._leases.values())
        assert self._cost.keys() == self._holders.keys()
        assert self.held == sum(self._cost.values()) <= self.limit
        expected = set(self._deadlines)
        assert all((entry.until, name) in expected for name, entry in self._leases.items())
