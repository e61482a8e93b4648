"""Leaves in order of last use: least recently used first, children before their parent.

A part of the pure core, used twice by dmp/slots/slot_table.py: for eviction, and for copying blocks
to the lower tier ahead of eviction. A use does not move the slot's entry. At the front of the
queue, an entry with an outdated age is put back, and an entry of a former leaf is dropped. Stale
entries are also dropped when they are most of the queue.

``CleanSlots`` knows which sealed blocks have a copy in the lower tier, and which block is copied
next. Blocks are copied in the order of eviction: a block is due when all its children on this node
have copies. Without a lower tier ``CleanSlots`` keeps no state.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState
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


_LANE: Final = 0
"""The only lane: slot sizes do not matter here."""


class CleanSlots:
    """Marks slots as clean, and queues the dirty slots.

    Attributes:
        clean_bytes: slot bytes of sealed blocks with a copy in the lower tier.
        spare_bytes: the part of ``clean_bytes`` that was not used since the copy was made, and thus
            is older than every dirty slot.
    """

    def __init__(self, find: Callable[[BlockKey], Slot | None], *, enabled: bool) -> None:
        """Begin empty.

        Args:
            find: returns the slot of a block.
            enabled: whether a lower tier exists.
        """
        self.clean_bytes = 0
        self.spare_bytes = 0
        self._find = find
        self._dirty = LeafQueue(_is_dirty) if enabled else None

    @property
    def enabled(self) -> bool:
        """Whether a lower tier exists."""
        return self._dirty is not None

    def next_dirty(self, slot_of: Callable[[int, int], Slot | None]) -> Slot | None:
        """Return the sealed block to copy next; None if all blocks have a copy."""
        return self._dirty.oldest(_LANE, slot_of) if self._dirty is not None else None

    def mark(self, slot: Slot, *, spare: bool = True) -> None:
        """Note a sealed block's copy in the lower tier; ``spare`` blocks are evicted first."""
        if self._dirty is not None and not slot.clean and slot.state is SlotState.SEALED:
            slot.clean = True
            self.clean_bytes += slot.extent.slot_bytes
            if spare:
                slot.spare = True
                self.spare_bytes += slot.extent.slot_bytes
            self._unlink(self._dirty, slot)

    def used(self, slot: Slot) -> None:
        """Note the use of a spare block: it is young now, and dirty blocks are evicted first."""
        slot.spare = False
        self.spare_bytes -= slot.extent.slot_bytes

    def unmark(self, slot: Slot) -> None:
        """Forget the copy in the lower tier."""
        if self._dirty is not None and slot.clean:
            self._forget_mark(slot)
            self._dirty.link(slot.block.parent)
            self._dirty.offer(slot, _LANE)

    def linked(self, slot: Slot) -> None:
        """Add a new block."""
        if self._dirty is not None:
            self._dirty.link(slot.block.parent)

    def unlinked(self, slot: Slot) -> None:
        """Forget a removed block."""
        if self._dirty is not None:
            if slot.clean:
                self._forget_mark(slot)
            else:
                self._unlink(self._dirty, slot)

    def offer(self, slot: Slot) -> None:
        """Queue a block if the block is due."""
        if self._dirty is not None:
            self._dirty.offer(slot, _LANE)

    def vacated(self, index: int) -> None:
        """Note that a slot is free."""
        if self._dirty is not None:
            self._dirty.forget(index)

    def restore(self, children: Mapping[BlockKey, int], leaves: Iterable[Entry]) -> None:
        """Load the queue after a restart, when no block is known to have a copy yet."""
        if self._dirty is not None:
            self._dirty.children = dict(children)
            self._dirty.load_lane(_LANE, leaves)

    def _unlink(self, dirty: LeafQueue, slot: Slot) -> None:
        if dirty.unlink(slot.block.parent):
            above = self._find(slot.block.parent)
            if above is not None:
                dirty.offer(above, _LANE)

    def _forget_mark(self, slot: Slot) -> None:
        slot.clean = False
        self.clean_bytes -= slot.extent.slot_bytes
        if slot.spare:
            self.used(slot)

    def check_invariants(self, slots: Sequence[Slot], named: Sequence[Slot]) -> None:
        """Assert that marks and queue agree with the slots; O(slots)."""
        assert self.clean_bytes == sum(s.extent.slot_bytes for s in slots if s.clean)
        assert self.spare_bytes == sum(s.extent.slot_bytes for s in slots if s.spare)
        assert all(slot.state is SlotState.SEALED for slot in slots if slot.clean)
        assert all(slot.clean for slot in slots if slot.spare)
        if self._dirty is not None:
            dirty = [slot.block.parent for slot in named if not slot.clean]
            self._dirty.check_invariants(slots, dirty)


def _is_dirty(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.clean
