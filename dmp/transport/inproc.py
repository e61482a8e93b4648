"""A DMP node in the same process: PoolNode without sockets.

Used by ``tierkv sql`` and ``tierkv.connect()``, where all roles share one process, and by tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import (
    PathInfo,
    PoolNode,
    PoolNodeStats,
    PutGrant,
    RangeRead,
    RangeWrite,
)
from tierkv.dmp.transport.pending import PendingPuts, as_bytes, as_grant
from tierkv.dmp.wire.messages import RangeRef
from tierkv.kvcore.block import BlockSpec, Erased, Location
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    ChecksumError,
    RemoteProtocolError,
    TransportError,
)
from tierkv.kvcore.ids import BlockKey, HostId, NodeId


class InprocPoolNode(PoolNode):
    """PoolNode around a DmpNode; closing the PoolNode leaves the DmpNode running."""

    def __init__(self, node: DmpNode, *, clock: Clock | None = None) -> None:
        self._dmp = node
        self._clock = clock or SystemClock()
        self._pending = PendingPuts(self._clock)
        self._closed = False

    @property
    def node_id(self) -> NodeId:
        return self._dmp.node_id

    @property
    def host(self) -> HostId:
        return self._dmp.host

    @property
    def path(self) -> PathInfo:
        return PathInfo("inproc", "same process")

    @property
    def _node(self) -> DmpNode:
        if self._closed:
            raise TransportError(f"the connection to {self.node_id} is closed")
        return self._dmp

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._node.gets.lookup(keys)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._node.promote(keys)

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        deadline = self._clock.now() + deadline_s
        try:
            places = self._node.puts.reserve(puts, deadline_s=deadline_s)
        except RemoteProtocolError as error:
            raise TransportError(f"{self.node_id} refused: {error}") from error
        grants = [as_grant(put, place) for put, place in zip(puts, places, strict=True)]
        self._pending.opened(grants, deadline=deadline)
        return grants

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        self._pending.check(writes)
        for write in writes:
            with self._node.puts.open_write(write.grant.location, write.index) as view:
                copy_bytes(view, as_bytes(write.data))
        self._pending.written(writes)

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        items = self._pending.closed(grants)
        unwritten = [g.location for g, item in zip(grants, items, strict=True) if item is None]
        sealed = iter(self._node.puts.seal([item for item in items if item is not None]))
        self._node.puts.abort(unwritten)
        return [next(sealed) if item is not None else None for item in items]

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self._pending.closed(grants)
        self._node.puts.abort([grant.location for grant in grants])

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        refs = [RangeRef(read.location, read.index) for read in reads]
        if any(read.location.node != self.node_id for read in reads):
            raise BlockNotFoundError(f"a reference to another node was given to {self.node_id}")
        bad: list[RangeRef] = []
        with self._node.gets.open_read(refs) as items:
            for read, ref, item in zip(reads, refs, items, strict=True):
                destination = as_bytes(read.destination)
                if len(destination) != len(item.view):
                    raise BlockNotFoundError("the range is not as long as its destination")
                copy_bytes(destination, item.view)
                if xxhash.xxh3_64_intdigest(destination) != item.checksum:
                    bad.append(ref)
        if bad:
            self._node.gets.suspect(bad)
            raise ChecksumError(f"{len(bad)} ranges in {self.node_id} have wrong checksums")

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return self._node.gets.hold(locations, ttl_s=ttl_s)

    def release(self, locations: Sequence[Location]) -> None:
        self._node.gets.release(locations)

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        node = self._node
        return node.erase(keys)

    def stats(self) -> PoolNodeStats:
        return self._node.reports.stats()

    def close(self) -> None:
        self._closed = True


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy equal-sized buffers with the GIL released (a memoryview assignment holds the GIL)."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
