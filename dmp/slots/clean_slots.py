"""Which sealed blocks have a copy in the lower tier, and which block is copied next.

A part of the pure core, used by dmp/slots/slot_table.py. Blocks are copied in the order of
eviction: a block is due when all its children on this node have copies. Without a lower tier this
module keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.leaf_queue import Entry, LeafQueue
from tierkv.kvcore.ids import BlockKey

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
