"""Leaves in order of last use: least recently used first, children before their parent.

A part of the pure core, used twice by dmp/slots/slot_table.py: for eviction, and for copying blocks
to the lower tier ahead of eviction. A use does not move the slot's entry. At the front of the
queue, an entry with an outdated age is put back, and an entry of a former leaf is dropped. Stale
entries are also dropped when they are most of the queue.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from tierkv.dmp.segment.slots import Slot
from tierkv.kvcore.ids import BlockKey

Entry = tuple[int, int, int]
"""Position in the order of uses, slot number, generation."""

_SPARE_ENTRIES: Final = 64
"""Below this many stale entries the queue is not cleaned."""


class LeafQueue:
    """Counts children, and queues the blocks without children in lanes (slot sizes).

    Attributes:
        children: number of children on this node by parent, whether or not the parent is here.
        _lanes: a heap of entries per lane.
        _queued: generation of the valid entry, by slot number.
        _may_go: whether a slot may be evicted now, apart from its children.
    """

    def __init__(self, may_go: Callable[[Slot], bool]) -> None:
        self.children: dict[BlockKey, int] = {}
        self._lanes: dict[int, list[Entry]] = {}
        self._queued: dict[int, int] = {}
        self._may_go = may_go

    def link(self, parent: BlockKey) -> None:
        """Count a child."""
        children = self.children
        children[parent] = children.get(parent, 0) + 1

    def unlink(self, parent: BlockKey) -> bool:
        """Remove a child from the count; True if it was the last child."""
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
            return False
        del self.children[parent]
        return True

    def is_leaf(self, slot: Slot) -> bool:
        """Return True if a slot may be evicted and has no child on this node."""
        return slot.block.key not in self.children and self._may_go(slot)

    def offer(self, slot: Slot, lane: int) -> None:
        """Queue a slot if it is a leaf and not queued yet."""
        if slot.index not in self._queued and self.is_leaf(slot):
            self._queued[slot.index] = slot.generation
            queue = self._lanes.setdefault(lane, [])
            heapq.heappush(queue, (slot.last_used, slot.index, slot.generation))
            if len(queue) > 2 * len(self._queued) + _SPARE_ENTRIES:
                queue[:] = [entry for entry in queue if self._queued.get(entry[1]) == entry[2]]
                heapq.heapify(queue)

    def forget(self, index: int) -> None:
        """Note that a slot is free; its entry is dropped on reaching the front."""
        self._queued.pop(index, None)

    def oldest(self, lane: int, slot_of: Callable[[int, int], Slot | None]) -> Slot | None:
        """Return the least recently used leaf of a lane; amortised O(log slots).

        Args:
            lane: the lane.
            slot_of: returns the slot of a number and generation; None if the slot number was reused
                or freed.
        """
        queue = self._lanes.get(lane, [])
        while queue:
            used, index, generation = queue[0]
            slot = slot_of(index, generation)
            if slot is None:
                heapq.heappop(queue)
            elif not self.is_leaf(slot):
                heapq.heappop(queue)
                self._queued.pop(index, None)
            elif slot.last_used != used:
                heapq.heapreplace(queue, (slot.last_used, index, generation))
            else:
                return slot
        return None

    def lanes(self) -> list[int]:
        """Return the lanes that ever had a leaf."""
        return list(self._lanes)

    def load(self, parents: list[BlockKey]) -> None:
        """Count the children of an empty table at once."""
        self.children = dict(Counter(parents))

    def load_lane(self, lane: int, entries: Iterable[Entry]) -> None:
        """Queue leaves of an empty table at once, oldest first: a sorted list is a heap."""
        queue = self._lanes[lane] = list(entries)
        self._queued.update([(index, generation) for _, index, generation in queue])

    def check_invariants(self, slots: Iterable[Slot], named: Iterable[BlockKey]) -> None:
        """Assert that children add up and that no leaf is forgotten; O(slots)."""
        assert self.children == dict(Counter(named)), "children do not add up"
        for slot in slots:
            assert slot.index in self._queued or not self.is_leaf(slot), f"not queued: {slot}"
