"""Contents of a segment after a restart: one vectorised pass over the slot headers.

Called by dmp/node/state.py. A header counts if the check number is right, the slot was sealed (or
quarantined), and the slot lies inside the extent. The scan drops all other headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.dmp.config import MIN_SLOT_BYTES, SLOT_ALIGN
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.restored import Column, RestoredSlots
from tierkv.dmp.segment.segment import Segment
from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.kvcore import limits

_CHUNK: Final = 4096
"""Headers checked at a time: 1.5 MiB, which stays in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentScan:
    """Contents of an attached segment.

    Attributes:
        extent_sizes: slot size of every extent, 0 for an extent that was never assigned.
        sealed: readable slots, oldest seal first.
        quarantined: slots with bad bytes.
        dropped: slot numbers that were half-written or have a damaged header.
        last_order: highest order of sealing.
        generation: highest generation that may have been given out.
    """

    extent_sizes: list[int]
    sealed: RestoredSlots
    quarantined: list[Slot]
    dropped: list[int]
    last_order: int
    generation: int


def scan_segment(segment: Segment) -> SegmentScan:
    """Read all slot headers in use; O(slots), 100 000 in about 50 ms."""
    rows, sizes = segment.header_rows(), segment.extent_sizes()
    used = _used_slots(rows, sizes, segment.geometry)
    sealed, quarantined = [RestoredSlots.of(used[:0], rows[:0])], list[Slot]()
    dropped: list[int] = []
    for start in range(0, len(used), _CHUNK):
        numbers = used[start : start + _CHUNK]
        some = rows[numbers]
        sound = _are_sound(some, numbers, sizes, segment.geometry)
        good = sound & (some["state"] == SlotState.SEALED)
        sealed.append(_columns(numbers, some, good))
        if not good.all():
            quarantined += _quarantined(numbers, some, sound & ~good)
            dropped += numbers[~sound].tolist()
    restored = RestoredSlots.joined(sealed)
    return SegmentScan(
        extent_sizes=sizes.tolist(),
        sealed=restored,
        quarantined=quarantined,
        dropped=dropped,
        last_order=int(restored.orders.max(initial=0)),
        generation=_highest_generation(segment, rows, restored),
    )


def _columns(numbers: Column, some: Column, good: Column) -> RestoredSlots:
    if good.all():
        return RestoredSlots.of(numbers, some)
    return RestoredSlots.of(numbers[good], some[good])


def _used_slots(rows: Column, sizes: Column, geometry: Geometry) -> Column:
    """Return the numbers of slots that are not free, ascending.

    An extent has fewer slots than reserved slot numbers, so most headers need no check.
    """
    sane = (sizes >= MIN_SLOT_BYTES) & (sizes <= geometry.extent_bytes) & (sizes % SLOT_ALIGN == 0)
    found = [np.zeros(0, np.int64)]
    for size in np.unique(sizes[sane]).tolist():
        extents = np.flatnonzero(sizes == size)
        places = np.arange(geometry.extent_bytes // size)
        numbers = (extents[:, None] * geometry.slots_per_extent + places).ravel()
        found.append(numbers[rows["state"][numbers] != SlotState.FREE])
    return found[-1] if len(found) == 2 else np.sort(np.concatenate(found))


def _are_sound(some: Column, numbers: Column, sizes: Column, geometry: Geometry) -> Column:
    """Mark the used slots that can be kept: finished, undamaged and of their extent's size."""
    lanes = some.view(np.uint64).reshape(-1, g.LANES)
    intact = g.header_checks(lanes, numbers) == some["check"]
    known = (some["magic"] == g.SLOT_MAGIC) & (some["layout_version"] == g.LAYOUT_VERSION)
    ended = (some["state"] == SlotState.SEALED) | (some["state"] == SlotState.QUARANTINED)
    size, count = some["range_bytes"], some["range_count"].astype(np.uint64)
    bounded = (size >= 1) & (size <= geometry.extent_bytes)
    bounded &= (count >= 1) & (count <= limits.MAX_LAYERS)
    bounded &= some["sealed_order"] < g.MAX_COUNTER
    bounded &= (some["generation"] >= 1) & (some["generation"] < g.MAX_COUNTER)
    need = -(-(size * count + 8 * count) // SLOT_ALIGN) * SLOT_ALIGN
    fits = np.maximum(need, MIN_SLOT_BYTES) == sizes[numbers // geometry.slots_per_extent]
    exact = some["length"] == size * count
    sound: Column = intact & known & ended & bounded & fits & exact
    return sound


def _quarantined(numbers: Column, some: Column, bad: Column) -> list[Slot]:
    columns = RestoredSlots.of(numbers[bad], some[bad])
    return [
        Slot(int(index), int(columns.generations[row]), columns.block(row), SlotState.QUARANTINED)
        for row, index in enumerate(columns.indices)
    ]


def _highest_generation(segment: Segment, rows: Column, kept: RestoredSlots) -> int:
    """Return an upper bound of the generations of all references."""
    if segment.generation == 0:  # In files of the first versions, slots count their own.
        claimed = rows["generation"]
        return int(claimed[claimed < g.MAX_COUNTER].max(initial=1))
    return max(segment.generation, int(kept.generations.max(initial=1)))
