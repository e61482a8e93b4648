"""A DMP node as other rooms see it: put and get blocks by key, over any transport.

Compute nodes hold one PoolNode per DMP node: shared memory for a node on the same host (tier L2),
TCP for the others (L3). All calls block and are thread-safe; they move bytes and do not know
models. Every failure is a CacheError, which means "miss".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tierkv.dmp.zone_traffic import OtherZone
from tierkv.kvcore.block import BlockSpec, Erased, Location, Tier
from tierkv.kvcore.ids import BlockKey, HostId, NodeId
from tierkv.kvcore.node import TierStats


@dataclass(frozen=True, slots=True)
class PutGrant:
    """A reserved slot, writable until ``deadline_s`` after the reserve; invisible until sealed."""

    block: BlockSpec
    location: Location


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A range (layer) of a block, and the destination of the bytes.

    Attributes:
        location: slot of the block.
        index: number of the range.
        destination: writable, C-contiguous, exactly ``range_bytes`` long.
        ahead: the bytes are not awaited yet; transfers of awaited bytes go first.
    """

    location: Location
    index: int
    destination: memoryview
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class RangeWrite:
    """A range (layer) of a granted slot, and the bytes to write.

    Attributes:
        grant: an open grant.
        index: number of the range.
        data: C-contiguous, exactly ``range_bytes`` long.
    """

    grant: PutGrant
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class PathInfo:
    """How bytes travel to a node, and the reason for that path.

    Attributes:
        transport: ``inproc``, ``shm``, ``rdma`` or ``tcp``.
        reason: human-readable: why this path was taken, or why no better path works.
    """

    transport: str
    reason: str


NO_DISK: Final = TierStats(Tier.L4)


@dataclass(frozen=True, slots=True)
class PoolNodeStats:
    """Counters of one DMP node; over a wire only the tiers' main counters are sent.

    Attributes:
        memory: tier L2; blocks are slots, and sealed slots count as used.
        disk: tier L4; all zero without a disk. ``alloc_failures`` counts failed and bad reads and
            writes, of the disk and of the archive below the disk.
        slots_writing: slots that are reserved and not sealed yet.
        quarantined_slots: slots with bad bytes, which are not used again.
        refused_puts: blocks that were worth less than their eviction victims.
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

    1. ``lookup`` returns one entry per key: the current location of the sealed block, or None.
    2. ``reserve`` returns one entry per request: a grant, or None if the block is already sealed or
       being written, no slot can be freed, or the eviction victims are worth more. A reader sees
       nothing before ``seal``.
    3. ``write_ranges`` copies once, straight into the slots (shm) or the socket (TCP), with several
       writes in flight. The caller may reuse the buffers after the call.
    4. ``seal`` makes the blocks readable, with an xxh3_64 per range computed from the written
       bytes, and returns the locations, with None for each expired grant. ``abort`` frees grants. A
       grant without seal or abort expires at the deadline.
    5. ``read_ranges`` fills every destination and verifies each range's checksum, or raises
       BlockNotFoundError or StaleEpochError (slot reused, node restarted), ChecksumError (the slot
       is quarantined) or TransportError. After an error the destinations hold garbage.
    6. ``hold`` keeps blocks from eviction until ``release`` or until ``ttl_s`` has passed, and
       returns which of the locations are still valid.
    7. After ``close`` every call raises TransportError.
    8. ``put`` is reserve, write and seal in a single call, with an entry per request: the location
       of the sealed block, or None where ``reserve`` would have given no grant. After an error the
       call leaves nothing reserved.
    9. ``promote`` is a ``lookup`` that also loads blocks from the node's disk or archive (tier L4)
       into memory. The entry is None for a block that cannot be loaded.
    10. ``other_zone`` is None in the caller's own zone. Bytes to and from a node of another zone
        are counted; beyond their limit ``reserve`` and ``put`` grant nothing and ``hold`` keeps
        nothing.
    11. ``register`` is a hint that bytes will often move to and from this memory; a transport may
        ignore the hint. ``path`` names the transport and the reason for the choice.
    12. ``erase`` removes blocks, held and leased blocks too, from the node's memory, disk and
        archive, and overwrites the bytes of the removed copies. On return nothing is left. After a
        TransportError copies may be left, and the call may be repeated.
    """

    @property
    def node_id(self) -> NodeId: ...

    @property
    def host(self) -> HostId: ...

    @property
    def other_zone(self) -> OtherZone | None:
        """The node's zone, unless it is the caller's; this default names none."""
        return None

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
        """Store whole blocks; transports with a single round trip per put override this method."""
        return put_in_steps(self, puts, payloads)

    def promote(self, keys: Sequence[BlockKey]) -> list[Location | None]: ...

    def register(self, memory: memoryview) -> None:
        """Accept the hint; this default ignores the hint."""
        return None

    def erase(self, keys: Sequence[BlockKey]) -> Erased: ...

    def stats(self) -> PoolNodeStats: ...

    def close(self) -> None: ...


def put_in_steps(
    node: PoolNode, puts: Sequence[BlockSpec], payloads: Sequence[memoryview]
) -> list[Location | None]:
    """Reserve, write and seal whole blocks; abort all reservations on an error."""
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
        node.abort(granted)  # A failure of abort is a CacheError too; the node expires the rest.
        raise
    return [None if grant is None else next(sealed) for grant in grants]


def _range(payload: memoryview, grant: PutGrant, index: int) -> memoryview:
    return payload.cast("B")[
        index * grant.block.ranges.size_bytes : (index + 1) * grant.block.ranges.size_bytes
    ]
