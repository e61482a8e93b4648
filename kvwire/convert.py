"""Nouns of kvwire/v1/common.proto to kvcore values and back, in symmetrical pairs.

The only conversion there is: services and clients of every room call these. ``*_from_proto``
checks every bound once, here at the edge, and raises RemoteProtocolError; ``*_to_proto`` trusts
its argument.
"""

from __future__ import annotations

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tierkv.kvcore.location import Location, Replica, Tier
from tierkv.kvcore.node import (
    LoadChoiceStats,
    ModelInfo,
    NodeInfo,
    NodeLoad,
    NodeReport,
    NodeRole,
    PathReport,
    TierStats,
)
from tierkv.kvwire.check import (
    check_count,
    checked_amount,
    checked_choice,
    checked_key,
    checked_name,
)
from tierkv.kvwire.v1 import common_pb2 as pb

_MAX_EOS_IDS = 64
_MAX_TIER_STATS = 4 * limits.MAX_MODELS_PER_NODE
_MAX_ERROR_KINDS = 256
_MAX_LOAD_CHOICES = 16
_LOAD_FIELDS = tuple(NodeLoad.__dataclass_fields__)
_TIER_STATS_FIELDS = tuple(name for name in TierStats.__dataclass_fields__ if name != "tier")


def layout_to_proto(layout: BlockLayout) -> pb.BlockLayout:
    """Convert a BlockLayout."""
    return pb.BlockLayout(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype.value,
        block_tokens=layout.block_tokens,
        codec=codec_to_proto(layout.codec),
        order=layout.order,
    )


def layout_from_proto(message: pb.BlockLayout) -> BlockLayout:
    """Convert a BlockLayout; RemoteProtocolError for a shape no block can have."""
    dtype = checked_choice(KvDtype, message.dtype, "layout.dtype")
    try:
        return BlockLayout(
            layers=message.layers,
            kv_heads=message.kv_heads,
            head_dim=message.head_dim,
            dtype=dtype,
            block_tokens=message.block_tokens,
            codec=codec_from_proto(message.codec, "layout.codec"),
            order=message.order,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"layout: {error}") from error


def codec_to_proto(codec: KvCodec) -> str:
    """Convert a KvCodec; none travels as the empty string."""
    return "" if codec is KvCodec.NONE else codec.value


def codec_from_proto(value: str, name: str) -> KvCodec:
    """Convert a KvCodec; RemoteProtocolError for one that is not known here."""
    return checked_choice(KvCodec, value, name) if value else KvCodec.NONE


def model_info_to_proto(model: ModelInfo) -> pb.ModelInfo:
    """Convert a ModelInfo."""
    return pb.ModelInfo(
        name=model.name,
        folder=model.folder,
        revision=model.revision,
        layout=layout_to_proto(model.layout),
        context_tokens=model.context_tokens,
        eos_token_ids=model.eos_token_ids,
        architecture=model.architecture,
        parameters=model.parameters,
        blend_refusal=model.blend_refusal,
        score_refusal=model.score_refusal,
        embed_refusal=model.embed_refusal,
    )


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    """Convert a ModelInfo; RemoteProtocolError when a bound is broken."""
    check_count(message.eos_token_ids, _MAX_EOS_IDS, "model.eos_token_ids")
    if not 0 < message.context_tokens <= limits.MAX_CONTEXT_TOKENS:
        raise RemoteProtocolError(
            f"model.context_tokens {message.context_tokens} is outside "
            f"[1, {limits.MAX_CONTEXT_TOKENS}]"
        )
    return ModelInfo(
        name=checked_name(message.name, "model.name"),
        folder=message.folder,
        revision=message.revision,
        layout=layout_from_proto(message.layout),
        context_tokens=message.context_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        architecture=message.architecture,
        parameters=message.parameters,
        blend_refusal=message.blend_refusal,
        score_refusal=message.score_refusal,
        embed_refusal=message.embed_refusal,
    )


def node_info_to_proto(info: NodeInfo) -> pb.NodeInfo:
    """Convert a NodeInfo."""
    return pb.NodeInfo(
        node_id=info.node_id,
        incarnation=info.incarnation,
        role=info.role.value,
        host=info.host,
        control_address=info.control_address,
        data_address=info.data_address,
        segment_path=info.segment_path,
        capacity_bytes=info.capacity_bytes,
        models=[model_info_to_proto(model) for model in info.models],
    )


def node_info_from_proto(message: pb.NodeInfo) -> NodeInfo:
    """Convert a NodeInfo; RemoteProtocolError when a bound is broken."""
    check_count(message.models, limits.MAX_MODELS_PER_NODE, "node.models")
    return NodeInfo(
        node_id=NodeId(checked_name(message.node_id, "node.node_id")),
        incarnation=Incarnation(message.incarnation),
        role=checked_choice(NodeRole, message.role, "node.role"),
        host=HostId(checked_name(message.host, "node.host")),
        control_address=message.control_address,
        data_address=message.data_address,
        segment_path=message.segment_path,
        capacity_bytes=message.capacity_bytes,
        models=tuple(model_info_from_proto(model) for model in message.models),
    )


def node_load_to_proto(load: NodeLoad) -> pb.NodeLoad:
    """Convert a NodeLoad."""
    return pb.NodeLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def node_load_from_proto(message: pb.NodeLoad) -> NodeLoad:
    """Convert a NodeLoad; RemoteProtocolError for NaN, infinite or negative rates."""
    fields = {name: getattr(message, name) for name in _LOAD_FIELDS}
    for name, number in fields.items():
        checked_amount(number, f"load.{name}")
    return NodeLoad(**fields)


def tier_stats_to_proto(stats: TierStats) -> pb.TierStats:
    """Convert a TierStats."""
    fields = {name: getattr(stats, name) for name in _TIER_STATS_FIELDS}
    return pb.TierStats(tier=stats.tier.value, **fields)


def tier_stats_from_proto(message: pb.TierStats) -> TierStats:
    """Convert a TierStats; RemoteProtocolError for an unknown tier or impossible times."""
    checked_amount(message.read_time_s, "tiers.read_time_s")
    checked_amount(message.write_time_s, "tiers.write_time_s")
    fields = {name: getattr(message, name) for name in _TIER_STATS_FIELDS}
    return TierStats(tier=checked_choice(Tier, message.tier, "tiers.tier"), **fields)


def path_report_to_proto(path: PathReport) -> pb.PathReport:
    """Convert a PathReport."""
    return pb.PathReport(
        node=path.node, transport=path.transport, reason=path.reason, usable=path.usable
    )


def path_report_from_proto(message: pb.PathReport) -> PathReport:
    """Convert a PathReport; RemoteProtocolError for a name or reason nobody would write."""
    if len(message.reason) > limits.MAX_REASON_CHARS:
        raise RemoteProtocolError(f"paths.reason exceeds {limits.MAX_REASON_CHARS} characters")
    return PathReport(
        node=checked_name(message.node, "paths.node") if message.node else "",
        transport=checked_name(message.transport, "paths.transport"),
        reason=message.reason,
        usable=message.usable,
    )


def load_choice_to_proto(stats: LoadChoiceStats) -> pb.LoadChoiceStats:
    """Convert a LoadChoiceStats."""
    return pb.LoadChoiceStats(
        choice=stats.choice,
        decisions=stats.decisions,
        measured=stats.measured,
        predicted_s=stats.predicted_s,
        actual_s=stats.actual_s,
        error_s=stats.error_s,
    )


def load_choice_from_proto(message: pb.LoadChoiceStats) -> LoadChoiceStats:
    """Convert a LoadChoiceStats; RemoteProtocolError for a bad name or impossible times."""
    return LoadChoiceStats(
        choice=checked_name(message.choice, "load_choices.choice"),
        decisions=message.decisions,
        measured=message.measured,
        predicted_s=checked_amount(message.predicted_s, "load_choices.predicted_s"),
        actual_s=checked_amount(message.actual_s, "load_choices.actual_s"),
        error_s=checked_amount(message.error_s, "load_choices.error_s"),
    )


def node_report_to_proto(report: NodeReport) -> pb.NodeReport:
    """Convert a NodeReport."""
    return pb.NodeReport(
        load=node_load_to_proto(report.load),
        tiers=[tier_stats_to_proto(stats) for stats in report.tiers],
        cache_errors=dict(report.cache_errors),
        transfer_bytes_in=report.transfer_bytes_in,
        transfer_bytes_out=report.transfer_bytes_out,
        transfer_errors=report.transfer_errors,
        paths=[path_report_to_proto(path) for path in report.paths],
        load_choices=[load_choice_to_proto(stats) for stats in report.load_choices],
        notes=report.notes,
    )


def node_report_from_proto(message: pb.NodeReport) -> NodeReport:
    """Convert a NodeReport, its cache errors sorted by kind; RemoteProtocolError beyond bounds."""
    check_count(message.tiers, _MAX_TIER_STATS, "report.tiers")
    check_count(message.cache_errors, _MAX_ERROR_KINDS, "report.cache_errors")
    check_count(message.paths, limits.MAX_NODES, "report.paths")
    check_count(message.load_choices, _MAX_LOAD_CHOICES, "report.load_choices")
    check_count(message.notes, limits.MAX_NOTES, "report.notes")
    if any(len(note) > limits.MAX_REASON_CHARS for note in message.notes):
        raise RemoteProtocolError(f"report.notes exceeds {limits.MAX_REASON_CHARS} characters")
    return NodeReport(
        load=node_load_from_proto(message.load),
        tiers=tuple(tier_stats_from_proto(stats) for stats in message.tiers),
        cache_errors=tuple(sorted(message.cache_errors.items())),
        transfer_bytes_in=message.transfer_bytes_in,
        transfer_bytes_out=message.transfer_bytes_out,
        transfer_errors=message.transfer_errors,
        paths=tuple(path_report_from_proto(path) for path in message.paths),
        load_choices=tuple(load_choice_from_proto(stats) for stats in message.load_choices),
        notes=tuple(message.notes),
    )


def location_to_proto(location: Location) -> pb.Location:
    """Convert a Location."""
    return pb.Location(
        node=location.node,
        incarnation=location.incarnation,
        segment=location.segment,
        slot=location.slot,
        generation=location.generation,
        length=location.length,
    )


def location_from_proto(message: pb.Location) -> Location:
    """Convert a Location; RemoteProtocolError for a slot larger than any may be."""
    if message.length > limits.MAX_SLOT_BYTES:
        raise RemoteProtocolError(
            f"location.length {message.length} exceeds {limits.MAX_SLOT_BYTES}"
        )
    return Location(
        node=NodeId(checked_name(message.node, "location.node")),
        incarnation=Incarnation(message.incarnation),
        segment=message.segment,
        slot=message.slot,
        generation=message.generation,
        length=message.length,
    )


def replica_to_proto(replica: Replica) -> pb.Replica:
    """Convert a Replica."""
    location = None if replica.location is None else location_to_proto(replica.location)
    return pb.Replica(
        key=replica.key,
        node=replica.node,
        host=replica.host,
        tier=replica.tier.value,
        location=location,
    )


def replica_from_proto(message: pb.Replica) -> Replica:
    """Convert a Replica; RemoteProtocolError for a malformed key, tier or location."""
    has_location = message.HasField("location")
    return Replica(
        key=checked_key(message.key, "replica.key"),
        node=NodeId(message.node),
        host=HostId(message.host),
        tier=checked_choice(Tier, message.tier, "replica.tier"),
        location=location_from_proto(message.location) if has_location else None,
    )
