"""A pool node behind a line of limited bandwidth, to measure how much a slow load is hidden.

The bytes really come from the node below; afterwards the reader sleeps until the line would have
carried the bytes. ``WHOLE_BLOCKS`` charges a block's whole payload at the read of the first layer,
because a reader that moves whole blocks could use no layer earlier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import StrEnum

from tierkv.dmp.pool_node import PathInfo, PoolNode, PoolNodeStats, PutGrant, RangeRead, RangeWrite
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.ids import BlockKey, HostId, NodeId


class Order(StrEnum):
    """Order in which a block's bytes pass the line."""

    LAYERS = "layers"
    WHOLE_BLOCKS = "whole"


class ThrottledPoolNode(PoolNode):
    """Reads at most ``bytes_per_s``; all other calls go to the node below at once.

    Attributes:
        bytes_per_s: the line's speed; 0 is unlimited.
        order: see Order.
    """

    def __init__(self, below: PoolNode, *, host: HostId) -> None:
        self.bytes_per_s = 0.0
        self.order = Order.LAYERS
        self._below = below
        self._host = host
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    @property
    def node_id(self) -> NodeId:
        return self._below.node_id

    @property
    def host(self) -> HostId:
        return self._host

    @property
    def path(self) -> PathInfo:
        return PathInfo(self._below.path.transport, "throttled")

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        """Read, then wait as long as the line would have needed."""
        began = time.perf_counter()
        self._below.read_ranges(reads)
        if not self.bytes_per_s:
            return
        if self.order is Order.LAYERS:
            size = sum(len(read.destination) for read in reads)
        else:
            size = sum(read.location.length for read in reads if read.index == 0)
        with self._lock:
            self._free_at_s = max(began, self._free_at_s) + size / self.bytes_per_s
            free_at_s = self._free_at_s
        time.sleep(max(0.0, free_at_s - time.perf_counter()))

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._below.lookup(keys)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return self._below.promote(keys)

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        return self._below.reserve(puts, deadline_s=deadline_s)

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        self._below.write_ranges(writes)

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        return self._below.seal(grants)

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self._below.abort(grants)

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]:
        return self._below.hold(locations, ttl_s=ttl_s)

    def release(self, locations: Sequence[Location]) -> None:
        self._below.release(locations)

    def stats(self) -> PoolNodeStats:
        return self._below.stats()

    def close(self) -> None:
        self._below.close()
