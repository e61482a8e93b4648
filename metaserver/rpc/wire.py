"""Replies of kvwire/v1/meta.proto to values of metaserver/client.py and back, in symmetrical pairs.

The meta server's own part of the conversion (kvwire must not know this room's values). Bounds are
checked in ``*_from_proto``, as in tierkv.kvwire.convert; locate has a file of its own,
wire_locate.py.
"""

from __future__ import annotations

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec, Owner
from tierkv.kvcore.errors import RemoteProtocolError, UserError
from tierkv.kvcore.hold import HoldOrder, LeaseId
from tierkv.kvcore.ids import NAMESPACE_KEY_BYTES, NamespaceKey, NodeId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector
from tierkv.kvcore.reuse_policy import ReusePolicy
from tierkv.kvwire.check import checked_amount, checked_choice, checked_key
from tierkv.kvwire.convert import (
    node_info_from_proto,
    node_info_to_proto,
    node_report_from_proto,
    node_report_to_proto,
)
from tierkv.kvwire.v1 import meta_pb2 as pb
from tierkv.metaserver.client import BlockListing, BlockRecord, Namespace, NamespaceGrant, NodeState
from tierkv.metaserver.directory.leases import cut_keys
from tierkv.metaserver.rpc.wire_locate import checked_chain


def policy_to_proto(policy: ReusePolicy) -> pb.ReusePolicy:
    """Convert a ReusePolicy."""
    return pb.ReusePolicy(
        kv_codec="" if policy.kv_codec is None else policy.kv_codec.value,
        blend=policy.blend,
        recompute_ratio=policy.recompute_ratio,
        selector=policy.selector.value,
        gradual=policy.gradual,
    )


def policy_from_proto(message: pb.ReusePolicy) -> ReusePolicy:
    """Convert a ReusePolicy; an empty message is the default, UserError for a bad ratio."""
    if message == pb.ReusePolicy():
        return ReusePolicy()
    codec = message.kv_codec
    try:
        return ReusePolicy(
            kv_codec=checked_choice(KvCodec, codec, "policy.kv_codec") if codec else None,
            blend=message.blend,
            recompute_ratio=message.recompute_ratio,
            selector=checked_choice(BlendSelector, message.selector, "policy.selector"),
            gradual=message.gradual,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def grant_to_proto(grant: NamespaceGrant) -> pb.NamespaceGrant:
    """Convert a NamespaceGrant."""
    return pb.NamespaceGrant(
        namespace_key=grant.namespace_key,
        domain=grant.domain,
        cache_enabled=grant.cache_enabled,
        policy=policy_to_proto(grant.policy),
    )


def grant_from_proto(message: pb.NamespaceGrant) -> NamespaceGrant:
    """Convert a NamespaceGrant; RemoteProtocolError for a key of the wrong length."""
    if len(message.namespace_key) != NAMESPACE_KEY_BYTES:
        raise RemoteProtocolError(f"grant.namespace_key must have {NAMESPACE_KEY_BYTES} bytes")
    return NamespaceGrant(
        namespace_key=NamespaceKey(message.namespace_key),
        domain=message.domain,
        cache_enabled=message.cache_enabled,
        policy=policy_from_proto(message.policy),
    )


def node_state_to_proto(node: NodeState) -> pb.NodeState:
    """Convert a NodeState."""
    return pb.NodeState(
        info=node_info_to_proto(node.info),
        report=node_report_to_proto(node.report),
        heartbeat_age_s=node.heartbeat_age_s,
        state=node.state,
        rival=node.rival,
    )


def node_state_from_proto(message: pb.NodeState) -> NodeState:
    """Convert a NodeState; RemoteProtocolError beyond bounds."""
    return NodeState(
        info=node_info_from_proto(message.info),
        report=node_report_from_proto(message.report),
        heartbeat_age_s=checked_amount(message.heartbeat_age_s, "heartbeat_age_s"),
        state=message.state,
        rival=message.rival[: limits.MAX_REASON_CHARS],
    )


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
    """Convert a HoldOrder; RemoteProtocolError for broken keys or a time that can't be."""
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


def namespace_to_proto(namespace: Namespace) -> pb.Namespace:
    """Convert a Namespace."""
    return pb.Namespace(
        name=namespace.name,
        tenants=namespace.tenants,
        cache_enabled=namespace.cache_enabled,
        policy=policy_to_proto(namespace.policy),
    )


def namespace_from_proto(message: pb.Namespace) -> Namespace:
    """Convert a Namespace; its names are checked by the store, for they are a user's input."""
    policy = policy_from_proto(message.policy)
    return Namespace(message.name, tuple(message.tenants), message.cache_enabled, policy)
