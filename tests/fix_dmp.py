"""DMP nodes for tests: small segments in /dev/shm or a temporary folder, always cleaned up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode, RangeRead, RangeWrite
from tierkv.dmp.segment.geometry import SLOT_DTYPE
from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import Slot
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Outlook, Owner, RangeShape
from tierkv.kvcore.block_event import BlockEvent
from tierkv.kvcore.clock import Clock, ManualClock, SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NodeId

RANGE_BYTES = 24_000
"""Two of them, with their checksums, make a slot of 48 KiB: 5 in an extent of 256 KiB."""


class Journal:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []

    def report(self, events: Sequence[BlockEvent]) -> None:
        self.events.extend(events)


class Rig:
    """A running DMP node with its server, clock and journal."""

    def __init__(
        self,
        config: DmpConfig,
        clock: Clock,
        open_lower: Callable[[], LowerTier] | None = None,
    ) -> None:
        self.clock = clock
        self.open_lower = open_lower
        self.journal = Journal()
        self.node = DmpNode(config, self.journal, clock, open_lower)
        self.server = DmpServer(self.node)
        self.node.start()
        self.server.start()

    def restart(self) -> None:
        """Stop and start on the same segment; the port may change."""
        self.stop()
        self.__init__(self.node.config, self.clock, self.open_lower)  # type: ignore[misc]

    def stop(self) -> None:
        self.server.stop()
        self.node.stop()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Start DMP nodes; each is checked and stopped after the test."""
    rigs: list[Rig] = []

    def make(
        name: str = "dmp-a",
        *,
        clock: Clock | None = None,
        open_lower: Callable[[], LowerTier] | None = None,
        **settings: object,
    ) -> Rig:
        values: dict[str, object] = {
            "node_id": NodeId(name),
            "host": HostId("here"),
            "segment_path": str(tmp_path / f"{name}.seg"),
            "capacity_bytes": 4 * (256 << 10),
            "extent_bytes": 256 << 10,
            "tick_interval_s": 3600.0,
            "attach_wait_s": 0.0,
            "scrub_rate_bytes_per_s": 0,
        } | settings
        config = DmpConfig(**values)  # type: ignore[arg-type]
        rig = Rig(config, clock or ManualClock(), open_lower)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        try:
            if rig.node.running:
                rig.node.check_invariants()
        finally:
            rig.stop()


@pytest.fixture
def make_node(make_rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Nodes with real time, for clients that reach them over a wire."""

    def make(name: str = "dmp-a", **settings: object) -> Rig:
        return make_rig(name, clock=SystemClock(), **settings)

    return make


def dirty_bytes(table: SlotTable) -> int:
    """Slot bytes in use that eviction would lose."""
    return table.extents.used_bytes - table.clean.clean_bytes


def blob(size: int, seed: int = 0) -> bytes:
    """Some bytes that another seed would make differently."""
    return (bytes((i * 7 + seed) % 251 for i in range(1000)) * (size // 1000 + 1))[:size]


def block_key(name: str) -> BlockKey:
    """A key that depends on the name only."""
    return BlockKey(hashlib.blake2b(name.encode(), digest_size=16).digest())


def make_put(name: str, parent: str | None = None, **changes: object) -> BlockSpec:
    """A block of two ranges; ``changes`` name fields of the spec or of what it embeds."""
    values: dict[str, Any] = {
        "key": block_key(name),
        "parent": block_key(parent) if parent else ROOT_PARENT,
        "range_bytes": RANGE_BYTES,
        "range_count": 2,
        "tokens": 64,
        "model": "demo",
        "tenant": "default",
    } | changes
    return spec_of(values)


def spec_of(values: Mapping[str, Any]) -> BlockSpec:
    """A block from flat names, as a frame carries them."""
    rest = dict(values)

    def some(kind: type[Owner] | type[Outlook]) -> dict[str, Any]:
        return {f.name: rest.pop(f.name) for f in fields(kind) if f.name in rest}

    ranges = RangeShape(rest.pop("range_bytes"), rest.pop("range_count"))
    return BlockSpec(
        ranges=ranges, owner=Owner(**some(Owner)), outlook=Outlook(**some(Outlook)), **rest
    )


def make_range(name: str, index: int, size: int = RANGE_BYTES) -> bytes:
    """The bytes a test stores under a name."""
    seed = hashlib.blake2b(f"{name}/{index}".encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def store(
    pool: PoolNode, name: str, parent: str | None = None, *, tenant: str = "default"
) -> Location:
    """Put one whole block."""
    put = make_put(name, parent, tenant=tenant)
    (grant,) = pool.reserve([put])
    assert grant is not None, f"no room for {name}"
    for index in range(put.ranges.count):
        pool.write_ranges([RangeWrite(grant, index, memoryview(make_range(name, index)))])
    (location,) = pool.seal([grant])
    assert location is not None
    return location


def fetch(pool: PoolNode, location: Location, indices: Sequence[int] = (0, 1)) -> list[bytes]:
    """Read ranges of one block."""
    buffers = [bytearray(RANGE_BYTES) for _ in indices]
    pool.read_ranges(
        [
            RangeRead(location, index, memoryview(buffer))
            for index, buffer in zip(indices, buffers, strict=True)
        ]
    )
    return [bytes(buffer) for buffer in buffers]


def restored_rows(slots: Sequence[Slot]) -> RestoredSlots:
    """The header rows of sealed slots, as a segment gives them back."""
    rows = np.zeros(len(slots), SLOT_DTYPE)
    for row, slot in zip(rows, slots, strict=True):
        put = slot.block
        row["generation"], row["key"], row["parent"] = slot.generation, put.key, put.parent
        row["range_bytes"], row["range_count"] = put.ranges.size_bytes, put.ranges.count
        row["tokens"], row["names"] = (
            put.tokens,
            (put.owner.model.encode(), put.owner.tenant.encode()),
        )
    return RestoredSlots.of(np.array([slot.index for slot in slots], int), rows)
