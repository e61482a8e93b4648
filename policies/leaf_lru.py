"""Leaf-LRU: evict the least recently used block, and of one request the deepest block first.

Leaf-LRU is the baseline. `default` behaves like leaf-LRU until its first observations. With a cache
whose candidates are leaves only, leaf-LRU equals an LRU with the uses of a prompt in order from its
end to its head.
"""

from __future__ import annotations

import heapq
from typing import Final

from tierkv.policies.eviction import BlockFacts

_SPARE_ENTRIES: Final = 64
"""Below this many stale entries the heap is not cleaned."""


class LeafLru:
    """An EvictionPolicy based on the last use only.

    Attributes:
        _order: position by resident handle: (request of the last use, minus depth).
        _offered: handles of the eviction candidates.
        _queue: heap of (position, handle); may contain stale entries.
        _request: number of the current request.
        _last: time and depth of the last use; another time, or a depth that does not grow, starts a
            new request.
    """

    def __init__(self) -> None:
        self._order: dict[int, tuple[int, int]] = {}
        self._offered: set[int] = set()
        self._queue: list[tuple[tuple[int, int], int]] = []
        self._request = 0
        self._last = (float("-inf"), 0)

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self.used(handle, facts, now)

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        depth = facts.outlook.depth
        if self._last[0] != now or depth <= self._last[1]:
            self._request += 1
        self._last = (now, depth)
        self._order[handle] = (self._request, -depth)
        if handle in self._offered:
            self._push(handle)

    def left(self, handle: int, now: float) -> None:
        self._offered.discard(handle)
        del self._order[handle]

    def offer(self, handle: int) -> None:
        if handle not in self._offered:
            self._offered.add(handle)
            self._push(handle)

    def withdraw(self, handle: int) -> None:
        self._offered.discard(handle)

    def victim(self, now: float) -> int | None:
        queue = self._queue
        while queue:
            order, handle = queue[0]
            if handle in self._offered and self._order[handle] == order:
                return handle
            heapq.heappop(queue)
        return None

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _push(self, handle: int) -> None:
        queue = self._queue
        if len(queue) > 2 * len(self._offered) + _SPARE_ENTRIES:
            queue[:] = [(self._order[h], h) for h in self._offered]
            heapq.heapify(queue)
        else:
            heapq.heappush(queue, (self._order[handle], handle))
