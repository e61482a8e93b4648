"""Fills a slot table from a segment after a restart.

A part of the pure core, called once by dmp/slots/slot_table.py, on an empty table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.dmp.segment.extents import ExtentTable
from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import Slot
from tierkv.dmp.slots.clean_slots import CleanSlots
from tierkv.dmp.slots.leaf_queue import LeafQueue
from tierkv.dmp.slots.slot_store import SlotStore


@dataclass(frozen=True, slots=True)
class TableRestore:
    """The parts of an empty table that are filled."""

    store: SlotStore
    extents: ExtentTable
    leaves: LeafQueue
    clean: CleanSlots

    def fill(
        self, extent_sizes: Sequence[int], sealed: RestoredSlots, quarantined: Sequence[Slot]
    ) -> list[int]:
        """Add slots, the readable slots oldest first; return the slots that are second copies."""
        assert not len(self.store), "restore wants an empty table"
        refused: list[int] = []
        kept = self._adopt(extent_sizes, sealed, quarantined)
        if not kept:
            again = sealed.second_copies()
            refused, sealed = sealed.indices[again].tolist(), sealed.some(~again)
            kept = self._adopt(extent_sizes, sealed, quarantined)
        assert kept, "second copies are out"
        self._fill_queues(sealed)
        return refused

    def _adopt(
        self, extent_sizes: Sequence[int], sealed: RestoredSlots, quarantined: Sequence[Slot]
    ) -> bool:
        """Add the slots; False, without any change, if two slots hold the same block."""
        if not self.store.restore(sealed):
            return False
        numbers = np.append(sealed.indices, [slot.index for slot in quarantined]).astype(int)
        self.extents.adopt(extent_sizes, np.sort(numbers).tolist())
        self.store.restore_others(quarantined)
        return True

    def _fill_queues(self, sealed: RestoredSlots) -> None:
        """Queue the leaves; a slot's age is its row, counting from 1."""
        self.leaves.load(sealed.parent_list())
        has_child = map(self.leaves.children.__contains__, self.store.by_key)
        rows = np.flatnonzero(~np.fromiter(has_child, bool, len(sealed)))
        places = sealed.indices[rows] // self.extents.slots_per_extent
        sizes = np.array(self.extents.slot_sizes())[places]
        entries = np.column_stack((rows + 1, sealed.indices[rows], sealed.generations[rows]))
        for size in np.unique(sizes).tolist():
            lane = entries[sizes == size].tolist()
            self.leaves.load_lane(size, map(_entry, lane))
        if self.clean.enabled:
            self.clean.restore(self.leaves.children, map(_entry, entries.tolist()))
        self.extents.note_uses(sealed.indices, len(sealed))


def _entry(row: list[int]) -> tuple[int, int, int]:
    used, index, generation = row
    return used, index, generation
