"""PoolNodes for tests of the compute room: an honest one in memory, and ones that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tierkv.dmp.pool_node import PathInfo, PoolNode, PoolNodeStats, PutGrant, RangeRead, RangeWrite
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.location import Location, Tier
from tierkv.kvcore.node import TierStats


class MemoryPoolNode(PoolNode):
    """Blocks in a dictionary; slots are numbers that are never used again."""

    def __init__(self, name: str = "pool", host: str = "here") -> None:
        self._id = NodeId(name)
        self._host = HostId(host)
        self._lock = threading.Lock()
        self._sealed: dict[BlockKey, Location] = {}
        self._bytes: dict[int, list[bytes]] = {}
        self._next = 0
        self.reads = 0

    @property
    def node_id(self) -> NodeId:
        return self._id

    @property
    def host(self) -> HostId:
        return self._host

    @property
    def sealed_keys(self) -> set[BlockKey]:
        with self._lock:
            return set(self._sealed)

    @property
    def sealed(self) -> dict[BlockKey, Location]:
        with self._lock:
            return dict(self._sealed)

    def forget(self, key: BlockKey) -> None:
        """Lose a block, as a node does that evicts it."""
        with self._lock:
            del self._sealed[key]

    def ranges(self, location: Location) -> list[bytes]:
        return self._bytes[location.slot]

    @property
    def path(self) -> PathInfo:
        return PathInfo("inproc", "in memory")

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self.lookup(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        with self._lock:
            return [self._sealed.get(key) for key in keys]

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        return [self._grant(put) for put in puts]

    def _grant(self, put: BlockSpec) -> PutGrant | None:
        with self._lock:
            if put.key in self._sealed:
                return None
            self._next += 1
            self._bytes[self._next] = [b""] * put.ranges.count
            length = put.ranges.payload_bytes
            location = Location(self._id, Incarnation(1), 0, self._next, 1, length)
            return PutGrant(put, location)

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        for write in writes:
            assert len(write.data) == write.grant.block.ranges.size_bytes
            self._bytes[write.grant.location.slot][write.index] = bytes(write.data)

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        with self._lock:
            for grant in grants:
                assert all(self._bytes[grant.location.slot]), "sealed before it was written"
                self._sealed[grant.block.key] = grant.location
        return [grant.location for grant in grants]

    def abort(self, grants: Sequence[PutGrant]) -> None:
        with self._lock:
            for grant in grants:
                self._bytes.pop(grant.location.slot, None)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        self.reads += 1
        for read in reads:
            stored = self._bytes.get(read.location.slot)
            if stored is None:
                raise BlockNotFoundError("no such slot")
            read.destination[:] = stored[read.index]

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return [location.slot in self._bytes for location in locations]

    def release(self, locations: Sequence[Location]) -> None:
        return None

    def stats(self) -> PoolNodeStats:
        return PoolNodeStats(TierStats(Tier.L2, blocks_used=len(self._sealed)))

    def close(self) -> None:
        return None


class CorruptingPoolNode(MemoryPoolNode):
    """Gives NaN bytes and a checksum error for one block, from one layer on."""

    def __init__(self, slot: int, layer: int) -> None:
        super().__init__()
        self._bad = (slot, layer)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        super().read_ranges(reads)
        for read in reads:
            if read.location.slot == self._bad[0] and read.index >= self._bad[1]:
                read.destination[:] = b"\xff" * len(read.destination)
                raise ChecksumError("flipped bits")


class DyingPoolNode(MemoryPoolNode):
    """Works until ``dead`` is set; then every call fails, or only those named."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.dead = False
        self._failing = failing

    def _check(self, call: str) -> None:
        if self.dead and (not self._failing or call in self._failing):
            raise TransportError("connection reset")

    def lookup(self, keys):
        self._check("lookup")
        return super().lookup(keys)

    def reserve(self, puts, *, deadline_s: float = 30.0):
        self._check("reserve")
        return super().reserve(puts, deadline_s=deadline_s)

    def write_ranges(self, writes):
        self._check("write_ranges")
        super().write_ranges(writes)

    def promote(self, keys):
        self._check("promote")
        return super().promote(keys)

    def seal(self, grants):
        self._check("seal")
        return super().seal(grants)

    def abort(self, grants):
        self._check("abort")
        super().abort(grants)

    def read_ranges(self, reads):
        self._check("read_ranges")
        super().read_ranges(reads)

    def hold(self, locations, *, ttl_s: float):
        self._check("hold")
        return super().hold(locations, ttl_s=ttl_s)

    def release(self, locations):
        self._check("release")
        super().release(locations)
