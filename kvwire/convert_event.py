"""Converts batches of block events of kvwire/v1/meta.proto to packed records and back.

The conversion belongs to kvwire, because nodes of several rooms send block events;
metaserver/rpc/wire.py converts the other messages of meta.proto. The directory checks the content
of single records, and refuses records one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvwire.check import check_count, checked_name
from tierkv.kvwire.event_records import RECORD_BYTES, EventRecords
from tierkv.kvwire.v1 import meta_pb2 as pb


def event_records_to_proto(batch: EventRecords) -> pb.EventBatch:
    """Convert EventRecords."""
    return pb.EventBatch(
        node_id=batch.node_id,
        incarnation=batch.incarnation,
        seq=batch.seq,
        records=batch.records,
        models=batch.models,
        tenants=batch.tenants,
        sessions=batch.sessions,
        inventory=batch.inventory,
        more=batch.more,
        part=batch.part,
    )


def event_records_from_proto(message: pb.EventBatch) -> EventRecords:
    """Convert EventRecords; RemoteProtocolError for cut or too many records, or invalid names."""
    size = len(message.records)
    if size % RECORD_BYTES:
        raise RemoteProtocolError(f"batch.records has {size} bytes, not whole records")
    if size > limits.MAX_EVENTS_PER_BATCH * RECORD_BYTES:
        raise RemoteProtocolError(
            f"batch.records has {size // RECORD_BYTES} items, the limit is "
            f"{limits.MAX_EVENTS_PER_BATCH}"
        )
    return EventRecords(
        node_id=NodeId(checked_name(message.node_id, "batch.node_id")),
        incarnation=Incarnation(message.incarnation),
        seq=message.seq,
        records=message.records,
        models=_names(message.models, "batch.models"),
        tenants=_names(message.tenants, "batch.tenants"),
        sessions=_names(message.sessions, "batch.sessions"),
        inventory=message.inventory,
        more=message.more,
        part=message.part,
    )


def _names(names: Sequence[str], field: str) -> tuple[str, ...]:
    """Check a table of names; the table has the empty name in addition to the events' names."""
    check_count(names, limits.MAX_EVENTS_PER_BATCH + 1, field)
    if names and max(map(len, names)) > limits.MAX_NAME_CHARS:
        raise RemoteProtocolError(f"{field} has a name of over {limits.MAX_NAME_CHARS} characters")
    return tuple(names)
