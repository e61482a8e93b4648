"""Block events of kvwire/v1/meta.proto to kvcore.block_event values and back.

Here and not in the meta server's room, because nodes of several rooms speak of block events; the
rest of meta.proto is converted in metaserver/wire.py.
"""

from __future__ import annotations

from kvcore import limits
from kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, EventBatch
from kvcore.errors import RemoteProtocolError
from kvcore.ids import Incarnation, NodeId
from kvcore.location import Tier
from kvwire.check import check_count, checked_choice, checked_key, checked_name
from kvwire.convert import location_from_proto, location_to_proto
from kvwire.v1 import meta_pb2 as pb


def block_event_to_proto(event: BlockEvent) -> pb.BlockEvent:
    """Convert a BlockStored or BlockRemoved."""
    if isinstance(event, BlockRemoved):
        return pb.BlockEvent(removed=pb.BlockRemoved(key=event.key, tier=event.tier.value))
    location = None if event.location is None else location_to_proto(event.location)
    return pb.BlockEvent(
        stored=pb.BlockStored(
            key=event.key,
            parent=event.parent,
            tier=event.tier.value,
            tokens=event.tokens,
            location=location,
            model=event.model,
            tenant=event.tenant,
            session=event.session,
        )
    )


def block_event_from_proto(message: pb.BlockEvent) -> BlockEvent:
    """Convert a BlockEvent; RemoteProtocolError when it is empty or malformed."""
    kind = message.WhichOneof("event")
    if kind == "stored":
        return _stored_from_proto(message.stored)
    if kind == "removed":
        return BlockRemoved(
            key=checked_key(message.removed.key, "removed.key"),
            tier=checked_choice(Tier, message.removed.tier, "removed.tier"),
        )
    raise RemoteProtocolError("a block event is neither stored nor removed")


def _stored_from_proto(message: pb.BlockStored) -> BlockStored:
    has_location = message.HasField("location")
    return BlockStored(
        key=checked_key(message.key, "stored.key"),
        parent=checked_key(message.parent, "stored.parent"),
        tier=checked_choice(Tier, message.tier, "stored.tier"),
        tokens=message.tokens,
        location=location_from_proto(message.location) if has_location else None,
        model=message.model,
        tenant=message.tenant,
        session=message.session,
    )


def event_batch_to_proto(batch: EventBatch) -> pb.EventBatch:
    """Convert an EventBatch."""
    return pb.EventBatch(
        node_id=batch.node_id,
        incarnation=batch.incarnation,
        seq=batch.seq,
        events=[block_event_to_proto(event) for event in batch.events],
        inventory=batch.inventory,
        more=batch.more,
        part=batch.part,
    )


def event_batch_from_proto(message: pb.EventBatch) -> EventBatch:
    """Convert an EventBatch; RemoteProtocolError when it is too long or an event is malformed."""
    check_count(message.events, limits.MAX_EVENTS_PER_BATCH, "batch.events")
    return EventBatch(
        node_id=NodeId(checked_name(message.node_id, "batch.node_id")),
        incarnation=Incarnation(message.incarnation),
        seq=message.seq,
        events=tuple(block_event_from_proto(event) for event in message.events),
        inventory=message.inventory,
        more=message.more,
        part=message.part,
    )
