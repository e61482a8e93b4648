"""Pool nodes for tests of the compute room: an honest one in this process, and ones that misbehave.

Each is a real DMP node behind the in-process transport, so reservations, generations, checksums and
eviction are the pool's own (tests/contract/test_pool_node.py checks them). What misbehaves adds its
fault in front. A node starts when it is first used, and stops after the test.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from tierkv.dmp.config import DEFAULT_SEGMENT_FOLDER, DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PutGrant, RangeRead
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.wire.messages import RangeRef
from tierkv.kvcore.block import BlockSpec, Location
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ChecksumError, TransportError
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

_EXTENT_BYTES = 1 << 20
_segments = count()
_started: list[DmpNode] = []


@pytest.fixture(autouse=True)
def stop_pool_nodes() -> Iterator[None]:
    """Check and stop the pool nodes that a test used."""
    yield
    while _started:
        node = _started.pop()
        try:
            node.check_invariants()
        finally:
            node.stop()


class MemoryPoolNode(InprocPoolNode):
    """A pool node with 64 MiB of memory without a name.

    Attributes:
        reads: calls of ``read_ranges``.
    """

    def __init__(self, name: str = "pool", host: str = "here") -> None:
        segment = f"tierkv-test-{os.getpid()}-{next(_segments)}.seg"
        config = DmpConfig(
            NodeId(name),
            HostId(host),
            segment_path=str(Path(DEFAULT_SEGMENT_FOLDER) / segment),
            capacity_bytes=64 * _EXTENT_BYTES,
            ready_ahead_bytes=_EXTENT_BYTES,
            extent_bytes=_EXTENT_BYTES,
            scrub_rate_bytes_per_s=0,
            nameless=True,
        )
        super().__init__(DmpNode(config, NullReporter(), SystemClock()))
        self.reads = 0
        self._numbers: dict[Location, int] = {}
        self._count = count(1)
        self._starting = threading.Lock()

    @property
    def _node(self) -> DmpNode:
        with self._starting:
            if not self._dmp.running:
                self._dmp.start()
                _started.append(self._dmp)
        return super()._node

    @property
    def sealed(self) -> dict[BlockKey, Location]:
        """The readable blocks."""
        stored = self._node.reports.inventory()
        return {event.key: event.location for event in stored if event.location is not None}

    @property
    def sealed_keys(self) -> set[BlockKey]:
        """Keys of the readable blocks."""
        return set(self.sealed)

    @property
    def has_open_puts(self) -> bool:
        """Whether a block is reserved and neither sealed nor aborted."""
        return self.stats().slots_writing > 0

    def ranges(self, key: BlockKey) -> list[bytes]:
        """Return the bytes of a readable block, range by range."""
        (block,) = self._node.gets.describe([key])
        assert block is not None
        refs = [RangeRef(block.location, index) for index in range(block.ranges.count)]
        with self._node.gets.open_read(refs) as items:
            return [bytes(item.view) for item in items]

    def number_of(self, location: Location) -> int:
        """Return the place of a block in the order of reservations; the first one is 1."""
        return self._numbers[location]

    def forget(self, key: BlockKey) -> None:
        """Lose a block, as by bad bytes in its slot."""
        place, state = self.sealed[key], self._node._state
        with state.lock:
            assert state.quarantine(place.slot, place.generation)

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        grants = super().reserve(puts, deadline_s=deadline_s)
        for grant in grants:
            if grant is not None:
                self._numbers[grant.location] = next(self._count)
        return grants

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        self.reads += 1
        super().read_ranges(reads)


class GatedPoolNode(MemoryPoolNode):
    """Reads of layer 1 and later wait for ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        if reads[0].index >= 1:
            assert self.gate.wait(30)
        super().read_ranges(reads)


class CorruptingPoolNode(MemoryPoolNode):
    """Gives NaN bytes and a checksum error for one block, from one layer on."""

    def __init__(self, number: int, layer: int) -> None:
        super().__init__()
        self._bad = (number, layer)

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        super().read_ranges(reads)
        for read in reads:
            if self.number_of(read.location) == self._bad[0] and read.index >= self._bad[1]:
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
