"""Replies of kvwire/v1/meta.proto to values of metaserver/client.py and back, in symmetrical pairs.

The meta server's own part of the conversion (kvwire must not know the values of this room). Bounds
are checked in ``*_from_proto``, as in tierkv.kvwire.convert; locate has a separate file,
wire_locate.py.
"""

from __future__ import annotations

from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Owner
from tierkv.kvcore.errors import RemoteProtocolError, UserError
from tierkv.kvcore.hold import HoldOrder, LeaseId
from tierkv.kvcore.ids import NAMESPACE_KEY_BYTES, NamespaceKey, NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector
from tierkv.kvcore.reuse_policy import ReusePolicy
from tierkv.kvwire.codec import (
    AMOUNT,
    NUMBERS,
    FieldCodec,
    MessageCodec,
    checked_amount,
    checked_key,
    choice,
    choice_or_none,
    one,
)
from tierkv.kvwire.convert import NODE_INFO, NODE_REPORT
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.metaserver.client import (
    BlockListing,
    BlockRecord,
    DirectoryNode,
    Namespace,
    NamespaceGrant,
)
from tierkv.metaserver.directory.leases import cut_keys
from tierkv.metaserver.rpc.wire_locate import checked_chain


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

NAMESPACE: Final = MessageCodec(
    Namespace, pb.Namespace, "namespace", tenants=NUMBERS, policy=_POLICY_FIELD
)
"""The store checks the names, because names are user input."""


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
