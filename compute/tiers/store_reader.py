"""Tier L4 as seen by the loader: a BlockStore read like a pool node.

Made by the composition root when a node has an archive; blocks are only read here (DMP nodes write
L4). A location's slot is simply the block key as a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dmp.pool_node import (
    PathInfo,
    PoolNode,
    PoolNodeStats,
    PutGrant,
    RangeRead,
    RangeWrite,
)
from tierkv.kvcore.block import BlockSpec, Erased, Location, Tier
from tierkv.kvcore.errors import PoolFullError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import TierStats
from tierkv.storage.block_store import BlockStore


class StoreReader(PoolNode):
    """A read-only PoolNode over a BlockStore."""

    def __init__(self, store: BlockStore, *, node_id: NodeId, host: HostId) -> None:
        self._store = store
        self._node_id = node_id
        self._host = host

    @property
    def node_id(self) -> NodeId:
        return self._node_id

    @property
    def host(self) -> HostId:
        return self._host

    @property
    def path(self) -> PathInfo:
        return PathInfo("inproc", "an archive of this node")

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self.lookup(keys)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        found = [self._store.find(key) for key in keys]
        return [self._location(block) if block is not None else None for block in found]

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        for read in reads:
            self._store.get_range(_key(read.location), read.index, read.destination)

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return [self._store.exists(_key(location)) for location in locations]

    def release(self, locations: Sequence[Location]) -> None:
        """Do nothing: a store does not evict blocks."""

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        return [None] * len(puts)

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        raise PoolFullError("an archive is read-only here")

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        return [None] * len(grants)

    def abort(self, grants: Sequence[PutGrant]) -> None:
        """Do nothing: no grants exist."""

    def erase(self, keys: Sequence[BlockKey]) -> Erased:
        blocks = [block for key in keys if (block := self._store.find(key)) is not None]
        for block in blocks:
            self._store.delete(block.key)
        size = sum(block.ranges.payload_bytes for block in blocks)
        return Erased(resting_blocks=len(blocks), resting_bytes=size)

    def stats(self) -> PoolNodeStats:
        return PoolNodeStats(TierStats(Tier.L4, blocks_used=len(self._store.blocks())))

    def close(self) -> None:
        self._store.close()

    def _location(self, block: BlockSpec) -> Location:
        slot = int.from_bytes(block.key, "big")
        return Location(self._node_id, Incarnation(0), 0, slot, 0, block.ranges.payload_bytes)


def _key(location: Location) -> BlockKey:
    return BlockKey(location.slot.to_bytes(BLOCK_KEY_BYTES, "big"))
