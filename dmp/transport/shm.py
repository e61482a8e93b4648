"""A DMP node of the same host: bytes through the mapped segment, control over TCP (tier L2).

Implements tierkv.dmp.pool_node.PoolNode. No lock is held while bytes are copied: a reader compares
state, generation and key before and after the copy, and verifies the checksum. Reads continue while
the node's process is down; the node's next incarnation makes old references stale.

Whatever a header claims, no byte outside the extent is touched. A header counts only together with
the generation in the caller's reference.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import xxhash

from tierkv.dmp.pool_node import (
    PathInfo,
    PoolNodeStats,
    PutGrant,
    RangeRead,
    RangeWrite,
    put_in_steps,
)
from tierkv.dmp.segment import geometry as g
from tierkv.dmp.segment.segment import Segment, Stamp, map_segment, parse_stamp
from tierkv.dmp.segment.slots import SlotState, slot_bytes_for
from tierkv.dmp.transport.connection import Peer
from tierkv.dmp.transport.inproc import copy_bytes
from tierkv.dmp.transport.pending import as_bytes
from tierkv.dmp.transport.tcp import TcpPoolNode
from tierkv.dmp.wire.messages import RangeRef
from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    ConfigError,
    LeaseExpiredError,
    StaleEpochError,
    TransportError,
)
from tierkv.kvcore.ids import HostId

_Item = TypeVar("_Item")
_WORD: Final = struct.Struct("<Q")
_SEALED: Final = int(SlotState.SEALED)
_WRITING: Final = int(SlotState.WRITING)
_slot_bytes = lru_cache(maxsize=64)(slot_bytes_for)


class MappedSlots:
    """One mapping; dmp/segment/geometry.py describes the layout.

    Attributes:
        slot_count: number of slot numbers in the segment.
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
        """Return the current contents of a slot's header."""
        return parse_stamp(self._memory, self._headers_at + g.SLOT_HEADER_BYTES * slot)

    def sealed(self, location: Location) -> Stamp:
        """Return the header of a sealed block.

        Raises:
            StaleEpochError: the slot was reused.
            BlockNotFoundError: the slot is not sealed.
        """
        stamp = self.stamp(location.slot)
        if stamp.generation != location.generation or stamp.state != _SEALED:
            raise _why_not(location, stamp)
        return stamp

    def readable(self, location: Location, stamp: Stamp, index: int) -> memoryview:
        """Return the bytes of a range.

        Raises:
            BlockNotFoundError: the range does not exist.
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

    def run(self, location: Location, stamp: Stamp, ranges: range) -> memoryview:
        """Return the bytes of ranges that lie behind each other.

        Raises:
            BlockNotFoundError: a range does not exist.
            StaleEpochError: the header is being rewritten.
        """
        if ranges.stop > stamp.range_count:
            raise BlockNotFoundError(f"{ranges} is outside [0, {stamp.range_count})")
        at = self._slot_at(location.slot, stamp)
        size = stamp.range_bytes
        return self._memory[at + ranges.start * size : at + ranges.stop * size]

    def extent(self, location: Location) -> memoryview:
        """Return the memory of the extent of a slot."""
        at = self._payload_at + location.slot // self._per_extent * self._extent_bytes
        return self._memory[at : at + self._extent_bytes]

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
            BlockNotFoundError: the range does not exist or has another size.
        """
        location = grant.location
        stamp = self.stamp(location.slot)
        found = (stamp.state, stamp.generation, stamp.key)
        if found != (_WRITING, location.generation, grant.block.key):
            raise LeaseExpiredError(f"the grant for slot {location.slot} is gone")
        view = self.readable(location, stamp, index)
        if len(view) != grant.block.ranges.size_bytes:
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


_MAX_UNREPORTED: Final = 1_024
"""Number of distinct slots read at which the reads are reported; the node learns the order of use a
little late."""

_SMALL_PUT_BYTES: Final = 128 << 10
"""Up to this size, one round trip that carries the bytes is faster than two round trips and a copy
(measured)."""


_HALVED_BYTES: Final = 8 << 20
"""From this size on, two threads copy and hash: 6.9 instead of 4.3 GB/s on 16 cores; more threads
were slower, because the ranges are short and the threads share an interpreter."""

_HALVED_CORES: Final = 8
"""With fewer cores, the second thread would take a core from the computation."""


def in_halves(work: Callable[[Sequence[_Item]], None], items: Sequence[_Item], size: int) -> None:
    """Do work on items, half of them in a second thread if they are large.

    Returns or raises only after all work has ended.
    """
    if size < _HALVED_BYTES or len(items) < 2 or (os.cpu_count() or 1) < _HALVED_CORES:
        work(items)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="dmp-copy") as second:
        rest = second.submit(work, items[1::2])
        work(items[::2])
    rest.result()


class ShmPoolNode(TcpPoolNode):
    """PoolNode over a mapped segment; control messages and small puts use TCP."""

    def __init__(self, peer: Peer, segment_path: Path, *, host: HostId) -> None:
        """Map the segment; no connection is made yet.

        Raises:
            ConfigError: the file is not a segment of this version.
        """
        super().__init__(peer, host=host)
        self._node_id = peer.node_id
        self._segment_path = segment_path
        self._segment: Segment = map_segment(segment_path)
        self._segment.backing.start(owns=False)
        self._former: list[Segment] = []
        self._slots = MappedSlots(self._segment)
        self._life = self._slots.incarnation
        self._lock = threading.Lock()
        self._touched: dict[int, Location] = {}
        self._touched_bytes = 0
        self._closed = False

    @property
    def path(self) -> PathInfo:
        return PathInfo("shm", "same host")

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        # Report reads first, because the reservation may evict blocks.
        self._report_touched()
        grants = super().reserve(puts, deadline_s=deadline_s)
        self._prepare([grant.location for grant in grants if grant is not None])
        return grants

    def _prepare(self, locations: Sequence[Location]) -> None:
        """Populate in the background the extents of slots, and later extents with memory."""
        if locations:
            per_extent = self._segment.geometry.slots_per_extent
            self._segment.backing.prepare({place.slot // per_extent for place in locations})

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        self.pending.check(writes)
        in_halves(self._write, writes, sum(write.data.nbytes for write in writes))

    def _write(self, writes: Sequence[RangeWrite]) -> None:
        for write in writes:
            slots = self._slots_of(write.grant.location)
            copy_bytes(slots.writable(write.grant, write.index), as_bytes(write.data))
        self.pending.written(writes)

    def put(
        self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        if sum(payload.nbytes for payload in payloads) <= _SMALL_PUT_BYTES:
            self._report_touched()
            return super().put(puts, payloads)
        return put_in_steps(self, puts, payloads)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        size = sum(read.destination.nbytes for read in reads)
        in_halves(self._read_all, reads, size)
        self._touch([read.location for read in reads], size)

    def _read_all(self, reads: Sequence[RangeRead]) -> None:
        for read in reads:
            self._read(read)

    def _read(self, read: RangeRead) -> None:
        location = read.location
        slots = self._slots_of(location)
        before = slots.sealed(location)
        view = slots.readable(location, before, read.index)
        destination = as_bytes(read.destination)
        if len(view) != len(destination):
            raise BlockNotFoundError("the range is not as long as its destination")
        expected = slots.checksum(location, before, read.index)
        copy_bytes(destination, view)
        if slots.stamp(location.slot) != before:
            raise StaleEpochError(f"slot {location.slot} was reused while it was read")
        if xxhash.xxh3_64_intdigest(destination) != expected:
            self._refuse(location, before, read.index)

    def view(self, location: Location, index: int, *, verify: bool = False) -> memoryview:
        """Return one range in place, read-only: no copy and no round trip.

        The caller must hold the block (``hold``) while using the view: after an eviction the memory
        is reused, and only a hold prevents eviction.

        Args:
            location: slot of the block.
            index: number of the range.
            verify: compare the checksum too, which reads every byte once.

        Raises:
            CacheError: as ``read_ranges``.
        """
        slots = self._slots_of(location)
        before = slots.sealed(location)
        view = slots.readable(location, before, index)
        if verify and xxhash.xxh3_64_intdigest(view) != slots.checksum(location, before, index):
            self._refuse(location, before, index)
        self._touch((location,), len(view))
        return view.toreadonly()

    def view_block(self, location: Location) -> memoryview:
        """Return a whole block in place, as ``view`` does for a range."""
        slots = self._slots_of(location)
        view = slots.payload(location, slots.sealed(location))
        self._touch((location,), len(view))
        return view.toreadonly()

    def extent(self, location: Location) -> memoryview:
        """Return the mapped extent of a block, to register with a device.

        Raises:
            CacheError: as ``read_ranges``.
        """
        return self._slots_of(location).extent(location)

    def run(self, location: Location, ranges: range) -> memoryview:
        """Return ranges of a held block in place, as ``view`` does, without verifying them."""
        slots = self._slots_of(location)
        return slots.run(location, slots.sealed(location), ranges)

    def verify(self, locations: Sequence[Location], ranges: range) -> None:
        """Compare the checksums of ranges of held blocks; reads every byte once.

        Raises:
            CacheError: as ``read_ranges``.
        """
        size = 0
        for location in locations:
            slots = self._slots_of(location)
            stamp = slots.sealed(location)
            run = slots.run(location, stamp, ranges)
            for place, index in enumerate(ranges):
                found = xxhash.xxh3_64_intdigest(
                    run[place * stamp.range_bytes : (place + 1) * stamp.range_bytes]
                )
                if found != slots.checksum(location, stamp, index):
                    self._refuse(location, stamp, index)
            if slots.stamp(location.slot) != stamp:
                raise StaleEpochError(f"slot {location.slot} was reused while it was read")
            size += len(run)
        self._touch(locations, size)

    def _refuse(self, location: Location, stamp: Stamp, index: int) -> NoReturn:
        """Raise the error behind a wrong checksum."""
        if self._slots_of(location).stamp(location.slot) != stamp:
            raise StaleEpochError(f"slot {location.slot} was reused while it was read")
        self.suspect([RangeRef(location, index)])
        raise ChecksumError(f"range {index} of slot {location.slot} has a wrong checksum")

    def stats(self) -> PoolNodeStats:
        self._report_touched()
        return super().stats()

    def close(self) -> None:
        self._closed = True
        self._segment.backing.close()
        self._former.clear()
        super().close()

    def _touch(self, locations: Sequence[Location], size: int) -> None:
        with self._lock:
            for location in locations:
                self._touched[location.slot] = location
            self._touched_bytes += size
            many = len(self._touched) >= _MAX_UNREPORTED
        if many:
            with contextlib.suppress(TransportError):  # The read itself succeeded.
                self._report_touched()

    def _report_touched(self) -> None:
        if not self._touched:
            return
        with self._lock:
            touched, self._touched = list(self._touched.values()), {}
            size, self._touched_bytes = self._touched_bytes, 0
        self._prepare(touched)
        self.touch(touched, read_bytes=size)

    def _slots_of(self, location: Location) -> MappedSlots:
        """Return the mapping of the location's incarnation; map again if the node restarted."""
        if self._closed:
            raise TransportError(f"the connection to {self.node_id} is closed")
        if location.node != self._node_id:
            self.mine(location)
        slots = self._slots
        if not self._life == slots.incarnation == location.incarnation:
            slots = self._map_again()
            if slots.incarnation != location.incarnation:
                raise StaleEpochError(
                    f"{self.node_id} is in incarnation {slots.incarnation}, not "
                    f"{location.incarnation}"
                )
        if location.segment != 0 or not 0 <= location.slot < slots.slot_count:
            raise BlockNotFoundError(f"{self.node_id} has no slot {location.slot}")
        return slots

    def _map_again(self) -> MappedSlots:
        try:
            segment = map_segment(self._segment_path)
            if segment.incarnation != self._life or segment.inode != self._segment.inode:
                # A device may have pinned pages of the old mapping that the file does not have any
                # more. The old mapping stays, so that no other mapping gets the same address
                # meanwhile.
                self._segment.backing.close()
                self._former.append(self._segment)
                self._segment = segment
                self._segment.backing.start(owns=False)
                self._slots = MappedSlots(segment)
                self._life = segment.incarnation
        except (OSError, ConfigError) as error:
            raise TransportError(
                f"segment {self._segment_path} can't be mapped: {error}"
            ) from error
        return self._slots
