"""Classic policies on single blocks: FIFO, LRU, LFU, TTL and ARC.

They ignore prompts and prefixes. Namespaces choose a policy by name (policies/select.py), and the
simulator compares each with the default. In a cache that offers leaves only, the victim is the
worst leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from tierkv.policies.eviction import BlockFacts, RankedBlocks, RankedQueue


class Fifo(RankedBlocks):
    """First in, first out.

    Attributes:
        _events: number of the latest entry or use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events = 0

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._rank(handle)

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        pass

    def _rank(self, handle: int, uses: int = 0) -> None:
        """Give a handle the last rank of a number of uses."""
        self._events += 1
        self._order[handle] = (uses, self._events)
        if handle in self._offered:
            self._offered.put(handle, self._order[handle])


class Lru(Fifo):
    """Least recently used, block by block."""

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._rank(handle)


class Lfu(Fifo):
    """Least frequently used since admission; among equal counts the least recently used."""

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._rank(handle, self._order[handle][0] + 1)


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


class Arc:
    """ARC: recency and frequency in two lists, balanced by premature evictions.

    Ref: N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
    figure 4.

    Attributes:
        _once, _often: resident handles and their keys (T1, T2).
        _order: rank by resident handle; the least recently used has the smallest.
        _once_offered, _often_offered: the eviction candidates of both lists.
        _once_gone, _often_gone: keys evicted from T1 and T2 (B1, B2), oldest first.
        _target: target number of blocks in T1 (p).
        _coming: key of the newcomer that needs room.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._once: dict[int, Hashable] = {}
        self._often: dict[int, Hashable] = {}
        self._order: dict[int, tuple[int, int]] = {}
        self._events = 0
        self._once_offered, self._often_offered = RankedQueue(), RankedQueue()
        self._once_gone: OrderedDict[Hashable, None] = OrderedDict()
        self._often_gone: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0
        self._coming: Hashable = None

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        key = facts.key
        if key in self._once_gone or key in self._often_gone:
            self._adapt(key)
            self._once_gone.pop(key, None)
            self._often_gone.pop(key, None)
            self._often[handle] = key
        else:
            self._once[handle] = key
        self._rank(handle)
        self._coming = None
        self._trim()

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        offered = handle in self._once_offered or handle in self._often_offered
        if handle in self._once:
            self._often[handle] = self._once.pop(handle)
        self._rank(handle)
        if offered:
            self._once_offered.drop(handle)
            self.offer(handle)

    def left(self, handle: int, now: float) -> None:
        self.withdraw(handle)
        del self._order[handle]
        if handle in self._once:
            self._once_gone[self._once.pop(handle)] = None
        else:
            self._often_gone[self._often.pop(handle)] = None

    def offer(self, handle: int) -> None:
        offered = self._once_offered if handle in self._once else self._often_offered
        offered.put(handle, self._order[handle])

    def withdraw(self, handle: int) -> None:
        self._once_offered.drop(handle)
        self._often_offered.drop(handle)

    def victim(self, now: float) -> int | None:
        """REPLACE of the paper."""
        once = len(self._once)
        again = self._coming is not None and self._coming in self._often_gone
        from_once = once > self._target or (again and once == self._target)
        first, second = self._once_offered, self._often_offered
        if not (once and from_once):
            first, second = second, first
        handle = first.first()
        return second.first() if handle is None else handle

    def admits(self, facts: BlockFacts, now: float) -> bool:
        self._adapt(facts.key)
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _rank(self, handle: int) -> None:
        self._events += 1
        self._order[handle] = (self._events, handle)

    def _adapt(self, key: Hashable) -> None:
        """Move the target towards the list that would have had the block; once per newcomer."""
        if key is None or key == self._coming:
            return
        self._coming = key
        once, often = len(self._once_gone), len(self._often_gone)
        if key in self._once_gone:
            self._target = min(self._capacity, self._target + max(1.0, often / once))
        elif key in self._often_gone:
            self._target = max(0.0, self._target - max(1.0, once / often))

    def _trim(self) -> None:
        """Forget the oldest ghosts: |T1|+|B1| at most c, all four lists at most 2c."""
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.popitem(last=False)
        residents = len(self._once) + len(self._often)
        while (
            self._often_gone
            and residents + len(self._once_gone) + len(self._often_gone) > 2 * self._capacity
        ):
            self._often_gone.popitem(last=False)
