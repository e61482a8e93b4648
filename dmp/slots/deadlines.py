"""When reservations and holds of slots end by themselves.

A part of the pure core, used by dmp/slots/slot_table.py. Entries are not moved when a deadline
changes: those that count no more are passed over, and dropped when they outnumber the slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState

_SPARE_DEADLINES: Final = 1_024


class Deadlines:
    """Slots to look at, by the time to do so.

    Attributes:
        _slot_of: answers the slot of a number and generation, None when it is another by now.
    """

    def __init__(self, slot_of: Callable[[int, int], Slot | None]) -> None:
        self._slot_of = slot_of
        self._entries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, slot: Slot, deadline: float, *, slots: int) -> None:
        """Have ``due`` name a slot; ``slots`` is how many are in use."""
        heapq.heappush(self._entries, (deadline, slot.index, slot.generation))
        if len(self._entries) > 2 * slots + _SPARE_DEADLINES:
            self._entries = [entry for entry in set(self._entries) if self._counts(*entry)]
            heapq.heapify(self._entries)

    def due(self, now: float) -> Iterator[Slot]:
        """Name the slots whose time has come; one that was given more time is named as well."""
        while self._entries and self._entries[0][0] <= now:
            _, index, generation = heapq.heappop(self._entries)
            slot = self._slot_of(index, generation)
            if slot is not None:
                yield slot

    def _counts(self, deadline: float, index: int, generation: int) -> bool:
        slot = self._slot_of(index, generation)
        if slot is None:
            return False
        if slot.state is SlotState.WRITING:
            return deadline == slot.deadline
        return bool(slot.holders) and deadline == slot.hold_deadline
