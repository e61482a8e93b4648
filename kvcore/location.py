"""Location of a block copy, and the tier that a reader sees.

A location is a reference, never an address: the owner checks the location against its slot table,
and a stale generation or incarnation means "miss".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId


class Tier(StrEnum):
    """The memory hierarchy, nearest first."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"


@dataclass(frozen=True, slots=True)
class Location:
    """One slot of one DMP node at one generation.

    Attributes:
        node: the DMP node that owns the bytes.
        incarnation: start number of the node when the reference was made.
        segment: index of the segment in that node.
        slot: index of the slot in that segment.
        generation: number of reuses of the slot.
        length: payload bytes.
    """

    node: NodeId
    incarnation: Incarnation
    segment: int
    slot: int
    generation: int
    length: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of one block as the directory knows it.

    Attributes:
        key: the block.
        node: the holder.
        host: the holder's machine; a reader on the same host sees L2, others L3.
        tier: L1 for a compute node's pages, L2 for DMP memory, L4 for DMP disk.
        location: the slot; None for L1, whose pages never leave their process.
    """

    key: BlockKey
    node: NodeId
    host: HostId
    tier: Tier
    location: Location | None = None


def tier_seen_from(replica: Replica, host: HostId) -> Tier:
    """Return the tier a reader on ``host`` sees: pooled DRAM is L2 at home and L3 elsewhere."""
    if replica.tier is Tier.L2 and replica.host != host:
        return Tier.L3
    return replica.tier
