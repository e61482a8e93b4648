"""How a segment is cut: extents of one slot size each, assigned on demand and given back.

The lower half of the pure core; called only by dmp/segment/slots.py. Sizes are exact (a multiple of
a page), because a model has one block size and a node serves few models, so nothing is lost to
rounding up to powers of two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.dmp.config import MIN_SLOT_BYTES, SLOT_ALIGN


def slot_bytes_for(range_bytes: int, range_count: int) -> int:
    """Return the slot size of a block: payload, one checksum per range, rounded up to pages."""
    need = range_bytes * range_count + 8 * range_count
    return max(MIN_SLOT_BYTES, -(-need // SLOT_ALIGN) * SLOT_ALIGN)


@dataclass(slots=True, eq=False)
class Extent:
    """A stretch of the segment cut into slots of one size.

    Attributes:
        index: its place in the segment.
        slot_bytes: size of its slots; 0 while unassigned.
        free: slot numbers nobody uses.
        live: slot numbers in use; an extent without any is given back.
        last_used: the youngest use of any of its slots.
    """

    index: int
    slot_bytes: int = 0
    free: list[int] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    last_used: int = 0


class ExtentTable:
    """The extents of one segment; slot numbers are ``extent * slots_per_extent + place``.

    Attributes:
        extent_bytes: size of every extent, and so the largest slot.
        slots_per_extent: slot numbers set aside for each extent.
        used_bytes: sum of the sizes of slots in use.
    """

    def __init__(self, *, extent_count: int, extent_bytes: int, slots_per_extent: int) -> None:
        self.extent_bytes = extent_bytes
        self.slots_per_extent = slots_per_extent
        self.used_bytes = 0
        self._extents = [Extent(i) for i in range(extent_count)]
        self._unassigned = list(reversed(range(extent_count)))
        self._roomy: dict[int, dict[int, None]] = {}
        self._assigned: dict[int, int] = {}

    def of(self, slot: int) -> Extent:
        """Return the extent a slot number lies in."""
        return self._extents[slot // self.slots_per_extent]

    def slot_sizes(self) -> list[int]:
        """Return the slot size of every extent, 0 where none is assigned."""
        return [extent.slot_bytes for extent in self._extents]

    def note_uses(self, slots: np.ndarray[Any, Any], last: int) -> None:
        """Set the extents' last uses after a restart; ``slots`` are ordered by age, up to last."""
        youngest = np.zeros(len(self._extents), int)
        first = last - len(slots) + 1
        youngest[slots // self.slots_per_extent] = np.arange(first, last + 1)
        for extent, used in zip(self._extents, youngest.tolist(), strict=True):
            extent.last_used = used

    @property
    def slot_count(self) -> int:
        """Slot numbers there are, whatever the sizes."""
        return len(self._extents) * self.slots_per_extent

    @property
    def slots_total(self) -> int:
        """Slots in the extents that have a size now."""
        return sum(len(e.free) + len(e.live) for e in self._extents)

    def upcoming(self, count: int) -> list[int]:
        """Return up to ``count`` extents that are assigned next, the first one first."""
        return self._unassigned[: -count - 1 : -1]

    def take(self, size: int) -> int | None:
        """Take a free slot of that size, assigning an extent if needed; None when there is none."""
        if size > self.extent_bytes:
            return None
        if not self._roomy.get(size):
            if not self._unassigned:
                return None
            self._assign(self._extents[self._unassigned.pop()], size)
        extent = self._extents[next(iter(self._roomy[size]))]
        slot = extent.free.pop()
        extent.live.add(slot)
        self.used_bytes += size
        if not extent.free:
            del self._roomy[size][extent.index]
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot, and its extent with the last one."""
        extent = self.of(slot)
        size = extent.slot_bytes
        extent.live.remove(slot)
        extent.free.append(slot)
        self.used_bytes -= size
        self._roomy[size][extent.index] = None
        if not extent.live:
            del self._roomy[size][extent.index]
            self._assigned[size] -= 1
            if not self._assigned[size]:
                del self._assigned[size]
            extent.slot_bytes = 0
            extent.free = []
            self._unassigned.append(extent.index)

    def adopt(self, sizes: Sequence[int], slots: Sequence[int]) -> None:
        """Mark slots of an empty table as in use; ``sizes`` are the extents' slot sizes.

        Args:
            sizes: of every extent.
            slots: numbers in use, ascending.
        """
        start = 0
        taken: set[int] = set()
        while start < len(slots):
            extent = self.of(slots[start])
            end = bisect_left(slots, (extent.index + 1) * self.slots_per_extent, start)
            self._adopt(extent, sizes[extent.index], slots[start:end])
            taken.add(extent.index)
            start = end
        self._unassigned = [e.index for e in reversed(self._extents) if e.index not in taken]

    def _adopt(self, extent: Extent, size: int, slots: Sequence[int]) -> None:
        extent.slot_bytes = size
        self._assigned[size] = self._assigned.get(size, 0) + 1
        extent.live = set(slots)
        self.used_bytes += size * len(slots)
        numbers = self._numbers(extent)
        roomy = self._roomy.setdefault(size, {})
        if len(slots) < len(numbers):
            extent.free = [slot for slot in reversed(numbers) if slot not in extent.live]
            roomy[extent.index] = None

    def coldest_of_other_sizes(self, size: int) -> list[Extent]:
        """Return assigned extents of other sizes, longest unused first.

        O(extents log extents) when there are any.
        """
        if size in self._assigned and len(self._assigned) == 1:
            return []
        others = [e for e in self._extents if e.live and e.slot_bytes != size]
        return sorted(others, key=lambda e: e.last_used)

    def _assign(self, extent: Extent, size: int) -> None:
        extent.slot_bytes = size
        self._assigned[size] = self._assigned.get(size, 0) + 1
        extent.free = list(reversed(self._numbers(extent)))
        self._roomy.setdefault(size, {})[extent.index] = None

    def offset(self, slot: int, extent: Extent) -> int:
        """Return where a slot begins, counted from the first extent."""
        place = slot % self.slots_per_extent
        return extent.index * self.extent_bytes + place * extent.slot_bytes

    def _numbers(self, extent: Extent) -> range:
        first = extent.index * self.slots_per_extent
        return range(first, first + self.extent_bytes // extent.slot_bytes)

    def check_invariants(self, live: int) -> None:
        """Assert that free and used slots (``live`` of these) make up every extent; O(slots)."""
        used = 0
        sizes = [extent.slot_bytes for extent in self._extents if extent.slot_bytes]
        assert self._assigned == {size: sizes.count(size) for size in sizes}
        assert live == sum(len(extent.live) for extent in self._extents)
        for extent in self._extents:
            assert (extent.slot_bytes == 0) == (not extent.live), extent
            assert (extent.index in self._unassigned) == (not extent.live), extent
            if extent.live:
                both = sorted([*extent.free, *extent.live])
                assert both == list(self._numbers(extent)), extent
                assert (extent.index in self._roomy[extent.slot_bytes]) == bool(extent.free)
            used += extent.slot_bytes * len(extent.live)
        assert used == self.used_bytes, (used, self.used_bytes)
