"""The slots in use, by number and by block.

The bottom of the pure core, used by dmp/slot_table.py and dmp/evictor.py. After a restart most
slots are rows of columns (dmp/restored.py) until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dmp.extents import ExtentTable
from dmp.restored import RestoredSlots
from dmp.slots import Slot, SlotState
from kvcore.ids import BlockKey


class SlotStore:
    """Slots by number, and the number of each block's slot.

    Attributes:
        by_key: slot number of every block that can be found or is being written.
        counts: slots in each state.
        _warm: slots with an object.
        _cold: row in ``_rows`` of every slot without one.
        _rows: what the segment held at the start.
    """

    def __init__(self, extents: ExtentTable) -> None:
        self.by_key: dict[BlockKey, int] = {}
        self.counts = [0] * len(SlotState)
        self._extents = extents
        self._warm: dict[int, Slot] = {}
        self._cold: dict[int, int] = {}
        self._rows: RestoredSlots | None = None

    def __len__(self) -> int:
        return len(self._warm) + len(self._cold)

    def at(self, index: int) -> Slot | None:
        """Return the slot in use under a number."""
        return self._warm.get(index) or self._warmed(index)

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if it still is in that generation."""
        slot = self._warm.get(index) or self._warmed(index)
        return slot if slot is not None and slot.generation == generation else None

    def find(self, key: BlockKey) -> Slot | None:
        """Return the slot of a block."""
        index = self.by_key.get(key)
        if index is None:
            return None
        return self._warm.get(index) or self._warmed(index)

    def add(self, slot: Slot) -> None:
        """Take a slot in."""
        self._warm[slot.index] = slot
        self.counts[slot.state] += 1

    def remove(self, slot: Slot) -> None:
        """Take a slot out."""
        del self._warm[slot.index]
        self.counts[slot.state] -= 1

    def change(self, slot: Slot, state: SlotState) -> None:
        """Give a slot another state."""
        self.counts[slot.state] -= 1
        self.counts[state] += 1
        slot.state = state

    def indices(self) -> list[int]:
        """Return the numbers of all slots in use; no order."""
        return [*self._warm, *self._cold]

    def all(self) -> Iterator[Slot]:
        """Go through all slots; makes every object."""
        for index in list(self._cold):
            self._warmed(index)
        return iter(list(self._warm.values()))

    def restore(self, rows: RestoredSlots, others: Iterable[Slot]) -> None:
        """Fill an empty store: sealed slots as rows without second copies, others as objects."""
        numbers: Sequence[int] = rows.indices.tolist()
        self._rows = rows
        self._cold = dict(zip(numbers, range(len(numbers)), strict=True))
        self.by_key = dict(zip(rows.keys, numbers, strict=True))
        self.counts[SlotState.SEALED] = len(numbers)
        for slot in others:
            slot.extent = self._extents.of(slot.index)
            slot.offset = self._extents.offset(slot.index, slot.extent)
            self.add(slot)

    def _warmed(self, index: int) -> Slot | None:
        """Make the object of a cold slot; its age is its row, counting from 1."""
        row = self._cold.pop(index, None)
        if row is None:
            return None
        assert self._rows is not None, "a cold slot has a row"
        extent = self._extents.of(index)
        slot = Slot(
            index=index,
            generation=int(self._rows.generations[row]),
            put=self._rows.put(row),
            state=SlotState.SEALED,
            extent=extent,
            offset=self._extents.offset(index, extent),
            last_used=row + 1,
        )
        self._warm[index] = slot
        if not self._cold:
            self._rows = None
        return slot
