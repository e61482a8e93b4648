"""The slots in use, by number and by block.

The bottom of the pure core, used by dmp/slots/slot_table.py and dmp/slots/evictor.py. After a
restart most slots are rows of columns (dmp/segment/restored.py) until the first access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tierkv.dmp.segment.extents import ExtentTable
from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey


class SlotStore:
    """Slots by number, and the slot number of each block.

    Attributes:
        by_key: slot number of every block that can be found or is being written.
        counts: number of slots in each state.
        _warm: slots with an object.
        _rows: slots that the segment held at the start; None when every slot has its object.
        _row_of: row of every slot number without an object, -1 for all others.
        _cold: number of slots without an object.
    """

    def __init__(self, extents: ExtentTable) -> None:
        self.by_key: dict[BlockKey, int] = {}
        self.counts = [0] * len(SlotState)
        self._extents = extents
        self._warm: dict[int, Slot] = {}
        self._rows: RestoredSlots | None = None
        self._row_of = np.zeros(0, np.int32)
        self._cold = 0

    def __len__(self) -> int:
        return len(self._warm) + self._cold

    def at(self, index: int) -> Slot | None:
        """Return the slot in use under a number."""
        return self._warm.get(index) or self._warmed(index)

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if its generation is still the given one."""
        slot = self._warm.get(index) or self._warmed(index)
        return slot if slot is not None and slot.generation == generation else None

    def find(self, key: BlockKey) -> Slot | None:
        """Return the slot of a block."""
        index = self.by_key.get(key)
        if index is None:
            return None
        return self._warm.get(index) or self._warmed(index)

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
        self._warm[slot.index] = slot
        self.counts[slot.state] += 1

    def remove(self, slot: Slot) -> None:
        """Remove a slot."""
        del self._warm[slot.index]
        self.counts[slot.state] -= 1

    def change(self, slot: Slot, state: SlotState) -> None:
        """Change the state of a slot."""
        self.counts[slot.state] -= 1
        self.counts[state] += 1
        slot.state = state

    def indices(self) -> list[int]:
        """Return the numbers of all slots in use, in no order."""
        return [*self._warm, *self._cold_indices()]

    def all(self) -> Iterator[Slot]:
        """Iterate over all slots; makes every missing slot object."""
        for index in self._cold_indices():
            self._warmed(index)
        return iter(list(self._warm.values()))

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
        self._warm[index] = slot
        self._cold -= 1
        if not self._cold:
            self._rows = None
        return slot

    def _cold_indices(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._row_of >= 0).tolist() if self._cold else []
        return found
