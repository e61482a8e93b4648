"""What nodes tell the meta server about blocks, and the port they tell it through.

DMP and compute nodes produce events; the composition root connects the BlockReporter to the meta
server's client, so that ``dmp`` never has to know ``metaserver``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.kvcore.ids import BlockKey, Incarnation, NodeId
from tierkv.kvcore.location import Location, Tier


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became readable.

    Attributes:
        key: the block.
        parent: the block before it in its prompt, ``ROOT_PARENT`` for the first.
        tier: L1 (compute pages), L2 (DMP memory) or L4 (DMP disk).
        tokens: tokens in the block.
        location: the slot; None for L1.
        model: model name, for the views.
        tenant: who may read it, for the views.
        session: whose conversation stored it, for the views; empty when unknown.
    """

    key: BlockKey
    parent: BlockKey
    tier: Tier
    tokens: int
    location: Location | None = None
    model: str = ""
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block is no longer in that tier of the reporting node."""

    key: BlockKey
    tier: Tier


BlockEvent = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one node in order.

    Attributes:
        node_id: who reports.
        incarnation: of which life.
        seq: number of this batch, counting from 1 in each incarnation; a gap asks for an inventory.
        events: oldest first.
        inventory: True replaces everything known of the node: ``events`` are all its BlockStored.
        more: True on every part but the last of an inventory sent in parts. Parts have ``seq``
            numbers of their own, one after the other.
        part: index of an inventory's part; 0 starts a new inventory, whatever came before.
    """

    node_id: NodeId
    incarnation: Incarnation
    seq: int
    events: tuple[BlockEvent, ...]
    inventory: bool = False
    more: bool = False
    part: int = 0


class BlockReporter(Protocol):
    """Where a node drops its block events.

    1. ``report`` never blocks and never raises; batching, numbering and resending are the
       reporter's business (metaserver/reporter.py).
    2. It may be called from any thread.
    """

    def report(self, events: Sequence[BlockEvent]) -> None: ...


class NullReporter:
    """A reporter for nodes that stand alone."""

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Forget the events."""
