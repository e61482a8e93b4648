"""Plain policies on single blocks: LRU, FIFO, LFU and TTL. Yardsticks, not for production.

These policies ignore prompts and prefixes and have a single idea each. OfferedHandles is the part
of an EvictionPolicy that most yardsticks share; published.py extends it too.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Final

from tierkv.policies.eviction import BlockFacts


class OfferedHandles:
    """Keeps the offered handles in a set.

    Attributes:
        _offered: resident handles that may be evicted.
    """

    def __init__(self) -> None:
        self._offered: set[int] = set()

    def offer(self, handle: int) -> None:
        self._offered.add(handle)

    def withdraw(self, handle: int) -> None:
        self._offered.discard(handle)


class Fifo(OfferedHandles):
    """First in, first out.

    Attributes:
        _order: resident handles, the next victim first.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        super().__init__()

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._order[handle] = None

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        pass

    def left(self, handle: int, now: float) -> None:
        del self._order[handle]
        self._offered.discard(handle)

    def victim(self, now: float) -> int | None:
        offered = self._offered
        return next((handle for handle in self._order if handle in offered), None)

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass


class Lru(Fifo):
    """Least recently used, block by block."""

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._order.move_to_end(handle)


TTL_S: Final = 300.0
"""Five minutes: the default promise of providers of prompt caching."""


class Ttl(Lru):
    """Least recently used; admits no block while all residents are within their time.

    Attributes:
        _used_at: time of the last use by resident handle.
    """

    def __init__(self, ttl_s: float = TTL_S) -> None:
        super().__init__()
        self._ttl_s = ttl_s
        self._used_at: dict[int, float] = {}

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        super().entered(handle, facts, now)
        self._used_at[handle] = now

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        super().used(handle, facts, now)
        self._used_at[handle] = now

    def left(self, handle: int, now: float) -> None:
        super().left(handle, now)
        del self._used_at[handle]

    def admits(self, facts: BlockFacts, now: float) -> bool:
        victim = self.victim(now)
        return victim is None or now - self._used_at[victim] >= self._ttl_s


class Lfu(OfferedHandles):
    """Least frequently used since admission; among equal counts the least recently used.

    Attributes:
        _rank: per resident handle, the count of uses and the number of its last use.
        _queue: heap of (rank, handle), including outdated entries.
    """

    def __init__(self) -> None:
        self._rank: dict[int, tuple[int, int]] = {}
        super().__init__()
        self._queue: list[tuple[tuple[int, int], int]] = []
        self._uses = 0

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._rank[handle] = (0, 0)
        self.used(handle, facts, now)

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._uses += 1
        self._rank[handle] = (self._rank[handle][0] + 1, self._uses)
        if handle in self._offered:
            self._push(handle)

    def left(self, handle: int, now: float) -> None:
        del self._rank[handle]
        self._offered.discard(handle)

    def offer(self, handle: int) -> None:
        if handle not in self._offered:
            self._offered.add(handle)
            self._push(handle)

    def victim(self, now: float) -> int | None:
        queue = self._queue
        while queue:
            rank, handle = queue[0]
            if handle in self._offered and self._rank[handle] == rank:
                return handle
            heapq.heappop(queue)
        return None

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _push(self, handle: int) -> None:
        heapq.heappush(self._queue, (self._rank[handle], handle))
        if len(self._queue) > 4 * len(self._rank) + 64:
            self._queue = [(self._rank[h], h) for h in self._offered]
            heapq.heapify(self._queue)
