"""A DMP node of the same host: bytes through the mapped segment, control over TCP (tier L2).

Implements dmp.pool_node.PoolNode. Nothing is locked while bytes are copied: a reader compares
state, generation and key before and after, and verifies the checksum. Reads go on while the node's
process is away; its next incarnation makes old references stale.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from dmp.extents import slot_bytes_for
from dmp.messages import RangeRef
from dmp.pool_node import (
    PathInfo,
    PoolNode,
    PoolNodeStats,
    PutGrant,
    PutRequest,
    RangeRead,
    RangeWrite,
)
from dmp.segment import Segment, Stamp, map_segment
from dmp.slots import SlotState
from dmp.transport.inproc import copy_bytes
from dmp.transport.pending import as_bytes
from dmp.transport.tcp import TcpPoolNode
from kvcore import limits
from kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    ConfigError,
    LeaseExpiredError,
    StaleEpochError,
    TransportError,
)
from kvcore.ids import BlockKey, HostId, NodeId
from kvcore.location import Location

_MAX_UNREPORTED: Final = 1_024
"""Distinct slots read before the node is told; their order of use is a little late."""


class ShmPoolNode(PoolNode):
    """PoolNode over a mapped segment."""

    def __init__(self, control: TcpPoolNode, segment_path: Path) -> None:
        self._control = control
        self._path = segment_path
        self._segment: Segment = map_segment(segment_path)
        self._segment.populate()
        self._lock = threading.Lock()
        self._touched: dict[Location, None] = {}
        self._touched_bytes = 0
        self._closed = False

    @property
    def node_id(self) -> NodeId:
        return self._control.node_id

    @property
    def host(self) -> HostId:
        return self._control.host

    @property
    def path(self) -> PathInfo:
        return PathInfo("shm", "same host")

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._control.promote(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._control.lookup(keys)

    def reserve(
        self, puts: Sequence[PutRequest], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        # Before it may evict, the node learns what was read.
        self._report_touched()
        return self._control.reserve(puts, deadline_s=deadline_s)

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        self._control.pending.check(writes)
        for write in writes:
            self._write(write.grant, write.index, as_bytes(write.data))
        self._control.pending.written(writes)

    def _write(self, grant: PutGrant, index: int, data: memoryview) -> None:
        segment = self._segment_of(grant.location)
        stamp = segment.read_stamp(grant.location.slot)
        if (stamp.state, stamp.generation, stamp.key) != (
            SlotState.WRITING,
            grant.location.generation,
            grant.key,
        ):
            raise LeaseExpiredError(f"the grant for slot {grant.location.slot} is gone")
        view = _range_view(segment, grant.location, stamp, index)
        if len(view) != len(data):
            raise BlockNotFoundError("the range is not as long as the data")
        copy_bytes(view, data)

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        return self._control.seal(grants)

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self._control.abort(grants)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        for read in reads:
            self._read(read)
        with self._lock:
            self._touched.update(dict.fromkeys(read.location for read in reads))
            self._touched_bytes += sum(read.destination.nbytes for read in reads)
            many = len(self._touched) >= _MAX_UNREPORTED
        if many:
            self._report_touched()

    def _read(self, read: RangeRead) -> None:
        location = self._control.mine(read.location)
        segment = self._segment_of(location)
        before = segment.read_stamp(location.slot)
        _check_sealed(location, before)
        view = _range_view(segment, location, before, read.index)
        destination = as_bytes(read.destination)
        if len(view) != len(destination):
            raise BlockNotFoundError("the range is not as long as its destination")
        size = slot_bytes_for(before.range_bytes, before.range_count)
        expected = segment.checksum(location.slot, size, read.index, before.range_count)
        copy_bytes(destination, view)
        if segment.read_stamp(location.slot) != before:
            raise StaleEpochError(f"slot {location.slot} was reused while it was read")
        if xxhash.xxh3_64_intdigest(destination) != expected:
            self._control.suspect([RangeRef(location, read.index)])
            raise ChecksumError(f"range {read.index} of slot {location.slot} has a wrong checksum")

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return self._control.hold(locations, ttl_s=ttl_s)

    def release(self, locations: Sequence[Location]) -> None:
        self._control.release(locations)

    def stats(self) -> PoolNodeStats:
        self._report_touched()
        return self._control.stats()

    def close(self) -> None:
        self._closed = True
        self._segment.stop_populating()
        self._control.close()

    def _report_touched(self) -> None:
        with self._lock:
            touched, self._touched = list(self._touched), {}
            size, self._touched_bytes = self._touched_bytes, 0
        if touched:
            self._control.touch(touched, read_bytes=size)

    def _segment_of(self, location: Location) -> Segment:
        """Return the mapping of that incarnation; map again when the node made a new file."""
        if self._closed:
            raise TransportError(f"the connection to {self.node_id} is closed")
        if self._segment.incarnation != location.incarnation:
            self._map_again()
        segment = self._segment
        if segment.incarnation != location.incarnation:
            raise StaleEpochError(
                f"{self.node_id} is in incarnation {segment.incarnation}, not "
                f"{location.incarnation}"
            )
        if location.segment != 0 or not 0 <= location.slot < segment.geometry.slot_count:
            raise BlockNotFoundError(f"{self.node_id} has no slot {location.slot}")
        return segment

    def _map_again(self) -> None:
        try:
            if os.stat(self._path).st_ino != self._segment.inode:
                # The old mapping lives until its last reader lets go.
                self._segment = map_segment(self._path)
                self._segment.populate()
        except (OSError, ConfigError) as error:
            raise TransportError(f"segment {self._path} can't be mapped: {error}") from error


def _check_sealed(location: Location, stamp: Stamp) -> None:
    error: CacheError | None = None
    if stamp.generation != location.generation:
        error = StaleEpochError(f"slot {location.slot} was reused")
    elif stamp.state != SlotState.SEALED:
        error = BlockNotFoundError(f"slot {location.slot} holds no sealed block")
    if error is not None:
        raise error


def _range_view(segment: Segment, location: Location, stamp: Stamp, index: int) -> memoryview:
    """Return the bytes of a range, inside its extent whatever the header claims."""
    if not 0 <= index < stamp.range_count <= limits.MAX_LAYERS:
        raise BlockNotFoundError(f"range {index} is outside [0, {stamp.range_count})")
    size = slot_bytes_for(stamp.range_bytes, stamp.range_count)
    place = location.slot % segment.geometry.slots_per_extent
    if (place + 1) * size > segment.geometry.extent_bytes:
        raise StaleEpochError(f"the header of slot {location.slot} is being rewritten")
    start = index * stamp.range_bytes
    return segment.payload(location.slot, size, start, start + stamp.range_bytes)
