"""Slots that a reader reaches without a request to the node: addresses, and a log of reads.

Called by dmp/transport/verbs/node.py and dmp/transport/verbs/link.py. This module checks addresses
against the node's geometry; the network device checks them again against the registered ranges.
Only the slot's header, read later, tells whether the slot still holds the block.

The node cannot see such reads; ReadLog collects the reads for a later report. Hence the node learns
the order of use a little late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.segment.geometry import Geometry
from tierkv.dmp.segment.segment import Stamp
from tierkv.dmp.segment.slots import SlotState, slot_bytes_for
from tierkv.dmp.wire.rdma_messages import RdmaAccept
from tierkv.kvcore import limits
from tierkv.kvcore.block import Location, RangeShape
from tierkv.kvcore.errors import BlockNotFoundError, CacheError, StaleEpochError

MAX_UNREPORTED: Final = 1_024
"""Number of distinct slots read at which the reads are reported."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Slots that were read, in order of the first read, and the total number of bytes."""

    locations: list[Location]
    read_bytes: int


class ReadLog:
    """Collects reads; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[Location, None] = {}
        self._bytes = 0

    def note(self, locations: Iterable[Location], read_bytes: int) -> bool:
        """Add reads; return True if a report is due."""
        with self._lock:
            self._touched.update(dict.fromkeys(locations))
            self._bytes += read_bytes
            return len(self._touched) >= MAX_UNREPORTED

    def take(self) -> Reads:
        """Return all collected reads, and clear the log."""
        with self._lock:
            reads = Reads(list(self._touched), self._bytes)
            self._touched, self._bytes = {}, 0
        return reads


@dataclass(frozen=True, slots=True)
class RangeSpan:
    """Offsets of one range in the segment file.

    Attributes:
        payload_at: offset of the bytes.
        checksum_at: offset of the xxh3_64.
        header_at: offset of the slot's header.
    """

    payload_at: int
    checksum_at: int
    header_at: int


def range_span(shape: Geometry, location: Location, ranges: RangeShape, index: int) -> RangeSpan:
    """Return the offsets of a range of a slot.

    Raises:
        BlockNotFoundError: the slot or the range does not exist.
    """
    _check_slot(shape, location)
    if not 0 <= index < ranges.count <= limits.MAX_LAYERS:
        raise BlockNotFoundError(f"range {index} is outside [0, {ranges.count})")
    size = slot_bytes_for(ranges.size_bytes, ranges.count)
    if (location.slot % shape.slots_per_extent + 1) * size > shape.extent_bytes:
        raise BlockNotFoundError(f"slot {location.slot} has no room for {size} bytes")
    start = shape.payload_offset(location.slot, size)
    return RangeSpan(
        payload_at=start + index * ranges.size_bytes,
        checksum_at=start + size - 8 * (ranges.count - index),
        header_at=shape.header_offset(location.slot),
    )


def ranges_in(shape: Geometry, location: Location, range_bytes: int) -> int:
    """Return how many ranges of a size a block has.

    Raises:
        BlockNotFoundError: the slot does not exist, or the block has no ranges of the given size.
    """
    _check_slot(shape, location)
    if range_bytes < 1 or location.length % range_bytes:
        raise BlockNotFoundError("a range is not as long as its destination")
    return location.length // range_bytes


def _check_slot(shape: Geometry, location: Location) -> None:
    if location.segment != 0 or not 0 <= location.slot < shape.slot_count:
        raise BlockNotFoundError(f"{location.node} has no slot {location.slot}")


def check_stamp(location: Location, stamp: Stamp, *, range_bytes: int) -> None:
    """Check, with a header read after the bytes, that the bytes belong to the block.

    A slot's generation grows before any writer may write to the slot again. So bytes that were read
    before the header belong to the header's generation.

    Raises:
        StaleEpochError: the slot was reused.
        BlockNotFoundError: the slot holds no sealed block, or a block cut into other ranges.
    """
    error: CacheError | None = None
    if stamp.generation != location.generation:
        error = StaleEpochError(f"slot {location.slot} was reused")
    elif stamp.state != SlotState.SEALED:
        error = BlockNotFoundError(f"slot {location.slot} holds no sealed block")
    elif stamp.range_bytes != range_bytes or stamp.length != location.length:
        error = BlockNotFoundError("a range is not as long as its destination")
    if error is not None:
        raise error


def remote_of(accept: RdmaAccept, at: int, size: int) -> tuple[int, int]:
    """Turn an offset in the segment file into an address and the remote key.

    Raises:
        BlockNotFoundError: the bytes are not inside one of the node's two registered ranges.
    """
    shape = accept.geometry
    if at >= 0 and size > 0 and at + size <= shape.payload_at:
        return accept.headers.address + at, accept.headers.rkey
    if shape.payload_at <= at and size > 0 and at + size <= shape.file_bytes:
        return accept.payload.address + at - shape.payload_at, accept.payload.rkey
    raise BlockNotFoundError(f"bytes [{at}, {at + size}) are outside the segment")
