"""Conversions of common.proto's messages and of block events: values of kvcore as messages.

Services and clients of every room use these tables and functions, because nodes of several rooms
describe themselves and send block events; metaserver/rpc/wire.py converts the other messages of
meta.proto. ``from_proto`` checks every bound once, at the edge, and raises RemoteProtocolError;
``to_proto`` trusts its argument. The directory checks the content of single event records, and
refuses records one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.block import Tier
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import Incarnation, NodeId
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tierkv.kvcore.node import (
    LoadChoiceStats,
    ModelInfo,
    NamespaceUsage,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    PathReport,
    TierStats,
)
from tierkv.kvwire.codec import (
    AMOUNT,
    NAME,
    NAME_OR_EMPTY,
    FieldCodec,
    MessageCodec,
    at_most,
    check_count,
    checked_choice,
    checked_name,
    choice,
    many,
    one,
)
from tierkv.kvwire.event_records import RECORD_BYTES, EventRecords
from tierkv.kvwire.v1 import common_pb2 as pb
from tierkv.kvwire.v1 import meta_pb2 as meta_pb

_MAX_EOS_IDS = 64
_MAX_SAMPLING_FIELDS = 64
_MAX_TIER_STATS = 4 * limits.MAX_MODELS_PER_NODE
_MAX_ERROR_KINDS = 256
_MAX_LOAD_CHOICES = 16


def codec_to_proto(codec: KvCodec) -> str:
    """Convert a KvCodec; KvCodec.NONE is sent as the empty string."""
    return "" if codec is KvCodec.NONE else codec.value


def codec_from_proto(value: str, name: str) -> KvCodec:
    """Convert a KvCodec; RemoteProtocolError for an unknown codec."""
    return checked_choice(KvCodec, value, name) if value else KvCodec.NONE


def _context(tokens: int, name: str) -> int:
    if not 0 < tokens <= limits.MAX_CONTEXT_TOKENS:
        raise RemoteProtocolError(f"{name} {tokens} is outside [1, {limits.MAX_CONTEXT_TOKENS}]")
    return tokens


def _reason(text: str, name: str) -> str:
    if len(text) > limits.MAX_REASON_CHARS:
        raise RemoteProtocolError(f"{name} exceeds {limits.MAX_REASON_CHARS} characters")
    return text


def _notes(notes: Sequence[str], name: str) -> tuple[str, ...]:
    check_count(notes, limits.MAX_NOTES, name)
    return tuple([_reason(note, name) for note in notes])


def _errors(counts: Mapping[str, int], name: str) -> tuple[tuple[str, int], ...]:
    check_count(counts, _MAX_ERROR_KINDS, name)
    return tuple(sorted(counts.items()))


LAYOUT: Final = MessageCodec(
    BlockLayout,
    pb.BlockLayout,
    "layout",
    dtype=choice(KvDtype),
    codec=FieldCodec(codec_from_proto, codec_to_proto),
)

MODEL: Final = MessageCodec(
    ModelInfo,
    pb.ModelInfo,
    "model",
    name=NAME,
    layout=one(LAYOUT),
    context_tokens=FieldCodec(_context),
    eos_token_ids=at_most(_MAX_EOS_IDS),
    sampling_fields=at_most(_MAX_SAMPLING_FIELDS),
)

NODE_INFO: Final = MessageCodec(
    NodeInfo,
    pb.NodeInfo,
    "node",
    node_id=NAME,
    role=choice(NodeRole),
    host=NAME,
    zone=NAME_OR_EMPTY,
    models=many(MODEL, limits.MAX_MODELS_PER_NODE),
)

NODE_LOAD: Final = MessageCodec(
    NodeLoad, pb.NodeLoad, "load", **dict.fromkeys(NodeLoad.__dataclass_fields__, AMOUNT)
)

TIER_STATS: Final = MessageCodec(
    TierStats, pb.TierStats, "tiers", tier=choice(Tier), read_time_s=AMOUNT, write_time_s=AMOUNT
)

PATH_REPORT: Final = MessageCodec(
    PathReport,
    pb.PathReport,
    "paths",
    node=NAME_OR_EMPTY,
    transport=NAME,
    reason=FieldCodec(_reason),
)

LOAD_CHOICE: Final = MessageCodec(
    LoadChoiceStats,
    pb.LoadChoiceStats,
    "load_choices",
    choice=NAME,
    predicted_s=AMOUNT,
    actual_s=AMOUNT,
    error_s=AMOUNT,
)

NAMESPACE_USAGE: Final = MessageCodec(NamespaceUsage, pb.NamespaceUsage, "namespaces", name=NAME)

NODE_REPORT: Final = MessageCodec(
    NodeReport,
    pb.NodeReport,
    "report",
    load=one(NODE_LOAD),
    tiers=many(TIER_STATS, _MAX_TIER_STATS),
    cache_errors=FieldCodec(_errors, dict),
    paths=many(PATH_REPORT, limits.MAX_NODES),
    load_choices=many(LOAD_CHOICE, _MAX_LOAD_CHOICES),
    notes=FieldCodec(_notes),
    namespaces=many(NAMESPACE_USAGE, limits.MAX_LIMITED_NAMESPACES),
)


def event_records_to_proto(batch: EventRecords) -> meta_pb.EventBatch:
    """Convert EventRecords."""
    return meta_pb.EventBatch(
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


def event_records_from_proto(message: meta_pb.EventBatch) -> EventRecords:
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
