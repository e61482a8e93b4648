"""A DMP node as other rooms see it: put and get blocks by key, whatever the transport.

Compute nodes hold one PoolNode per DMP node: shared memory for the one on their host (tier L2),
TCP for the others (L3). All calls block and are thread-safe; they move bytes and know no models.
Every failure is a CacheError, which means "miss".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey, HostId, NodeId
from tierkv.kvcore.location import Location, Tier
from tierkv.kvcore.node import TierStats


@dataclass(frozen=True, slots=True)
class PutGrant:
    """A reserved slot, writable until ``deadline_s`` from the reserve; invisible until sealed."""

    block: BlockSpec
    location: Location


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
class RangeWrite:
    """One range (layer) of a granted slot, and the bytes that go there.

    Attributes:
        grant: an open grant.
        index: which range.
        data: C-contiguous, exactly ``range_bytes`` long.
    """

    grant: PutGrant
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class PathInfo:
    """How bytes travel to a node, and why that way.

    Attributes:
        transport: ``inproc``, ``shm``, ``rdma`` or ``tcp``.
        reason: for people: why this one, or why no better one.
    """

    transport: str
    reason: str


NO_DISK: Final = TierStats(Tier.L4)


@dataclass(frozen=True, slots=True)
class PoolNodeStats:
    """Counters of one DMP node; over a wire come the tiers' main counters only.

    Attributes:
        memory: tier L2; its blocks are slots, of which the sealed ones are used.
        disk: tier L4; all zero without a disk. Its ``alloc_failures`` count failed and bad reads
            and writes, of the disk and of the archive below it.
        slots_writing: slots that are reserved and not sealed yet.
        quarantined_slots: slots with bad bytes, which are not used again.
        refused_puts: blocks that were worth less than what would have had to go for them.
        leased_blocks: blocks that leases keep now.
        refused_leases: blocks that leases could not keep.
    """

    memory: TierStats
    disk: TierStats = NO_DISK
    slots_writing: int = 0
    quarantined_slots: int = 0
    refused_puts: int = 0
    leased_blocks: int = 0
    refused_leases: int = 0


class PoolNode(Protocol):
    """One DMP node, seen by a client.

    1. ``lookup`` answers one entry per key: where it is sealed now, or None.
    2. ``reserve`` answers one entry per request: a grant; or None when the block is already
       sealed or being written, or no slot can be freed, or what would have to go is worth more.
       Nothing is readable before ``seal``.
    3. ``write_ranges`` copies once, straight into the slots (shm) or the socket (TCP), with
       several in flight; when it returns the caller may reuse its buffers.
    4. ``seal`` makes the blocks readable, with one xxh3_64 per range computed from the written
       bytes; it answers the locations, or None for a grant that expired. ``abort`` frees grants.
       A grant neither sealed nor aborted expires by itself.
    5. ``read_ranges`` fills every destination and verifies each range's checksum, or raises:
       BlockNotFoundError or StaleEpochError (slot reused, node restarted), ChecksumError (the
       slot is quarantined), TransportError. After an error destinations hold garbage.
    6. ``hold`` keeps blocks from eviction until ``release`` or ``ttl_s`` passed; it answers
       which of the locations are still valid.
    7. After ``close`` every call raises TransportError.
    8. ``put`` is reserve, write and seal in one go, one entry per request: where it is sealed now;
       or None where ``reserve`` would have given no grant. After an error nothing of it stays
       reserved.
    9. ``promote`` is ``lookup`` that also brings blocks resting on the node's disk or archive
       (tier L4) into its memory. What can't be brought is None.
    10. ``register`` is a hint that bytes will often move to and from this memory; it may do
        nothing. ``path`` says how bytes travel and why.
    """

    @property
    def node_id(self) -> NodeId: ...

    @property
    def host(self) -> HostId: ...

    @property
    def path(self) -> PathInfo: ...

    def lookup(self, keys: Sequence[BlockKey]) -> list[Location | None]: ...

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]: ...

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None: ...

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]: ...

    def abort(self, grants: Sequence[PutGrant]) -> None: ...

    def read_ranges(self, reads: Sequence[RangeRead]) -> None: ...

    def hold(self, locations: Sequence[Location], *, ttl_s: float) -> list[bool]: ...

    def release(self, locations: Sequence[Location]) -> None: ...

    def put(
        self, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
    ) -> list[Location | None]:
        """Store whole blocks; the transports that can do it in one round trip override this."""
        return put_in_steps(self, puts, payloads)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]: ...

    def register(self, memory: memoryview) -> None:
        """Take the hint, or not."""
        return None

    def stats(self) -> PoolNodeStats: ...

    def close(self) -> None: ...


def put_in_steps(
    node: PoolNode, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
) -> list[Location | None]:
    """Reserve, write and seal whole blocks; what was reserved is aborted on an error."""
    grants = node.reserve(puts)
    granted = [grant for grant in grants if grant is not None]
    try:
        node.write_ranges(
            [
                RangeWrite(grant, index, _range(payload, grant, index))
                for grant, payload in zip(grants, payloads, strict=True)
                if grant is not None
                for index in range(grant.block.ranges.count)
            ]
        )
        sealed = iter(node.seal(granted))
    except BaseException:
        node.abort(granted)  # Its own failure is a CacheError too; the node expires the rest.
        raise
    return [None if grant is None else next(sealed) for grant in grants]


def _range(payload: memoryview, grant: PutGrant, index: int) -> memoryview:
    return payload.cast("B")[
        index * grant.block.ranges.size_bytes : (index + 1) * grant.block.ranges.size_bytes
    ]
