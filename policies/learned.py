"""The default policy: keep the blocks with the most expected uses per second of residence.

Every block has a kind: its number of uses, the earlier uses of its prompt when the block entered,
the time since its conversation's previous request, the new share of its last prompt, whether the
block ended the prompt, and the expected next use. The victim is the offered block whose kind has
the smallest learned value at the block's age. A new block of smaller value is not admitted. Without
any observation the policy is leaf-LRU.
docs/policies.md has the explanation and measurements.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from tierkv.kvcore.block import Expectation
from tierkv.policies.eviction import BlockFacts
from tierkv.policies.lifetimes import (
    GAP_KINDS,
    RUN_KINDS,
    Lifetimes,
    PromptRun,
    WaitCohort,
    gap_kind,
    run_kind,
)

_MOST_USES: Final = 3
_MOST_KIN: Final = 5
_SPARE_ENTRIES: Final = 64
"""Below this many stale entries a queue is not cleaned."""

_REMEMBERED_PER_BLOCK: Final = (4, 16)
_MUCH_REMEMBERED: Final = 1 << 16
"""Bound on the blocks remembered after eviction: 16 per block of capacity up to this number, but at
least 4 per block."""

_ODDS: Final = {
    Expectation.NONE: 0.1, Expectation.UNKNOWN: 1.0, Expectation.TURN: 2.0, Expectation.ROWS: 50.0,
}  # fmt: skip
"""Prior odds of each expectation, used until its kinds have been observed."""

_EXPECTED_EDGES_S: Final = (4.0, 30.0, 300.0)
"""Bucket edges of announced times until the next use; an absent announcement is a bucket of its
own.
"""

Order = tuple[int, int, int]
"""Of equal value, the first goes: request of the last use, minus depth, handle."""

_NO_RUN: Final = PromptRun(0)


class _Block:
    """Memory about one block, resident or not.

    Attributes:
        uses: number of requests with the block.
        kin: uses of the preceding block when this block entered.
        kind: kind of the last use, without the kind of the run.
        run: run of the last request with the block.
        used_at: time of the last use.
        wait: cohort waiting for the next use.
        order: tie-break among blocks of equal value.
        resident: whether the block is in the cache.
        offered: whether the block may be evicted.
    """

    __slots__ = (
        "key", "kin", "kind", "offered", "order", "resident", "run", "used_at", "uses", "wait",
    )  # fmt: skip

    def __init__(self, key: Hashable, kin: int) -> None:
        self.key = key
        self.uses = 0
        self.kin = kin
        self.kind = 0
        self.run = _NO_RUN
        self.used_at = 0.0
        self.wait: WaitCohort | None = None
        self.order: Order = (0, 0, 0)
        self.resident = False
        self.offered = False


class LearnedValue:
    """An EvictionPolicy that learns the value of each kind of block from the traffic.

    Attributes:
        _here: resident blocks by handle.
        _known: resident and remembered blocks by key.
        _gone: keys of remembered blocks outside the cache, longest gone first.
        _queues: per kind, a heap of (order, handle) of offered blocks; may contain stale entries.
        _round: heap of (value, order, kind, handle) at the time ``_now``: the head of each queue.
        _heads: per kind, the entry last put into ``_round``.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._here: dict[int, _Block] = {}
        self._known: dict[Hashable, _Block] = {}
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        few, many = (share * capacity_blocks for share in _REMEMBERED_PER_BLOCK)
        self._most_gone = max(few, min(many, _MUCH_REMEMBERED))
        self._lifetimes = Lifetimes()
        self._queues: dict[int, list[tuple[Order, int]]] = {}
        self._round: list[tuple[float, Order, int, int]] = []
        self._heads: dict[int, tuple[Order, int]] = {}
        self._now = float("-inf")
        self._runs = 0

    # What happens to blocks

    def entered(self, handle: int, facts: BlockFacts, now: float) -> None:
        block = self._recalled(facts)
        if block.resident:  # Two handles have the same content: only the first is remembered.
            block = _Block(None, block.kin)
        self._gone.pop(block.key, None)
        block.resident, block.offered = True, False
        self._here[handle] = block
        self._use(block, handle, facts, now)

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        block = self._here[handle]
        self._use(block, handle, facts, now)
        if block.offered:
            self._enqueue(handle, block)

    def left(self, handle: int, now: float) -> None:
        block = self._here.pop(handle)
        block.resident = block.offered = False
        if block.key is not None:
            self._remember(block)

    def offer(self, handle: int) -> None:
        block = self._here[handle]
        if not block.offered:
            block.offered = True
            self._enqueue(handle, block)

    def withdraw(self, handle: int) -> None:
        self._here[handle].offered = False

    # Questions

    def victim(self, now: float) -> int | None:
        if now != self._now:
            self._advance(now)
        heap = self._round
        while heap:
            _, order, kind, handle = heap[0]
            if self._counts((order, handle)):
                return handle
            heapq.heappop(heap)
            if self._heads.get(kind) == (order, handle):
                del self._heads[kind]  # A later offer at the same time may put the same head again.
            self._put_head(kind)
        return None

    def admits(self, facts: BlockFacts, now: float) -> bool:
        victim = self.victim(now)
        if victim is None:
            return True
        block = self._recalled(facts)
        run = self._run_of(facts)
        fresh = run.fresh if run is not None else 0
        if not block.uses:
            fresh = max(fresh + 1, facts.prompt_blocks - facts.outlook.depth)
        if block.uses:
            gap = gap_kind(now - block.used_at)
        else:
            gap = _NO_RUN.gap if run is None else run.gap
        kind = self._kind_of(block, block.uses + 1, gap, facts) + run_kind(fresh)
        worth = self._lifetimes.value(kind, 0.0)
        if worth >= self._round[0][0]:
            return True
        self.refused(facts, now)
        return False

    def refused(self, facts: BlockFacts, now: float) -> None:
        """Learn from a refused block; repeated calls at one time count once."""
        if now != self._now:
            self._advance(now)
        block = self._recalled(facts)
        if block.key is not None and (not block.uses or block.used_at != now):
            self._learn(block, facts, now)
            self._remember(block)

    # Inside

    def _use(self, block: _Block, handle: int, facts: BlockFacts, now: float) -> None:
        if now != self._now:
            self._advance(now)
        self._learn(block, facts, now)
        block.order = (block.run.number, -facts.outlook.depth, handle)

    def _learn(self, block: _Block, facts: BlockFacts, now: float) -> None:
        """End the block's current wait and start the next one."""
        if block.wait is not None:
            self._lifetimes.end_in_use(block.wait)
        run = self._run_of(facts)
        if run is None:
            self._runs += 1
            run = PromptRun(self._runs)
        block.run = run
        run.tip = facts.key
        if not block.uses:
            run.fresh = max(run.fresh + 1, facts.prompt_blocks - facts.outlook.depth)
        else:
            run.gap = gap_kind(now - block.used_at)
        block.uses += 1
        block.used_at = now
        kind = block.kind = self._kind_of(block, block.uses, run.gap, facts)
        block.wait = self._lifetimes.start(kind, run, now, _ODDS[facts.outlook.expectation])

    def _run_of(self, facts: BlockFacts) -> PromptRun | None:
        """Return the run whose last block is the parent of this block, if there is one."""
        parent = self._known.get(facts.parent)
        if parent is None:
            return None
        return parent.run if parent.run.tip == parent.key else None

    def _kind_of(self, block: _Block, uses: int, gap: int, facts: BlockFacts) -> int:
        own = min(uses.bit_length() - 1, _MOST_USES)
        kin = min(block.kin.bit_length(), _MOST_KIN)
        future = facts.outlook.expectation * 5
        if facts.outlook.expected_in_s is not None:
            future += 1 + bisect_right(_EXPECTED_EDGES_S, facts.outlook.expected_in_s)
        family = ((future * 4 + own) * 8 + kin) * 2 + facts.outlook.tail
        return (family * GAP_KINDS + gap) * RUN_KINDS

    def _recalled(self, facts: BlockFacts) -> _Block:
        """Return the memory about a block; a new block takes its kin from the parent."""
        known = self._known.get(facts.key)
        if known is not None:
            return known
        parent = self._known.get(facts.parent)
        kin = 0
        if parent is not None:
            kin = parent.uses - 1 if parent.uses > 1 else parent.kin
        block = _Block(facts.key, kin)
        if facts.key is not None:
            self._known[facts.key] = block
            self._gone[facts.key] = None
        return block

    def _remember(self, block: _Block) -> None:
        gone = self._gone
        gone[block.key] = None
        gone.move_to_end(block.key)
        while len(gone) > self._most_gone:
            key, _ = gone.popitem(last=False)
            forgotten = self._known.pop(key)
            if forgotten.wait is not None:
                self._lifetimes.give_up(forgotten.wait)

    def _advance(self, now: float) -> None:
        """Move to another time; all values change, so rebuild the round."""
        self._now = now
        self._lifetimes.advance(now)
        self._round = []
        self._heads = {}
        for kind in list(self._queues):
            self._put_head(kind)

    def _enqueue(self, handle: int, block: _Block) -> None:
        kind = block.kind + block.run.kind
        queue = self._queues.setdefault(kind, [])
        if len(queue) > 2 * len(self._here) + _SPARE_ENTRIES:
            queue[:] = [entry for entry in queue if self._counts(entry)]
            heapq.heapify(queue)
        heapq.heappush(queue, (block.order, handle))
        if queue[0][1] == handle or not self._counts(queue[0]):
            self._put_head(kind)

    def _put_head(self, kind: int) -> None:
        """Put the oldest offered block of a kind into the current round."""
        queue = self._queues[kind]
        while queue and not self._counts(queue[0]):
            heapq.heappop(queue)
        if queue and self._heads.get(kind) != queue[0]:
            order, handle = self._heads[kind] = queue[0]
            age = self._now - self._here[handle].used_at
            value = self._lifetimes.value(kind, age)
            heapq.heappush(self._round, (value, order, kind, handle))

    def _counts(self, entry: tuple[Order, int]) -> bool:
        block = self._here.get(entry[1])
        return block is not None and block.offered and block.order == entry[0]
