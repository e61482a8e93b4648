"""What a peer may not send is refused by name, once, at the edge."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ContextTooLongError, RemoteProtocolError, UserError
from tierkv.kvcore.ids import NamespaceKey, RequestId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import NodeReport
from tierkv.kvcore.request import GenerateRequest, SamplingParams
from tierkv.kvwire import convert, convert_compute
from tierkv.kvwire.event_records import RECORD_BYTES
from tierkv.kvwire.v1 import common_pb2, compute_pb2, meta_pb2
from tierkv.metaserver.rpc import wire

KEY = bytes(16)
LAYOUT = common_pb2.BlockLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=1)
MODEL = common_pb2.ModelInfo(name="m", layout=LAYOUT, context_tokens=8)
PATH = common_pb2.PathReport(transport="tcp")
NODE = common_pb2.NodeInfo(node_id="n", role="dmp", host="h")
REQUEST = compute_pb2.GenerateRequest(
    request_id="r",
    token_ids=[1],
    namespace_key=bytes(32),
    tenant="t",
    sampling=compute_pb2.SamplingParams(top_p=1.0, max_tokens=1),
)


def changed(message: Any, **fields: Any) -> Any:
    """Return a copy of ``message`` with other fields."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy


def column(kind: str, *numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


BROKEN: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("dtype", convert.LAYOUT.from_proto, changed(LAYOUT, dtype="int3")),
    ("codec", convert.LAYOUT.from_proto, changed(LAYOUT, codec="zip")),
    ("layers must be positive", convert.LAYOUT.from_proto, changed(LAYOUT, layers=0)),
    ("exceed the limit", convert.LAYOUT.from_proto, changed(LAYOUT, layers=257)),
    ("exceeds", convert.LAYOUT.from_proto, changed(LAYOUT, head_dim=2**31)),
    ("model.name", convert.MODEL.from_proto, changed(MODEL, name="a b")),
    ("context_tokens", convert.MODEL.from_proto, changed(MODEL, context_tokens=0)),
    ("context_tokens", convert.MODEL.from_proto, changed(MODEL, context_tokens=2**40)),
    ("eos", convert.MODEL.from_proto, changed(MODEL, eos_token_ids=[1] * 65)),
    ("node_id", convert.NODE_INFO.from_proto, changed(NODE, node_id="")),
    ("paths.transport", convert.PATH_REPORT.from_proto, common_pb2.PathReport(transport="a b")),
    (
        "reason",
        convert.PATH_REPORT.from_proto,
        common_pb2.PathReport(transport="tcp", reason="x" * 1025),
    ),
    ("node_id", convert.NODE_INFO.from_proto, changed(NODE, node_id="x" * 129)),
    ("host", convert.NODE_INFO.from_proto, changed(NODE, host="\n")),
    ("role", convert.NODE_INFO.from_proto, changed(NODE, role="king")),
    ("models has 65", convert.NODE_INFO.from_proto, changed(NODE, models=[MODEL] * 65)),
    ("kv_usage", convert.NODE_LOAD.from_proto, common_pb2.NodeLoad(kv_usage=float("nan"))),
    ("l2_bytes", convert.NODE_LOAD.from_proto, common_pb2.NodeLoad(l2_bytes_per_s=-1)),
    ("tier", convert.TIER_STATS.from_proto, common_pb2.TierStats(tier="L9")),
    (
        "read_time_s",
        convert.TIER_STATS.from_proto,
        common_pb2.TierStats(tier="L1", read_time_s=float("inf")),
    ),
    (
        "cache_errors has 257",
        convert.NODE_REPORT.from_proto,
        common_pb2.NodeReport(cache_errors={str(n): 1 for n in range(257)}),
    ),
    (
        "load_choices has 17",
        convert.NODE_REPORT.from_proto,
        common_pb2.NodeReport(load_choices=[common_pb2.LoadChoiceStats(choice="load")] * 17),
    ),
    (
        "notes has 65",
        convert.NODE_REPORT.from_proto,
        common_pb2.NodeReport(notes=["note"] * 65),
    ),
    ("notes", convert.NODE_REPORT.from_proto, common_pb2.NodeReport(notes=["x" * 1025])),
    (
        "load_choices.error_s",
        convert.LOAD_CHOICE.from_proto,
        common_pb2.LoadChoiceStats(choice="load", error_s=-1.0),
    ),
    (
        "not whole records",
        convert.event_records_from_proto,
        meta_pb2.EventBatch(node_id="n", records=bytes(RECORD_BYTES - 1)),
    ),
    (
        "16385 items",
        convert.event_records_from_proto,
        meta_pb2.EventBatch(
            node_id="n", records=bytes(RECORD_BYTES * (limits.MAX_EVENTS_PER_BATCH + 1))
        ),
    ),
    (
        "batch.sessions has a name of over 128",
        convert.event_records_from_proto,
        meta_pb2.EventBatch(node_id="n", sessions=["", "x" * 129]),
    ),
    (
        "batch.models has 16386 items",
        convert.event_records_from_proto,
        meta_pb2.EventBatch(node_id="n", models=[""] * (limits.MAX_EVENTS_PER_BATCH + 2)),
    ),
    ("ttl_s", wire.hold_order_from_proto, meta_pb2.HoldOrder(ttl_s=float("nan"))),
    ("15 bytes", wire.hold_order_from_proto, meta_pb2.HoldOrder(keys=bytes(15))),
    (
        "namespace_key",
        convert_compute.generate_request_from_proto,
        changed(REQUEST, namespace_key=b"x"),
    ),
    ("request_id", convert_compute.generate_request_from_proto, changed(REQUEST, request_id="")),
    ("tenant", convert_compute.generate_request_from_proto, changed(REQUEST, tenant="a b")),
    (
        "resumed_tokens",
        convert_compute.generate_request_from_proto,
        changed(REQUEST, resumed_tokens=2),
    ),
    (
        "finish_reason",
        convert_compute.generate_event_from_proto,
        compute_pb2.GenerateEvent(finish_reason="bored"),
    ),
    (
        "ttft_s",
        convert_compute.generate_event_from_proto,
        compute_pb2.GenerateEvent(ttft_s=float("nan")),
    ),
    (
        "scores",
        convert_compute.generate_event_from_proto,
        compute_pb2.GenerateEvent(scores=[float("-inf")]),
    ),
    (
        "embedding",
        convert_compute.generate_event_from_proto,
        compute_pb2.GenerateEvent(embedding=[float("nan")]),
    ),
    (
        "score_token_ids",
        convert_compute.generate_request_from_proto,
        changed(REQUEST, score_token_ids=[1] * (limits.MAX_SCORED_TOKENS + 1)),
    ),
    ("locate.keys", wire.checked_chain, bytes(17)),
    ("locate.keys", wire.checked_chain, bytes(16 * (limits.MAX_CHAIN_BLOCKS + 1))),
    ("namespace_key", wire.GRANT.from_proto, meta_pb2.NamespaceGrant()),
]


@pytest.mark.parametrize(("reason", "from_proto", "message"), BROKEN)
def test_a_peers_mistake_is_named(
    reason: str, from_proto: Callable[[Any], Any], message: Any
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        from_proto(message)


COLUMNS = meta_pb2.LocateReply(
    replica_counts=column("H", 1, 2),
    holders=[meta_pb2.ReplicaHolder(node="n", host="h", tier="L2")],
    holder=bytes(6),
    segment=bytes(12),
    slot=bytes(12),
    generation=bytes(24),
    length=column("I", 64, 64, 64),
)
THREE = column("H", 3)
LONG = column("I", 0, 0, 1 << 31)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("has 2 items, the limit is 1", COLUMNS),
        ("without a replica", changed(COLUMNS, replica_counts=bytes(2))),
        ("differ in length", changed(COLUMNS, replica_counts=column("H", 2))),
        ("differ in length", changed(COLUMNS, replica_counts=THREE, slot=bytes(4))),
        ("slot is cut", changed(COLUMNS, replica_counts=THREE, slot=bytes(11))),
        ("not there", changed(COLUMNS, replica_counts=THREE, holder=column("H", 0, 0, 1))),
        (
            "length exceeds",
            changed(COLUMNS, replica_counts=THREE, length=column("I", 0, 0, 1 << 31)),
        ),
        ("node", changed(COLUMNS, replica_counts=THREE, holders=[meta_pb2.ReplicaHolder()])),
        ("prefix_blocks is 2 of 1", changed(COLUMNS, prefix_blocks=2)),
        ("prefix_blocks is 0 of 1", changed(COLUMNS, memory_blocks=1)),
    ],
)
def test_a_locate_reply_that_does_not_fit_is_refused(reason: str, message: Any) -> None:
    assert list(map(len, wire.locate_reply_from_proto(COLUMNS, KEY * 2).replicas)) == [1, 2]
    with pytest.raises(RemoteProtocolError, match=reason):
        wire.locate_reply_from_proto(message, KEY)


@pytest.mark.parametrize(
    ("reason", "sampling"),
    [
        ("temperature", {"temperature": 2.5, "top_p": 1.0, "max_tokens": 1}),
        ("temperature", {"temperature": float("nan"), "top_p": 1.0, "max_tokens": 1}),
        ("top_p", {"top_p": 0.0, "max_tokens": 1}),
        ("max_tokens", {"top_p": 1.0}),
    ],
)
def test_sampling_out_of_range_is_the_users_to_change(
    reason: str, sampling: dict[str, float]
) -> None:
    with pytest.raises(UserError, match=reason):
        convert_compute.sampling_from_proto(compute_pb2.SamplingParams(**sampling))


def test_an_empty_prompt_is_the_users_to_change() -> None:
    with pytest.raises(UserError, match="no tokens"):
        convert_compute.generate_request_from_proto(changed(REQUEST, token_ids=[]))


def test_a_prompt_longer_than_any_context_is_refused() -> None:
    too_long = changed(REQUEST, token_ids=[0] * (limits.MAX_CONTEXT_TOKENS + 1))
    with pytest.raises(ContextTooLongError):
        convert_compute.generate_request_from_proto(too_long)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_beyond_64_bits_is_refused_not_folded(seed: int) -> None:
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        token_ids=(1,),
        namespace_key=NamespaceKey(bytes(32)),
        sampling=SamplingParams(seed=seed),
    )
    with pytest.raises(UserError, match="seed"):
        convert_compute.generate_request_to_proto(request)


def test_an_empty_session_id_means_none() -> None:
    assert convert_compute.generate_request_from_proto(REQUEST).session_id is None


def test_describe_replies_carry_info_and_report() -> None:
    info = convert.NODE_INFO.from_proto(NODE)
    message = convert_compute.describe_reply_to_proto(info, NodeReport())
    assert convert_compute.describe_reply_from_proto(message) == (info, NodeReport())


def test_layout_bounds_are_those_of_the_noun() -> None:
    layout = BlockLayout(layers=256, kv_heads=8, head_dim=128, dtype=KvDtype.BFLOAT16)
    assert convert.LAYOUT.from_proto(convert.LAYOUT.to_proto(layout)) == layout


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("schema", changed(REQUEST, guide="x" * (limits.MAX_SCHEMA_CHARS + 1))),
        ("one of", changed(REQUEST, guide="{}", embed=True)),
        ("one of", changed(REQUEST, score_token_ids=[1], embed=True)),
    ],
)
def test_a_form_of_answer_nobody_gives_is_the_users_mistake(reason: str, message: Any) -> None:
    with pytest.raises(UserError, match=reason):
        convert_compute.generate_request_from_proto(message)
