"""The slots of a segment and their states, and the extents that the segment is cut into.

The values and the lower half of the pure core: decided by dmp/slots/slot_table.py and its helpers,
written down by dmp/segment/segment.py, read by transports. Each extent has slots of one size; it is
assigned on demand and given back. Sizes are exact (a multiple of a page) instead of powers of two:
a model has a single block size and a node serves few models, so rounding up would only waste
memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np

from tierkv.dmp.config import MIN_SLOT_BYTES, SLOT_ALIGN
from tierkv.kvcore.block import BlockSpec
from tierkv.policies.eviction import NO_FACTS, BlockFacts


def slot_bytes_for(range_bytes: int, range_count: int) -> int:
    """Return the slot size of a block: payload and a checksum per range, rounded up to pages."""
    need = range_bytes * range_count + 8 * range_count
    return max(MIN_SLOT_BYTES, -(-need // SLOT_ALIGN) * SLOT_ALIGN)


@dataclass(slots=True, eq=False)
class Extent:
    """A part of the segment, cut into slots of equal size.

    Attributes:
        index: place in the segment.
        slot_bytes: size of the slots; 0 while unassigned.
        free: free slot numbers.
        live: slot numbers in use; an extent without live slots is given back.
        last_used: most recent use of any slot of the extent.
    """

    index: int
    slot_bytes: int = 0
    free: list[int] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    last_used: int = 0


class ExtentTable:
    """The extents of one segment; slot numbers are ``extent * slots_per_extent + place``.

    Attributes:
        extent_bytes: size of every extent, and thus of the largest slot.
        slots_per_extent: number of slot numbers reserved for each extent.
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
        """Return the extent of a slot number."""
        return self._extents[slot // self.slots_per_extent]

    def slot_sizes(self) -> list[int]:
        """Return the slot size of every extent, 0 for an unassigned extent."""
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
        """Number of slot numbers, whatever the sizes."""
        return len(self._extents) * self.slots_per_extent

    @property
    def slots_total(self) -> int:
        """Number of slots in the assigned extents."""
        return sum(len(e.free) + len(e.live) for e in self._extents)

    def sizes(self) -> list[int]:
        """Return the slot sizes in use."""
        return list(self._assigned)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all extents."""
        return len(self._extents) * self.extent_bytes

    def upcoming(self, count: int) -> list[int]:
        """Return up to ``count`` of the next extents to be assigned, in order."""
        return self._unassigned[: -count - 1 : -1]

    def take(self, size: int) -> int | None:
        """Take a free slot of a size, assigning an extent if needed; None if there is no room."""
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
        """Free a slot; freeing the last slot frees the extent."""
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
        """Mark slots of an empty table as in use.

        Args:
            sizes: slot size of every extent.
            slots: slot numbers in use, ascending.
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

        O(extents log extents) if other sizes exist.
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
        """Assert that free slots and ``live`` used slots make up every extent; O(slots)."""
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


_NOWHERE: Final = Extent(-1)


class SlotState(IntEnum):
    """State of a slot's bytes; the numbers are stored in the segment."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


@dataclass(slots=True, eq=False)
class Slot:
    """A slot in use; mutated only by SlotTable and its helpers.

    Attributes:
        index: slot number in the segment.
        generation: number of this use of the slot; never repeats in a segment's life.
        block: block in the slot.
        state: never FREE; free slots have no Slot.
        extent: extent of the slot, which determines the slot size.
        offset: where the payload begins, counted from the first extent.
        deadline: when a WRITING slot expires.
        pins: number of running transfers that touch the bytes; a pinned slot is not reused.
        holders: number of holds per owner ("" for no owner); valid until ``hold_deadline``.
        hold_deadline: the latest deadline of the holds.
        last_used: position in the order of uses.
        doomed: expired or aborted while pinned; freed with the last pin.
        owner: client that reserved the slot, while the slot is WRITING.
        clean: a copy rests in the lower tier, so eviction loses nothing.
        leased: a lease keeps the slot from eviction.
        known: the eviction policy of the slot size knows the slot. True for all sealed blocks,
            except for blocks found at a restart until their first use.
        offered: the policy may name the slot as the next victim.
        used_at: time of the last use reported to the policy.
        facts: facts reported to the policy; NO_FACTS for a block found at a restart.
        spare: clean, and not used since the copy was made: among the next victims.
        account: number of the namespace's account (dmp/slots/accounts.py).
    """

    index: int
    generation: int
    block: BlockSpec
    state: SlotState
    extent: Extent = _NOWHERE
    offset: int = 0
    deadline: float = 0.0
    pins: int = 0
    holders: dict[str, int] = field(default_factory=dict)
    hold_deadline: float = 0.0
    last_used: int = 0
    doomed: bool = False
    owner: str = ""
    clean: bool = False
    spare: bool = False
    leased: bool = False
    known: bool = False
    offered: bool = False
    used_at: float = 0.0
    facts: BlockFacts = NO_FACTS
    account: int = 0

    @property
    def lane(self) -> int:
        """Slot size and account in one number: blocks of a lane are ranked together."""
        return self.extent.slot_bytes + self.account

    @property
    def length(self) -> int:
        """Payload bytes."""
        ranges = self.block.ranges
        return ranges.size_bytes * ranges.count


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decision: clear ``victims``, note the extent's size, then let ``slot`` be written."""

    slot: Slot
    victims: tuple[Slot, ...]
