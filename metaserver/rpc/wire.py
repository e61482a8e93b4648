"""Messages of kvwire/v1/meta.proto: values of metaserver/client.py and back, in symmetric pairs.

The meta server's own part of the conversion (kvwire must not know the values of this room), called
by both sides of the RPC. Bounds are checked in ``*_from_proto``, as in tierkv.kvwire.convert.
Locate is the hot path, hence columns of raw numbers; a reply does not repeat the keys, so reading a
reply takes the requested chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Owner, Tier
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.errors import RemoteProtocolError, UserError
from tierkv.kvcore.ids import (
    BLOCK_KEY_BYTES,
    NAMESPACE_KEY_BYTES,
    HostId,
    Incarnation,
    NamespaceKey,
    NodeId,
)
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector, ReusePolicy
from tierkv.kvwire.codec import (
    AMOUNT,
    NUMBERS,
    FieldCodec,
    MessageCodec,
    check_count,
    checked_amount,
    checked_choice,
    checked_key,
    checked_name,
    choice,
    choice_or_none,
    one,
)
from tierkv.kvwire.convert import NODE_INFO, NODE_REPORT
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.metaserver.client import (
    BlockListing,
    BlockRecord,
    ClusterRecord,
    DirectoryNode,
    KvLimits,
    LocateReply,
    Namespace,
    NamespaceGrant,
    NodeCoverage,
)
from tierkv.metaserver.directory.copy_table import Places
from tierkv.metaserver.directory.leases import cut_keys
from tierkv.metaserver.directory.locate_reply import ListedReplicas, ReplicaColumns, ReplicaHolder

_U2: Final = np.dtype("<u2")
_U4: Final = np.dtype("<u4")
_U8: Final = np.dtype("<u8")


def _policy_from_proto(message: pb.ReusePolicy, name: str) -> ReusePolicy:
    """Convert a policy; an empty message is the default."""
    return ReusePolicy() if message == pb.ReusePolicy() else POLICY.from_proto(message)


def _namespace_key(raw: bytes, name: str) -> NamespaceKey:
    if len(raw) != NAMESPACE_KEY_BYTES:
        raise RemoteProtocolError(f"{name} must have {NAMESPACE_KEY_BYTES} bytes")
    return NamespaceKey(raw)


POLICY: Final = MessageCodec(
    ReusePolicy,
    pb.ReusePolicy,
    "policy",
    UserError,
    kv_codec=choice_or_none(KvCodec),
    selector=choice(BlendSelector),
)
"""UserError for a bad ratio."""

_POLICY_FIELD: Final = FieldCodec(_policy_from_proto, POLICY.to_proto)

GRANT: Final = MessageCodec(
    NamespaceGrant,
    pb.NamespaceGrant,
    "grant",
    namespace_key=FieldCodec(_namespace_key),
    policy=_POLICY_FIELD,
)

NODE_STATE: Final = MessageCodec(
    DirectoryNode,
    pb.DirectoryNode,
    "node_state",
    info=one(NODE_INFO),
    report=one(NODE_REPORT),
    heartbeat_age_s=AMOUNT,
    rival=FieldCodec(lambda text, name: text[: limits.MAX_REASON_CHARS]),
)

LIMITS: Final = MessageCodec(KvLimits, pb.KvLimits, "limits")
"""The store checks the numbers, because they are user input."""


def _limits_from_proto(message: pb.KvLimits, name: str) -> KvLimits | None:
    return None if message == pb.KvLimits() else LIMITS.from_proto(message)


def _limits_to_proto(value: KvLimits | None) -> pb.KvLimits | None:
    return None if value is None else LIMITS.to_proto(value)


NAMESPACE: Final = MessageCodec(
    Namespace,
    pb.Namespace,
    "namespace",
    tenants=NUMBERS,
    policy=_POLICY_FIELD,
    limits=FieldCodec(_limits_from_proto, _limits_to_proto),
)
"""The store checks the names, because names are user input."""


RECORD: Final = MessageCodec(ClusterRecord, pb.Record, "record")
"""The store checks names and sizes."""


def block_record_to_proto(record: BlockRecord) -> pb.BlockRecord:
    """Convert a BlockRecord."""
    block = record.block
    return pb.BlockRecord(
        key=block.key,
        parent=block.parent,
        node_id=record.node_id,
        tier=record.tier,
        tokens=block.tokens,
        size_bytes=record.size_bytes,
        model=block.owner.model,
        tenant=block.owner.tenant,
        age_s=record.age_s,
        idle_s=record.idle_s,
        hits=record.hits,
        session=block.owner.session,
        heat=record.heat,
        leases=record.leases,
    )


def block_record_from_proto(message: pb.BlockRecord) -> BlockRecord:
    """Convert a BlockRecord; RemoteProtocolError for malformed keys."""
    return BlockRecord(
        block=BlockSpec(
            checked_key(message.key, "block.key"),
            checked_key(message.parent, "block.parent"),
            message.tokens,
            owner=Owner(message.model, message.tenant, message.session),
        ),
        node_id=NodeId(message.node_id),
        tier=message.tier,
        size_bytes=message.size_bytes,
        age_s=checked_amount(message.age_s, "block.age_s"),
        idle_s=checked_amount(message.idle_s, "block.idle_s"),
        hits=message.hits,
        heat=checked_amount(message.heat, "block.heat"),
        leases=message.leases,
    )


def hold_order_to_proto(order: HoldOrder) -> pb.HoldOrder:
    """Convert a HoldOrder."""
    return pb.HoldOrder(lease=order.lease, keys=b"".join(order.keys), ttl_s=order.ttl_s)


def hold_order_from_proto(message: pb.HoldOrder) -> HoldOrder:
    """Convert a HoldOrder; RemoteProtocolError for broken keys or an invalid time."""
    keys = cut_keys(checked_chain(message.keys))
    ttl_s = checked_amount(message.ttl_s, "hold.ttl_s")
    return HoldOrder(LeaseId(message.lease), keys, ttl_s)


def listing_to_proto(listing: BlockListing) -> pb.ListBlocksReply:
    """Convert a BlockListing."""
    blocks = [block_record_to_proto(record) for record in listing.blocks]
    return pb.ListBlocksReply(blocks=blocks, total=listing.total)


def listing_from_proto(message: pb.ListBlocksReply) -> BlockListing:
    """Convert a BlockListing."""
    return BlockListing(tuple(map(block_record_from_proto, message.blocks)), message.total)


def checked_chain(raw: bytes) -> bytes:
    """Return concatenated keys; RemoteProtocolError for a broken or over-long chain."""
    if len(raw) % BLOCK_KEY_BYTES or len(raw) > limits.MAX_CHAIN_BLOCKS * BLOCK_KEY_BYTES:
        raise RemoteProtocolError(
            f"locate.keys has {len(raw)} bytes; it must be at most {limits.MAX_CHAIN_BLOCKS} keys "
            f"of {BLOCK_KEY_BYTES}"
        )
    return raw


def locate_reply_to_proto(reply: LocateReply) -> pb.LocateReply:
    """Convert a LocateReply in the form made by the directory."""
    message = pb.LocateReply(
        coverage=[
            pb.NodeCoverage(node_id=c.node_id, l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
            for c in reply.coverage
        ],
        prefix_blocks=reply.prefix_blocks,
        memory_blocks=reply.memory_blocks,
        lease=reply.lease,
    )
    if isinstance(reply.replicas, ListedReplicas):
        _put_columns(message, reply.replicas.columns)
    else:
        assert not reply.replicas, "replicas come in columns"
    return message


def locate_reply_from_proto(message: pb.LocateReply, chain: bytes) -> LocateReply:
    """Convert the reply to a locate of ``chain``; RemoteProtocolError for inconsistent columns."""
    check_count(message.coverage, limits.MAX_NODES, "locate.coverage")
    blocks = len(chain) // BLOCK_KEY_BYTES
    if not message.memory_blocks <= message.prefix_blocks <= blocks:
        raise RemoteProtocolError(f"locate.prefix_blocks is {message.prefix_blocks} of {blocks}")
    counted_only = not message.replica_counts and not message.holder
    columns = None if counted_only else _columns(message, blocks)
    return LocateReply(
        replicas=() if columns is None else ListedReplicas(chain, columns),
        coverage=tuple(
            [
                NodeCoverage(NodeId(c.node_id), l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
                for c in message.coverage
            ]
        ),
        prefix_blocks=message.prefix_blocks,
        memory_blocks=message.memory_blocks,
        lease=LeaseId(message.lease),
    )


def locate_replies_from_proto(
    message: pb.LocateManyReply, chains: Sequence[bytes]
) -> list[LocateReply]:
    """Convert the replies to a locate of ``chains``; RemoteProtocolError if inconsistent."""
    if len(message.replies) != len(chains):
        raise RemoteProtocolError(f"{len(message.replies)} replies to {len(chains)} chains")
    return [
        locate_reply_from_proto(reply, chain)
        for reply, chain in zip(message.replies, chains, strict=True)
    ]


def _put_columns(message: pb.LocateReply, columns: ReplicaColumns) -> None:
    places = columns.places
    message.replica_counts = columns.counts.astype(_U2).tobytes()
    message.holder = columns.holder.astype(_U2).tobytes()
    message.segment = places.segments.astype(_U4, copy=False).tobytes()
    message.slot = places.slots.astype(_U4, copy=False).tobytes()
    message.generation = places.generations.astype(_U8, copy=False).tobytes()
    message.length = places.lengths.astype(_U4, copy=False).tobytes()
    for holder in columns.holders:
        message.holders.add(
            node=holder.node,
            host=holder.host,
            tier=holder.tier.value,
            incarnation=holder.incarnation,
        )


def _columns(message: pb.LocateReply, blocks: int) -> ReplicaColumns:
    counts = _column(message.replica_counts, _U2, "replica_counts").astype(np.int64)
    holder = _column(message.holder, _U2, "holder").astype(np.int64)
    places = Places(
        generations=_column(message.generation, _U8, "generation"),
        slots=_column(message.slot, _U4, "slot"),
        lengths=_column(message.length, _U4, "length"),
        segments=_column(message.segment, _U4, "segment"),
    )
    check_count(counts, blocks, "locate.replica_counts")
    if len(counts) and not counts.min():
        raise RemoteProtocolError("locate.replica_counts has a block without a replica")
    sizes = {len(holder), len(places.generations), len(places.slots)}
    if sizes | {len(places.lengths), len(places.segments)} != {int(counts.sum())}:
        raise RemoteProtocolError("locate's columns differ in length")
    if len(holder) and int(holder.max()) >= len(message.holders):
        raise RemoteProtocolError("locate.holder names a holder that is not there")
    if len(holder) and int(places.lengths.max()) > limits.MAX_SLOT_BYTES:
        raise RemoteProtocolError(f"locate.length exceeds {limits.MAX_SLOT_BYTES}")
    return ReplicaColumns(counts, holder, places, tuple(map(_holder, message.holders)))


def _column(raw: bytes, kind: np.dtype[Any], name: str) -> NDArray[Any]:
    if len(raw) % kind.itemsize:
        raise RemoteProtocolError(f"locate.{name} is cut: {len(raw)} bytes")
    return np.frombuffer(raw, kind)


def _holder(message: pb.ReplicaHolder) -> ReplicaHolder:
    return ReplicaHolder(
        NodeId(checked_name(message.node, "locate.holders.node")),
        HostId(checked_name(message.host, "locate.holders.host")),
        checked_choice(Tier, message.tier, "locate.holders.tier"),
        Incarnation(message.incarnation),
    )
