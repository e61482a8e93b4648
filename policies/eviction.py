"""The contract between a cache and its eviction policy, and leaf-LRU, the baseline policy.

The page pool of a compute node, the slot table of a DMP node and the simulator call a policy for
each block. A policy keeps no bytes, reads no clock and never evicts: the policy ranks blocks, and
the cache decides which blocks may be evicted at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.kvcore.block import NO_OUTLOOK, ROOT_PARENT, BlockSpec, Outlook

_SPARE_ENTRIES: Final = 64
"""Below this many stale entries the heap is not cleaned."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts passed by a cache to its policy when a block is used.

    Attributes:
        key: the same for the same content, also after eviction; policies remember keys for a while.
        parent: key of the previous block of the prompt; None for the first block or if unknown.
        outlook: known facts about the next use, and the block's place in the prompt of the last
            use.
        prompt_blocks: blocks of the prompt in which the block was new; 0 if unknown.
    """

    key: Hashable
    parent: Hashable | None = None
    outlook: Outlook = NO_OUTLOOK
    prompt_blocks: int = 0

    @staticmethod
    def of(block: BlockSpec, prompt_blocks: int = 0) -> BlockFacts:
        """Return the facts about a block for a policy."""
        parent = None if block.parent == ROOT_PARENT else block.parent
        return BlockFacts(block.key, parent, block.outlook, prompt_blocks)


def whole_seconds(now: float) -> float:
    """Round the time to whole seconds, as live caches do before calling a policy.

    A policy recomputes its values whenever the time changes. A trace names all blocks of a request
    with one time, while a live cache uses the blocks one after another within the same second.
    """
    return now // 1.0


NO_FACTS: Final = BlockFacts(key=None)
"""Facts of a block found at attach; policies do not remember a block without a key."""


class EvictionPolicy(Protocol):
    """Ranks blocks by worth; amortised O(1) or O(log blocks) per call.

    Handles are small integers chosen by the cache (page or slot numbers); a handle may be used
    again after ``left``. ``now`` is in seconds, of any origin, and never goes backwards.

    1. A block is resident from ``entered`` to ``left``. The cache calls ``used`` once for each
       request with a resident block, in order from the head of the prompt to its end, or from end
       to head.
    2. ``offer`` adds a resident block to the eviction candidates, ``withdraw`` removes the block.
       Both may be repeated; ``left`` withdraws, ``used`` does neither.
    3. ``victim`` returns an offered block, or None if no block is offered. ``victim`` removes
       nothing: a repeated call returns the same block.
    4. A cache that evicts only leaves offers a block when its last child has left, and withdraws
       the block when a child enters. The policy must not rely on this order.
    5. ``admits`` is called right before ``victim`` for a block without room. False means the new
       block is worth less than the victim. The answer is always True while no block is offered. A
       cache that must store the block ignores the answer. After a refusal the cache calls
       ``refused`` for the following blocks of the prompt, so the policy learns from these blocks as
       well.
    6. The same calls give the same answers: a policy seeds its random numbers.
    """

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        """Note that a block became resident."""

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        """Note the use of a resident block by a request; the new facts replace the old facts."""

    def left(self, handle: int, now: float) -> None:
        """Note that a block was evicted or dropped."""

    def offer(self, handle: int) -> None:
        """Make a block an eviction candidate: it has no reference, pin, hold or child."""

    def withdraw(self, handle: int) -> None:
        """Remove a block from the eviction candidates."""

    def victim(self, now: float) -> int | None:
        """Return the offered block least worth keeping."""

    def admits(self, facts: BlockFacts, now: float) -> bool:
        """Return True if a new block is worth more than the victim."""

    def refused(self, facts: BlockFacts, now: float) -> None:
        """Note a request's use of a block that is not admitted because its parent was refused."""


class RankedQueue:
    """Offered handles by rank, smallest first; amortised O(log handles) per call.

    Attributes:
        _ranks: rank by offered handle.
        _queue: heap of (rank, handle); may contain stale entries.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, int]] = {}
        self._queue: list[tuple[tuple[int, int], int]] = []

    def __contains__(self, handle: int) -> bool:
        return handle in self._ranks

    def put(self, handle: int, rank: tuple[int, int]) -> None:
        """Add a handle, or give it another rank."""
        if self._ranks.get(handle) == rank:
            return
        self._ranks[handle] = rank
        if len(self._queue) > 2 * len(self._ranks) + _SPARE_ENTRIES:
            self._queue = [(rank, each) for each, rank in self._ranks.items()]
            heapq.heapify(self._queue)
        else:
            heapq.heappush(self._queue, (rank, handle))

    def drop(self, handle: int) -> None:
        """Remove a handle, if it is there."""
        self._ranks.pop(handle, None)

    def first(self) -> int | None:
        """Return the handle of the smallest rank; None if there is none."""
        queue = self._queue
        while queue:
            rank, handle = queue[0]
            if self._ranks.get(handle) == rank:
                return handle
            heapq.heappop(queue)
        return None


class RankedBlocks:
    """The common part of policies with a rank per block: the smallest goes first.

    Attributes:
        _order: rank by resident handle.
        _offered: the eviction candidates.
    """

    def __init__(self) -> None:
        self._order: dict[int, tuple[int, int]] = {}
        self._offered = RankedQueue()

    def left(self, handle: int, now: float) -> None:
        self._offered.drop(handle)
        del self._order[handle]

    def offer(self, handle: int) -> None:
        self._offered.put(handle, self._order[handle])

    def withdraw(self, handle: int) -> None:
        self._offered.drop(handle)

    def victim(self, now: float) -> int | None:
        return self._offered.first()

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return True

    def refused(self, facts: BlockFacts, now: float) -> None:
        pass


class LeafLru(RankedBlocks):
    """Leaf-LRU: evicts the least recently used block, and of one request the deepest block first.

    `default` behaves like leaf-LRU until its first observations. With leaves as the only
    candidates, leaf-LRU equals an LRU with the uses of a prompt in order from end to head.

    Attributes:
        _order: (request of the last use, minus depth) by resident handle.
        _request: number of the current request.
        _last: time and depth of the last use; another time, or a depth that does not grow, starts a
            new request.
    """

    def __init__(self) -> None:
        super().__init__()
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
            self.offer(handle)
