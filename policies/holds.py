"""Leased blocks of one cache: which leases hold a block, until when, and the total cost.

A pure core shared by the page pool of a compute node and the slot table of a DMP node. Blocks are
named by the cache's own numbers. The cache passes the time and checks the holds before it evicts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.block_event import LeaseId

_SPARE_ENTRIES: Final = 64
"""Below this many stale deadlines the heap is not cleaned."""


@dataclass(slots=True)
class _HoldLease:
    until: float
    handles: set[int] = field(default_factory=set)


class Holds:
    """Blocks under lease.

    Attributes:
        limit: maximum total cost of held blocks; further blocks are refused.
        held: current total cost; a block under two leases counts once.
        refused: number of blocks ever refused for lack of room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self._leases: dict[LeaseId, _HoldLease] = {}
        self._holders: dict[int, set[LeaseId]] = {}
        self._cost: dict[int, int] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []

    def __contains__(self, handle: int) -> bool:
        return handle in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, lease: LeaseId, blocks: Iterable[tuple[int, int]], until: float) -> None:
        """Hold blocks for a lease, in order, until the limit is reached.

        Args:
            lease: the lease; blocks already held by the lease stay held, with the new deadline.
            blocks: handle and cost of each block, most important first.
            until: time at which the hold expires.
        """
        if lease not in self._leases and len(self._leases) >= limits.MAX_LEASES:
            self.refused += sum(1 for _ in blocks)
            return
        entry = self._leases.setdefault(lease, _HoldLease(until))
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
        """Change the deadline of a lease; an unknown lease is ignored."""
        entry = self._leases.get(lease)
        if entry is not None:
            self._expect(lease, entry, until)

    def end(self, lease: LeaseId) -> list[int]:
        """End a lease; return the blocks held by no other lease."""
        entry = self._leases.pop(lease, None)
        if entry is None:
            return []
        return [handle for handle in entry.handles if self._let_go(handle, lease)]

    def expire(self, now: float) -> list[int]:
        """End every lease whose deadline has passed; return the blocks that became free."""
        freed: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            until, lease = heapq.heappop(self._deadlines)
            if self._counts(until, lease):
                freed += self.end(lease)
        return freed

    def give_way(self) -> list[int]:
        """End the lease with the earliest deadline; return the blocks that became free."""
        while self._deadlines:
            until, lease = heapq.heappop(self._deadlines)
            if self._counts(until, lease):
                return self.end(lease)
        return []

    def gone(self, handle: int) -> None:
        """Forget a block that left the cache."""
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

    def _expect(self, lease: LeaseId, entry: _HoldLease, until: float) -> None:
        entry.until = until
        heapq.heappush(self._deadlines, (until, lease))
        if len(self._deadlines) > 2 * len(self._leases) + _SPARE_ENTRIES:
            self._deadlines = [(entry.until, name) for name, entry in self._leases.items()]
            heapq.heapify(self._deadlines)

    def _counts(self, until: float, lease: LeaseId) -> bool:
        entry = self._leases.get(lease)
        return entry is not None and entry.until == until

    def check_invariants(self) -> None:
        """Assert that both indexes agree and the costs add up; O(held blocks)."""
        pairs = {(h, name) for name, entry in self._leases.items() for h in entry.handles}
        assert pairs == {(h, name) for h, names in self._holders.items() for name in names}
        assert all(self._holders.values()) and all(e.handles for e in self._leases.values())
        assert self._cost.keys() == self._holders.keys()
        assert self.held == sum(self._cost.values()) <= self.limit
        expected = set(self._deadlines)
        assert all((entry.until, name) in expected for name, entry in self._leases.items())
