"""The slots in use, by number and by block, and how a restart fills an empty table.

The bottom of the pure core, used by dmp/slots/slot_table.py and dmp/slots/eviction.py, and by the
node for questions that count no use. After a restart most slots are rows of columns
(dmp/segment/restored.py) until the first access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import ExtentTable, Slot, SlotState
from tierkv.dmp.slots.leaf_queue import CleanSlots, LeafQueue
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey


class SlotStore:
    """Slots by number, and the slot number of each block.

    Attributes:
        by_key: slot number of every block that can be found or is being written.
        counts: number of slots in each state.
        warm: slots with an object, by number. Others only look into it.
        _rows: slots that the segment held at the start; None when every slot has its object.
        _row_of: row of every slot number without an object, -1 for all others.
        _cold: number of slots without an object.
    """

    def __init__(self, extents: ExtentTable) -> None:
        self.by_key: dict[BlockKey, int] = {}
        self.counts = [0] * len(SlotState)
        self._extents = extents
        self.warm: dict[int, Slot] = {}
        self._rows: RestoredSlots | None = None
        self._row_of = np.zeros(0, np.int32)
        self._cold = 0

    def __len__(self) -> int:
        return len(self.warm) + self._cold

    def at(self, index: int) -> Slot | None:
        """Return the slot in use under a number."""
        return self.warm.get(index) or self._warmed(index)

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if its generation is still the given one."""
        slot = self.warm.get(index) or self._warmed(index)
        return slot if slot is not None and slot.generation == generation else None

    def find(self, key: BlockKey) -> Slot | None:
        """Return the slot of a block."""
        index = self.by_key.get(key)
        if index is None:
            return None
        return self.warm.get(index) or self._warmed(index)

    def peek(self, key: BlockKey) -> Slot | None:
        """Return the sealed slot of a block."""
        slot = self.find(key)
        return slot if slot is not None and slot.state is SlotState.SEALED else None

    def in_state(self, index: int, state: SlotState) -> Slot | None:
        """Return the slot under a number if the slot is in the given state."""
        slot = self.at(index)
        return slot if slot is not None and slot.state is state else None

    def sealed(self) -> list[Slot]:
        """Return all readable slots, oldest use first; O(slots)."""
        found = [slot for slot in self.all() if slot.state is SlotState.SEALED]
        return sorted(found, key=lambda slot: slot.last_used)

    def closes_a_ring(self, put: BlockSpec) -> bool:
        """Return True if a new block's ancestors on this node descend from the block; O(depth)."""
        key = put.parent
        for _ in range(len(self)):  # A segment of an older version may hold a ring.
            above = self.find(key)
            if above is None:
                return False
            key = above.block.parent
            if key == put.key:
                return True
        return True

    def add(self, slot: Slot) -> None:
        """Add a slot."""
        self.warm[slot.index] = slot
        self.counts[slot.state] += 1

    def remove(self, slot: Slot) -> None:
        """Remove a slot."""
        del self.warm[slot.index]
        self.counts[slot.state] -= 1

    def change(self, slot: Slot, state: SlotState) -> None:
        """Change the state of a slot."""
        self.counts[slot.state] -= 1
        self.counts[state] += 1
        slot.state = state

    def indices(self) -> list[int]:
        """Return the numbers of all slots in use, in no order."""
        return [*self.warm, *self._cold_indices()]

    def all(self) -> Iterator[Slot]:
        """Iterate over all slots; makes every missing slot object."""
        for index in self._cold_indices():
            self._warmed(index)
        return iter(list(self.warm.values()))

    def restore(self, rows: RestoredSlots) -> bool:
        """Fill an empty store with sealed slots as rows.

        Returns:
            False, without any change, if two slots hold the same block.
        """
        numbers: list[int] = rows.indices.tolist()
        by_key = dict(zip(rows.key_list(), numbers, strict=True))
        if len(by_key) < len(numbers):
            return False
        self.by_key = by_key
        self._rows = rows
        self._cold = len(numbers)
        self._row_of = np.full(self._extents.slot_count, -1, np.int32)
        self._row_of[rows.indices] = np.arange(len(numbers))
        self.counts[SlotState.SEALED] = len(numbers)
        return True

    def restore_others(self, slots: Iterable[Slot]) -> None:
        """Add quarantined slots; their extents must have a size already."""
        for slot in slots:
            slot.extent = self._extents.of(slot.index)
            slot.offset = self._extents.offset(slot.index, slot.extent)
            self.add(slot)

    def _warmed(self, index: int) -> Slot | None:
        """Make the object of a cold slot; the slot's age is its row, counting from 1."""
        rows = self._rows
        if rows is None or not 0 <= index < len(self._row_of):
            return None
        row = int(self._row_of[index])
        if row < 0:
            return None
        self._row_of[index] = -1
        extent = self._extents.of(index)
        slot = Slot(
            index=index,
            generation=int(rows.generations[row]),
            block=rows.block(row),
            state=SlotState.SEALED,
            extent=extent,
            offset=self._extents.offset(index, extent),
            last_used=row + 1,
        )
        self.warm[index] = slot
        self._cold -= 1
        if not self._cold:
            self._rows = None
        return slot

    def _cold_indices(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._row_of >= 0).tolist() if self._cold else []
        return found


@dataclass(frozen=True, slots=True)
class TableRestore:
    """The parts of an empty table that a restart fills; used once by the slot table."""

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
