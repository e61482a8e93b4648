"""Which sealed blocks have a copy in the lower tier, and which goes down next.

A part of the pure core, used by dmp/slots/slot_table.py. Blocks go down in the order of eviction: a
block is due when all its children here have copies. Without a lower tier nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.leaf_queue import Entry, LeafQueue
from tierkv.kvcore.ids import BlockKey

_LANE: Final = 0
"""The only one: slot sizes do not matter here."""


class CleanSlots:
    """Marks slots as clean, and queues the others.

    Attributes:
        clean_bytes: slot bytes of sealed blocks with a copy below.
        spare_bytes: of these, not used since they were copied, and thus older than what is dirty.
    """

    def __init__(self, find: Callable[[BlockKey], Slot | None], *, enabled: bool) -> None:
        """Begin empty.

        Args:
            find: answers the slot of a block.
            enabled: whether there is a lower tier.
        """
        self.clean_bytes = 0
        self.spare_bytes = 0
        self._find = find
        self._dirty = LeafQueue(_is_dirty) if enabled else None

    @property
    def enabled(self) -> bool:
        """Whether there is a lower tier."""
        return self._dirty is not None

    def next_dirty(self, slot_of: Callable[[int, int], Slot | None]) -> Slot | None:
        """Return the sealed block that goes next and has no copy yet; None when all have."""
        return self._dirty.oldest(_LANE, slot_of) if self._dirty is not None else None

    def mark(self, slot: Slot, *, spare: bool = True) -> None:
        """Note that a copy of a sealed block rests below; ``spare``: it goes before others."""
        if self._dirty is not None and not slot.clean and slot.state is SlotState.SEALED:
            slot.clean = True
            self.clean_bytes += slot.extent.slot_bytes
            if spare:
                slot.spare = True
                self.spare_bytes += slot.extent.slot_bytes
            self._unlink(self._dirty, slot)

    def used(self, slot: Slot) -> None:
        """Take in that a spare block was used: it is young now, and what is dirty goes first."""
        slot.spare = False
        self.spare_bytes -= slot.extent.slot_bytes

    def unmark(self, slot: Slot) -> None:
        """Note that the copy below is gone."""
        if self._dirty is not None and slot.clean:
            self._forget_mark(slot)
            self._dirty.link(slot.block.parent)
            self._dirty.offer(slot, _LANE)

    def linked(self, slot: Slot) -> None:
        """Take in a new block."""
        if self._dirty is not None:
            self._dirty.link(slot.block.parent)

    def unlinked(self, slot: Slot) -> None:
        """Take in that a block can't be found any more."""
        if self._dirty is not None:
            if slot.clean:
                self._forget_mark(slot)
            else:
                self._unlink(self._dirty, slot)

    def offer(self, slot: Slot) -> None:
        """Queue a block if it is due."""
        if self._dirty is not None:
            self._dirty.offer(slot, _LANE)

    def vacated(self, index: int) -> None:
        """Take in that a slot is free."""
        if self._dirty is not None:
            self._dirty.forget(index)

    def restore(self, children: Mapping[BlockKey, int], leaves: Iterable[Entry]) -> None:
        """Take in a restart: nothing is known to rest below yet."""
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
