"""Block events that nodes report to the meta server, and the hold orders that come back.

DMP and compute nodes produce events. The composition root connects the BlockReporter to the meta
server's client, so ``dmp`` never imports ``metaserver``. The meta server gives a lease with a
locate (metaserver/directory/leases.py) and sends HoldOrders to the nodes that hold the blocks. A
node protects these blocks from eviction until the order expires or is withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from tierkv.kvcore.block import BlockSpec, Location, Tier
from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became readable.

    Attributes:
        block: which; neither its ranges nor its outlook is told to the meta server.
        tier: L1 (compute pages), L2 (DMP memory) or L4 (DMP disk).
        location: the slot; None for L1 and L4.
    """

    block: BlockSpec
    tier: Tier
    location: Location | None = None

    @property
    def key(self) -> BlockKey:
        """Which block; both kinds of event have it."""
        return self.block.key


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block left one tier of the reporting node."""

    key: BlockKey
    tier: Tier


BlockEvent = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one node in order.

    Attributes:
        node_id: the reporting node.
        incarnation: the node's start number.
        seq: number of this batch, counting from 1 in each incarnation; a gap asks for an inventory.
        events: oldest first.
        inventory: True means that ``events`` lists every block of the node and replaces everything
            known about the node.
        more: True on every part but the last of an inventory sent in parts. Each part has its own
            ``seq`` number, in order.
        part: index of an inventory's part; 0 starts a new inventory and discards an unfinished one.
    """

    node_id: NodeId
    incarnation: Incarnation
    seq: int
    events: tuple[BlockEvent, ...]
    inventory: bool = False
    more: bool = False
    part: int = 0


class BlockReporter(Protocol):
    """Accepts the block events of a node.

    1. ``report`` never blocks and never raises; the reporter batches, numbers and resends
       (metaserver/reporter.py).
    2. ``report`` may be called from any thread.
    """

    def report(self, events: Sequence[BlockEvent]) -> None: ...


class NullReporter:
    """A reporter for a node without a meta server; drops all events."""

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Forget the events."""


LeaseId = NewType("LeaseId", int)
"""Id of a lease of one meta server; 0 means no lease. Unknown and expired ids are treated alike."""

NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """Tells a node which blocks to protect from eviction, and for how long.

    Attributes:
        lease: the lease; a later order for the same lease replaces its deadline.
        keys: blocks to keep, heads before tails. Without keys the order concerns all blocks of the
            lease: ``ttl_s`` 0 releases them, a positive ``ttl_s`` prolongs their hold.
        ttl_s: seconds from receipt until the hold expires.
    """

    lease: LeaseId
    keys: tuple[BlockKey, ...]
    ttl_s: float
