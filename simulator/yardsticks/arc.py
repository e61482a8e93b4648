"""ARC: recency and frequency in two lists, balanced by premature evictions.

A yardstick for the simulator. N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead
Replacement Cache", FAST 2003, figure 4; block by block, with ghosts by key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from tierkv.policies.eviction import BlockFacts
from tierkv.simulator.yardsticks.offered import OfferedHandles


class Arc(OfferedHandles):
    """An EvictionPolicy.

    Attributes:
        _once, _often: resident handles and their keys (T1, T2), least recently used first.
        _once_gone, _often_gone: keys evicted from T1 and T2 (B1, B2), oldest first.
        _target: target number of blocks in T1 (p).
        _coming: key of the newcomer that needs room.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._once: OrderedDict[int, Hashable] = OrderedDict()
        self._often: OrderedDict[int, Hashable] = OrderedDict()
        self._once_gone: OrderedDict[Hashable, None] = OrderedDict()
        self._often_gone: OrderedDict[Hashable, None] = OrderedDict()
        super().__init__()
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
        self._coming = None
        self._trim()

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        if handle in self._once:
            self._often[handle] = self._once.pop(handle)
        else:
            self._often.move_to_end(handle)

    def left(self, handle: int, now: float) -> None:
        self._offered.discard(handle)
        if handle in self._once:
            self._once_gone[self._once.pop(handle)] = None
        else:
            self._often_gone[self._often.pop(handle)] = None

    def victim(self, now: float) -> int | None:
        """REPLACE of the paper."""
        once = len(self._once)
        again = self._coming is not None and self._coming in self._often_gone
        from_once = once > self._target or (again and once == self._target)
        first, second = self._once, self._often
        if not (once and from_once):
            first, second = second, first
        for handles in (first, second):
            for handle in handles:
                if handle in self._offered:
                    return handle
        return None

    def admits(self, facts: BlockFacts, now: float) -> bool:
        self._adapt(facts.key)
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

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
