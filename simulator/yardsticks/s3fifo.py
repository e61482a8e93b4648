"""S3-FIFO: a small queue for newcomers, a main queue for reused blocks, and a queue of ghosts.

A yardstick for the simulator. J. Yang and others, "FIFO Queues are All You Need for Cache
Eviction", SOSP 2023, algorithm 1; block by block, a tenth of the cache for newcomers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from tierkv.policies.eviction import BlockFacts
from tierkv.simulator.yardsticks.offered import OfferedHandles

_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3


class S3Fifo(OfferedHandles):
    """An EvictionPolicy.

    Attributes:
        _small, _main: resident handles and their keys, oldest first.
        _gone: keys evicted from the small queue, oldest first; bounded by the size of the main
            queue.
        _uses: per resident handle, uses since admission to its queue, at most three.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._most_small = max(1, int(capacity_blocks * _SMALL_SHARE))
        self._most_gone = max(1, capacity_blocks - self._most_small)
        self._small: OrderedDict[int, Hashable] = OrderedDict()
        self._main: OrderedDict[int, Hashable] = OrderedDict()
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        super().__init__()

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._uses[handle] = 0
        if facts.key in self._gone:
            del self._gone[facts.key]
            self._main[handle] = facts.key
        else:
            self._small[handle] = facts.key

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self._uses[handle] = min(self._uses[handle] + 1, _MOST_USES)

    def left(self, handle: int, now: float) -> None:
        self._offered.discard(handle)
        del self._uses[handle]
        if handle in self._small:
            self._gone[self._small.pop(handle)] = None
            if len(self._gone) > self._most_gone:
                self._gone.popitem(last=False)
        else:
            del self._main[handle]

    def victim(self, now: float) -> int | None:
        if not self._offered:
            return None
        victim = None
        if len(self._small) >= self._most_small or not self._main:
            victim = self._from_small()
        if victim is None:
            victim = self._from_main()
        return victim if victim is not None else self._from_small()

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass

    def _from_small(self) -> int | None:
        """Return the oldest handle with at most one use; others move to the main queue."""
        for handle in list(self._peek(self._small)):
            if self._uses[handle] <= 1:
                return handle
            self._main[handle] = self._small.pop(handle)
            self._uses[handle] = 0
        return None

    def _from_main(self) -> int | None:
        """Return the oldest handle without uses; each round costs a used handle one use."""
        for _ in range((_MOST_USES + 1) * len(self._main)):
            handle = next(iter(self._main))
            if handle in self._offered and not self._uses[handle]:
                return handle
            self._main.move_to_end(handle)
            self._uses[handle] = max(0, self._uses[handle] - 1)
        return None

    def _peek(self, queue: OrderedDict[int, Hashable]) -> list[int]:
        """Return the offered handles up to the first evictable handle."""
        found = []
        for handle in queue:
            if handle in self._offered:
                found.append(handle)
                if self._uses[handle] <= 1:
                    break
        return found
