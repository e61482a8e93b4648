"""A DMP node as other rooms see it: put and get blocks by key, whatever the transport.

Compute nodes hold one PoolNode per DMP node: shared memory for the one on their host (tier L2),
TCP for the others (L3). All calls block and are thread-safe; they move bytes and know no models.
Every failure is a CacheError, which means "miss".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.ids import BlockKey, HostId, NodeId
from kvcore.location import Location


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A block somebody wants to store.

    Attributes:
        key: the block.
        parent: the block before it; a parent outlives its children under eviction.
        range_bytes: bytes of one range (one layer).
        range_count: number of ranges (layers); the slot holds ``range_bytes * range_count``.
        tokens: tokens in the block, reported to the directory.
        model: model name, for the views.
        tenant: whom to account to.
    """

    key: BlockKey
    parent: BlockKey
    range_bytes: int
    range_count: int
    tokens: int
    model: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PutGrant:
    """A reserved slot, writable until ``deadline_s`` from the reserve; invisible until sealed."""

    key: BlockKey
    location: Location
    range_bytes: int
    range_count: int


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One range (layer) of one block, and where its bytes go.

    Attributes:
        location: the block's slot.
        index: which range.
        destination: writable, C-contiguous, exactly ``range_bytes`` long.
    """

    location: Location
    index: int
    destination: memoryview


@dataclass(frozen=True, slots=True)
class PoolNodeStats:
    """Counters of one DMP node; cumulative, but for used and total."""

    capacity_bytes: int
    used_bytes: int
    slots_total: int
    slots_sealed: int
    slots_writing: int
    evicted_blocks: int
    quarantined_slots: int
    alloc_failures: int
    read_bytes: int
    write_bytes: int


class PoolNode(Protocol):
    """One DMP node, seen by a client.

    1. ``lookup`` answers one entry per key: where it is sealed now, or None.
    2. ``reserve`` answers one entry per request: a grant; or None when the block is already
       sealed or being written, or no slot can be freed. Nothing is readable before ``seal``.
    3. ``write_range`` copies once, straight into the slot (shm) or the socket (TCP).
    4. ``seal`` makes the blocks readable, with one xxh3_64 per range computed from the written
       bytes; it answers the locations, or None for a grant that expired. ``abort`` frees grants.
       A grant neither sealed nor aborted expires by itself.
    5. ``read_ranges`` fills every destination and verifies each range's checksum, or raises:
       BlockNotFoundError or StaleEpochError (slot reused, node restarted), ChecksumError (the
       slot is quarantined), TransportError. After an error destinations hold garbage.
    6. ``hold`` keeps blocks from eviction until ``release`` or ``ttl_s`` passed; it answers
       which of the locations are still valid.
    7. After ``close`` every call raises TransportError.
    """

    @property
    def node_id(self) -> NodeId: ...

    @property
    def host(self) -> HostId: ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]: ...

    def reserve(
        self, puts: Sequence[PutRequest], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]: ...

    def write_range(self, grant: PutGrant, index: int, data: memoryview) -> None: ...

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]: ...

    def abort(self, grants: Sequence[PutGrant]) -> None: ...

    def read_ranges(self, reads: Sequence[RangeRead]) -> None: ...

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]: ...

    def release(self, locations: Sequence[Location]) -> None: ...

    def stats(self) -> PoolNodeStats: ...

    def close(self) -> None: ...
