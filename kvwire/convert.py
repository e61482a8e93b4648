"""Tables of kvwire/v1/common.proto: values of kvcore as messages.

Services and clients of every room use these tables; there is no other conversion of these messages.
``from_proto`` checks every bound once, at the edge, and raises RemoteProtocolError; ``to_proto``
trusts its argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
from tierkv.kvcore.location import Tier
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
from tierkv.kvwire.check import check_count, checked_choice
from tierkv.kvwire.codec import (
    AMOUNT,
    NAME,
    NAME_OR_EMPTY,
    FieldCodec,
    MessageCodec,
    at_most,
    choice,
    many,
    one,
)
from tierkv.kvwire.v1 import common_pb2 as pb

_MAX_EOS_IDS = 64
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
)

NODE_INFO: Final = MessageCodec(
    NodeInfo,
    pb.NodeInfo,
    "node",
    node_id=NAME,
    role=choice(NodeRole),
    host=NAME,
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
)
