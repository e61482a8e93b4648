"""Slots of a segment that another process owns, as a reader or writer of the same host sees them.

Used by dmp/transport/shm.py. Whatever a header claims, no byte outside its extent is touched; what
a header says is only believed together with the generation the caller came with.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from tierkv.dmp.pool_node import PutGrant
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.extents import slot_bytes_for
from tierkv.dmp.segment.segment import Segment, Stamp, parse_stamp
from tierkv.dmp.segment.slots import SlotState
from tierkv.kvcore import limits
from tierkv.kvcore.errors import BlockNotFoundError, CacheError, LeaseExpiredError, StaleEpochError
from tierkv.kvcore.location import Location

_WORD: Final = struct.Struct("<Q")
_SEALED: Final = int(SlotState.SEALED)
_WRITING: Final = int(SlotState.WRITING)
_slot_bytes = lru_cache(maxsize=64)(slot_bytes_for)


class MappedSlots:
    """One mapping; see dmp/segment/geometry.py for what lies where.

    Attributes:
        slot_count: slot numbers in the segment.
    """

    def __init__(self, segment: Segment) -> None:
        shape = segment.geometry
        self.slot_count = shape.slot_count
        self._memory = segment.memory
        self._headers_at = shape.headers_at
        self._payload_at = shape.payload_at
        self._extent_bytes = shape.extent_bytes
        self._per_extent = shape.slots_per_extent

    @property
    def incarnation(self) -> int:
        """Start number of the process that owns the segment now."""
        number: int = _WORD.unpack_from(self._memory, g.INCARNATION_AT)[0]
        return number

    def stamp(self, slot: int) -> Stamp:
        """Return what a slot's header says at this moment."""
        return parse_stamp(self._memory, self._headers_at + g.SLOT_HEADER_BYTES * slot)

    def sealed(self, location: Location) -> Stamp:
        """Return the header of a sealed block.

        Raises:
            StaleEpochError: the slot was used again.
            BlockNotFoundError: it is not sealed.
        """
        stamp = self.stamp(location.slot)
        if stamp.generation != location.generation or stamp.state != _SEALED:
            raise _why_not(location, stamp)
        return stamp

    def readable(self, location: Location, stamp: Stamp, index: int) -> memoryview:
        """Return the bytes of a range.

        Raises:
            BlockNotFoundError: there is no such range.
            StaleEpochError: the header is being rewritten.
        """
        if not 0 <= index < stamp.range_count <= limits.MAX_LAYERS:
            raise BlockNotFoundError(f"range {index} is outside [0, {stamp.range_count})")
        at = self._slot_at(location.slot, stamp) + index * stamp.range_bytes
        return self._memory[at : at + stamp.range_bytes]

    def payload(self, location: Location, stamp: Stamp) -> memoryview:
        """Return the bytes of a whole block.

        Raises:
            StaleEpochError: the header is being rewritten.
        """
        at = self._slot_at(location.slot, stamp)
        return self._memory[at : at + stamp.range_bytes * stamp.range_count]

    def checksum(self, location: Location, stamp: Stamp, index: int) -> int:
        """Return the stored xxh3_64 of a range that ``readable`` accepted."""
        end = self._slot_at(location.slot, stamp) + _slot_bytes(
            stamp.range_bytes, stamp.range_count
        )
        checksum: int = _WORD.unpack_from(self._memory, end - 8 * (stamp.range_count - index))[0]
        return checksum

    def writable(self, grant: PutGrant, index: int) -> memoryview:
        """Return the bytes of a range of a reserved slot.

        Raises:
            LeaseExpiredError: the reservation is gone.
            BlockNotFoundError: there is no such range, or not of that size.
        """
        location = grant.location
        stamp = self.stamp(location.slot)
        found = (stamp.state, stamp.generation, stamp.key)
        if found != (_WRITING, location.generation, grant.key):
            raise LeaseExpiredError(f"the grant for slot {location.slot} is gone")
        view = self.readable(location, stamp, index)
        if len(view) != grant.range_bytes:
            raise BlockNotFoundError("the range is not as long as the data")
        return view

    def _slot_at(self, slot: int, stamp: Stamp) -> int:
        size = _slot_bytes(stamp.range_bytes, stamp.range_count)
        extent, place = divmod(slot, self._per_extent)
        if (place + 1) * size > self._extent_bytes:
            raise StaleEpochError(f"the header of slot {slot} is being rewritten")
        return self._payload_at + extent * self._extent_bytes + place * size


def _why_not(location: Location, stamp: Stamp) -> CacheError:
    if stamp.generation != location.generation:
        return StaleEpochError(f"slot {location.slot} was reused")
    return BlockNotFoundError(f"slot {location.slot} holds no sealed block")
