"""Every value survives kvwire: to proto, to bytes, and back, for all messages of kvwire/v1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Owner, Tier
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NamespaceKey, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype
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
from tierkv.kvcore.request import (
    Blend,
    BlendSelector,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    ReuseHint,
    ReusePolicy,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from tierkv.kvwire import convert, convert_compute
from tierkv.kvwire.codec import MessageCodec
from tierkv.kvwire.event_records import RECORD_BYTES, EventRecords
from tierkv.kvwire.v1 import common_pb2, compute_pb2, meta_pb2
from tierkv.metaserver.client import (
    BlockListing,
    BlockRecord,
    DirectoryNode,
    LocateReply,
    Namespace,
    NamespaceGrant,
    NodeCoverage,
)
from tierkv.metaserver.directory.copy_table import Places
from tierkv.metaserver.directory.leases import cut_keys
from tierkv.metaserver.directory.locate_reply import (
    ListedReplicas,
    ReplicaColumns,
    ReplicaHolder,
    chain_of,
)
from tierkv.metaserver.rpc import wire

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.from_regex(limits.NAME_PATTERN, fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AMOUNTS = st.floats(0, 1e15, allow_nan=False)
KEYS = st.binary(min_size=16, max_size=16).map(BlockKey)
TOKENS = st.lists(U32, max_size=6).map(tuple)

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 256),
    kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 128),
    dtype=st.sampled_from(KvDtype),
    block_tokens=st.integers(1, 128),
    order=st.sampled_from(["", "vllm-hnd-1"]),
)
MODELS = st.builds(
    ModelInfo,
    name=NAMES,
    folder=TEXTS,
    revision=TEXTS,
    layout=LAYOUTS,
    context_tokens=st.integers(1, limits.MAX_CONTEXT_TOKENS),
    eos_token_ids=TOKENS,
    architecture=TEXTS,
    parameters=U64,
    score_refusal=TEXTS,
    embed_refusal=TEXTS,
    sampling_fields=st.lists(TEXTS, max_size=3).map(tuple),
)
NODES = st.builds(
    NodeInfo,
    node_id=NAMES.map(NodeId),
    incarnation=U64.map(Incarnation),
    role=st.sampled_from(NodeRole),
    host=NAMES.map(HostId),
    control_address=TEXTS,
    data_address=TEXTS,
    segment_path=TEXTS,
    capacity_bytes=U64,
    models=st.lists(MODELS, max_size=2).map(tuple),
)
LOADS = st.builds(
    NodeLoad,
    **{
        name: U64 if field.type == "int" else AMOUNTS
        for name, field in NodeLoad.__dataclass_fields__.items()
    },
)
COUNTERS = {
    name: AMOUNTS if name.endswith("_s") else TEXTS if name in ("medium", "model") else U64
    for name in TierStats.__dataclass_fields__
    if name != "tier"
}
TIER_STATS = st.builds(TierStats, tier=st.sampled_from(Tier), **COUNTERS)
REPORTS = st.builds(
    NodeReport,
    load=LOADS,
    tiers=st.lists(TIER_STATS, max_size=2).map(tuple),
    cache_errors=st.dictionaries(NAMES, U64, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    transfer_bytes_in=U64,
    transfer_bytes_out=U64,
    transfer_errors=U64,
    paths=st.lists(
        st.builds(PathReport, st.just("") | NAMES, NAMES, TEXTS, usable=st.booleans()), max_size=2
    ).map(tuple),
    load_choices=st.lists(
        st.builds(LoadChoiceStats, NAMES, U64, U64, AMOUNTS, AMOUNTS, AMOUNTS), max_size=2
    ).map(tuple),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
)
BATCHES = st.builds(
    EventRecords,
    node_id=NAMES.map(NodeId),
    incarnation=U64.map(Incarnation),
    seq=U64,
    records=st.integers(0, 4).map(lambda count: bytes(range(RECORD_BYTES)) * count),
    models=st.lists(TEXTS, max_size=3).map(tuple),
    tenants=st.lists(TEXTS, max_size=3).map(tuple),
    sessions=st.lists(TEXTS, max_size=3).map(tuple),
    inventory=st.booleans(),
    more=st.booleans(),
    part=U32,
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    max_tokens=st.integers(1, limits.MAX_COMPLETION_TOKENS),
    stop_token_ids=TOKENS,
    seed=st.none() | U64,
    ignore_eos=st.booleans(),
    top_k=st.integers(0, limits.MAX_TOP_K),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 2, exclude_min=True),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 1),
    logprobs=st.none() | st.integers(0, limits.MAX_TOP_LOGPROBS),
)


@st.composite
def _blends(draw: st.DrawFn, tokens: int) -> Blend:
    bounds = sorted(draw(st.sets(st.integers(0, tokens), max_size=6)))
    return Blend(
        tuple(zip(bounds[:-1:2], bounds[1::2], strict=False)),
        draw(st.floats(0.01, 1.0)),
        draw(st.sampled_from(BlendSelector)),
        draw(st.booleans()),
    )


HINTS = st.builds(
    ReuseHint,
    next_turn=st.none() | st.booleans(),
    next_turn_s=st.none() | AMOUNTS,
    pending_calls=st.integers(0, 2**32 - 1),
    pending_tokens=st.integers(0, 2**32 - 1),
)
FORMS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"guide": TEXTS}),
    st.fixed_dictionaries({"score_token_ids": TOKENS}),
    st.fixed_dictionaries({"embed": st.booleans()}),
)
LOG_CHANCES = st.floats(-1e300, 0, allow_nan=False)
FLOATS = st.floats(-1, 1, width=32)


@st.composite
def _requests(draw: st.DrawFn) -> GenerateRequest:
    token_ids = draw(st.lists(U32, min_size=1, max_size=8).map(tuple))
    return GenerateRequest(
        request_id=RequestId(draw(NAMES)),
        model=draw(TEXTS),
        token_ids=token_ids,
        namespace_key=NamespaceKey(draw(st.binary(min_size=32, max_size=32))),
        tenant=draw(NAMES),
        sampling=draw(SAMPLINGS),
        session_id=draw(st.none() | NAMES),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        use_cache=draw(st.booleans()),
        handoff=draw(st.booleans()),
        resumed_tokens=draw(st.integers(0, len(token_ids))),
        blend=draw(st.none() | _blends(len(token_ids))),
        kv_codec=draw(st.none() | st.sampled_from(KvCodec)),
        prepared_for=draw(st.just("") | NAMES),
        hint=draw(st.none() | HINTS),
        **draw(FORMS),
    )


LOGPROBS = st.builds(
    TokenLogprobs,
    FLOATS,
    st.lists(st.tuples(st.integers(0, 2**32 - 1), FLOATS), max_size=3).map(tuple),
)


def _event(tokens: list[tuple[int, TokenLogprobs]], reports: bool, **fields: Any) -> GenerateEvent:
    """Make an event whose tokens all have log-probabilities, or none."""
    ids = tuple(token for token, _ in tokens)
    return GenerateEvent(ids, logprobs=tuple(one for _, one in tokens) * reports, **fields)


USAGES = st.builds(
    Usage,
    U64,
    U64,
    st.builds(HitTokens, U64, U64, U64, U64),
    U64,
    st.sampled_from(KvCodec),
    U64,
    U64,
    st.none() | st.sampled_from(BlendSelector),
    st.booleans(),
)
ANSWERS = st.builds(
    _event,
    tokens=st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROBS), max_size=4),
    reports=st.booleans(),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | USAGES,
    node_id=TEXTS,
    queue_s=AMOUNTS,
    ttft_s=AMOUNTS,
    published_tokens=U64,
    scores=st.lists(LOG_CHANCES, max_size=4).map(tuple),
    embedding=st.lists(FLOATS, max_size=4).map(tuple),
)
POLICIES = st.builds(
    ReusePolicy,
    kv_codec=st.none() | st.sampled_from(KvCodec),
    blend=st.booleans(),
    recompute_ratio=st.floats(0.01, 1.0),
    selector=st.sampled_from(BlendSelector),
    gradual=st.booleans(),
)
GRANTS = st.builds(
    NamespaceGrant,
    namespace_key=st.binary(min_size=32, max_size=32).map(NamespaceKey),
    domain=TEXTS,
    cache_enabled=st.booleans(),
    policy=POLICIES,
)
NODE_STATES = st.builds(DirectoryNode, NODES, REPORTS, AMOUNTS, TEXTS)
RECORDS = st.builds(
    BlockRecord,
    block=st.builds(
        BlockSpec,
        key=KEYS,
        parent=KEYS,
        tokens=U32,
        owner=st.builds(Owner, model=TEXTS, tenant=TEXTS, session=TEXTS),
    ),
    node_id=NAMES.map(NodeId),
    tier=TEXTS,
    size_bytes=U64,
    age_s=AMOUNTS,
    idle_s=AMOUNTS,
    hits=U64,
    heat=AMOUNTS,
    leases=U32,
)
ORDERS = st.builds(HoldOrder, U64.map(LeaseId), st.lists(KEYS, max_size=3).map(tuple), AMOUNTS)
LISTINGS = st.builds(BlockListing, st.lists(RECORDS, max_size=2).map(tuple), U64)
NAMESPACES = st.builds(
    Namespace, TEXTS, st.lists(TEXTS, max_size=3).map(tuple), st.booleans(), POLICIES
)

ROUND_TRIPS: list[tuple[st.SearchStrategy[Any], Callable[..., Any], Callable[..., Any]]] = [
    (LAYOUTS, convert.LAYOUT.to_proto, convert.LAYOUT.from_proto),
    (MODELS, convert.MODEL.to_proto, convert.MODEL.from_proto),
    (NODES, convert.NODE_INFO.to_proto, convert.NODE_INFO.from_proto),
    (LOADS, convert.NODE_LOAD.to_proto, convert.NODE_LOAD.from_proto),
    (TIER_STATS, convert.TIER_STATS.to_proto, convert.TIER_STATS.from_proto),
    (REPORTS, convert.NODE_REPORT.to_proto, convert.NODE_REPORT.from_proto),
    (BATCHES, convert.event_records_to_proto, convert.event_records_from_proto),
    (SAMPLINGS, convert_compute.sampling_to_proto, convert_compute.sampling_from_proto),
    (
        _requests(),
        convert_compute.generate_request_to_proto,
        convert_compute.generate_request_from_proto,
    ),
    (USAGES, convert_compute.usage_to_proto, convert_compute.usage_from_proto),
    (ANSWERS, convert_compute.generate_event_to_proto, convert_compute.generate_event_from_proto),
    (GRANTS, wire.GRANT.to_proto, wire.GRANT.from_proto),
    (NODE_STATES, wire.NODE_STATE.to_proto, wire.NODE_STATE.from_proto),
    (RECORDS, wire.block_record_to_proto, wire.block_record_from_proto),
    (ORDERS, wire.hold_order_to_proto, wire.hold_order_from_proto),
    (LISTINGS, wire.listing_to_proto, wire.listing_from_proto),
    (NAMESPACES, wire.NAMESPACE.to_proto, wire.NAMESPACE.from_proto),
]


def _name(to_proto: Callable[..., Any]) -> str:
    if isinstance(table := getattr(to_proto, "__self__", None), MessageCodec):
        return table.label
    return to_proto.__name__.removesuffix("_to_proto")


@pytest.mark.parametrize(
    ("values", "to_proto", "from_proto"),
    ROUND_TRIPS,
    ids=[_name(to_proto) for _, to_proto, _ in ROUND_TRIPS],
)
@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_values_survive_the_wire(
    values: st.SearchStrategy[Any],
    to_proto: Callable[..., Any],
    from_proto: Callable[..., Any],
    data: st.DataObject,
) -> None:
    value = data.draw(values)
    message = to_proto(value)
    assert from_proto(type(message).FromString(message.SerializeToString())) == value


def test_every_field_of_every_value_travels() -> None:
    """A field that is added to a dataclass but forgotten in its conversion is found here."""
    kinds = (BlockLayout, ModelInfo, NodeInfo, NodeLoad, TierStats, NodeReport)
    kinds += (SamplingParams, GenerateRequest, GenerateEvent)
    kinds += (NodeCoverage, NamespaceGrant, DirectoryNode, BlockRecord, Namespace, HoldOrder)
    for kind in kinds:
        (message,) = (
            getattr(module, kind.__name__)
            for module in (common_pb2, compute_pb2, meta_pb2)
            if kind.__name__ in module.DESCRIPTOR.message_types_by_name
        )
        fields = set(kind.__dataclass_fields__)
        if kind is BlockRecord:
            unknown = {"ranges", "outlook"}  # To the directory.
            fields = fields - {"block"} | set(BlockSpec.__dataclass_fields__) - unknown
            fields = fields - {"owner"} | set(Owner.__dataclass_fields__)
        assert fields == set(message.DESCRIPTOR.fields_by_name), kind


@given(st.lists(KEYS, max_size=20))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_chain_of_keys_survives_the_wire(keys: list[BlockKey]) -> None:
    assert cut_keys(wire.checked_chain(chain_of(keys))) == tuple(keys)


@st.composite
def _locate_replies(draw: st.DrawFn) -> tuple[bytes, LocateReply]:
    """A reply as the directory makes it, with the chain it answers."""
    keys = draw(st.lists(KEYS, max_size=4))
    holders = st.builds(
        ReplicaHolder, NAMES.map(NodeId), NAMES.map(HostId), st.sampled_from(Tier), U64
    )
    some = draw(st.lists(holders, min_size=1, max_size=3).map(tuple))
    prefix = draw(st.integers(0, len(keys)))
    counts = draw(st.lists(st.integers(1, 3), min_size=prefix, max_size=prefix))

    def column(values: st.SearchStrategy[int], kind: str) -> Any:
        size = sum(counts)
        return np.array(draw(st.lists(values, min_size=size, max_size=size)), kind)

    sizes = st.integers(0, limits.MAX_SLOT_BYTES)
    places = Places(column(U64, "u8"), column(U32, "u4"), column(sizes, "u4"), column(U32, "u4"))
    columns = ReplicaColumns(
        np.array(counts, "i8"), column(st.integers(0, len(some) - 1), "i8"), places, some
    )
    chain = chain_of(keys)
    coverage = draw(st.lists(st.builds(NodeCoverage, NAMES.map(NodeId), U32, U32), max_size=3))
    return chain, LocateReply(
        ListedReplicas(chain, columns) if prefix else (),
        tuple(coverage),
        prefix_blocks=prefix,
        memory_blocks=draw(st.integers(0, prefix)),
        lease=draw(U64.map(LeaseId)),
    )


@given(_locate_replies())
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_locate_replies_survive_the_wire(case: tuple[bytes, LocateReply]) -> None:
    chain, reply = case
    raw = wire.locate_reply_to_proto(reply).SerializeToString()
    message = meta_pb2.LocateReply.FromString(raw)
    assert wire.locate_reply_from_proto(message, chain) == reply
