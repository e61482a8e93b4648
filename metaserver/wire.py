"""Replies of kvwire/v1/meta.proto to metaserver.client values and back, in symmetrical pairs.

The meta server's own part of the conversion (kvwire must not know this room's values). Like
kvwire.convert it checks bounds in ``*_from_proto`` and trusts in ``*_to_proto``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore import limits
from kvcore.errors import LocalProtocolError, RemoteProtocolError
from kvcore.ids import BLOCK_KEY_BYTES, NAMESPACE_KEY_BYTES, BlockKey, NamespaceKey, NodeId
from kvwire.check import check_count, checked_amount, checked_key
from kvwire.convert import (
    node_info_from_proto,
    node_info_to_proto,
    node_report_from_proto,
    node_report_to_proto,
    replica_from_proto,
    replica_to_proto,
)
from kvwire.v1 import meta_pb2 as pb
from metaserver.client import (
    BlockListing,
    BlockRecord,
    LocateReply,
    Namespace,
    NamespaceGrant,
    NodeCoverage,
    NodeState,
)


def keys_to_bytes(keys: Sequence[BlockKey]) -> bytes:
    """Concatenate a chain's keys; LocalProtocolError when it is longer than a locate may be."""
    if len(keys) > limits.MAX_CHAIN_BLOCKS:
        raise LocalProtocolError(
            f"a locate of {len(keys)} blocks; at most {limits.MAX_CHAIN_BLOCKS} go in one call"
        )
    return b"".join(keys)


def keys_from_bytes(raw: bytes) -> list[BlockKey]:
    """Cut concatenated keys apart; RemoteProtocolError for a broken or over-long chain."""
    if len(raw) % BLOCK_KEY_BYTES or len(raw) > limits.MAX_CHAIN_BLOCKS * BLOCK_KEY_BYTES:
        raise RemoteProtocolError(
            f"locate.keys has {len(raw)} bytes; it must be at most {limits.MAX_CHAIN_BLOCKS} keys "
            f"of {BLOCK_KEY_BYTES}"
        )
    return [
        BlockKey(raw[start : start + BLOCK_KEY_BYTES])
        for start in range(0, len(raw), BLOCK_KEY_BYTES)
    ]


def locate_reply_to_proto(reply: LocateReply) -> pb.LocateReply:
    """Convert a LocateReply."""
    return pb.LocateReply(
        prefix_blocks=reply.prefix_blocks,
        blocks=[
            pb.BlockReplicas(replicas=[replica_to_proto(replica) for replica in replicas])
            for replicas in reply.replicas
        ],
        coverage=[
            pb.NodeCoverage(node_id=c.node_id, l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
            for c in reply.coverage
        ],
    )


def locate_reply_from_proto(message: pb.LocateReply) -> LocateReply:
    """Convert a LocateReply; RemoteProtocolError when a block of the prefix has no replica."""
    check_count(message.blocks, limits.MAX_CHAIN_BLOCKS, "locate.blocks")
    check_count(message.coverage, limits.MAX_NODES, "locate.coverage")
    if any(not block.replicas for block in message.blocks):
        raise RemoteProtocolError("locate.blocks names a block without a replica")
    return LocateReply(
        replicas=tuple(
            tuple(replica_from_proto(replica) for replica in block.replicas)
            for block in message.blocks
        ),
        coverage=tuple(
            NodeCoverage(NodeId(c.node_id), l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
            for c in message.coverage
        ),
    )


def grant_to_proto(grant: NamespaceGrant) -> pb.NamespaceGrant:
    """Convert a NamespaceGrant."""
    return pb.NamespaceGrant(
        namespace_key=grant.namespace_key,
        domain=grant.domain,
        cache_enabled=grant.cache_enabled,
    )


def grant_from_proto(message: pb.NamespaceGrant) -> NamespaceGrant:
    """Convert a NamespaceGrant; RemoteProtocolError for a key of the wrong length."""
    if len(message.namespace_key) != NAMESPACE_KEY_BYTES:
        raise RemoteProtocolError(f"grant.namespace_key must have {NAMESPACE_KEY_BYTES} bytes")
    return NamespaceGrant(
        namespace_key=NamespaceKey(message.namespace_key),
        domain=message.domain,
        cache_enabled=message.cache_enabled,
    )


def node_state_to_proto(node: NodeState) -> pb.NodeState:
    """Convert a NodeState."""
    return pb.NodeState(
        info=node_info_to_proto(node.info),
        report=node_report_to_proto(node.report),
        heartbeat_age_s=node.heartbeat_age_s,
        state=node.state,
    )


def node_state_from_proto(message: pb.NodeState) -> NodeState:
    """Convert a NodeState; RemoteProtocolError beyond bounds."""
    return NodeState(
        info=node_info_from_proto(message.info),
        report=node_report_from_proto(message.report),
        heartbeat_age_s=checked_amount(message.heartbeat_age_s, "heartbeat_age_s"),
        state=message.state,
    )


def block_record_to_proto(record: BlockRecord) -> pb.BlockRecord:
    """Convert a BlockRecord."""
    return pb.BlockRecord(
        key=record.key,
        parent=record.parent,
        node_id=record.node_id,
        tier=record.tier,
        tokens=record.tokens,
        size_bytes=record.size_bytes,
        model=record.model,
        tenant=record.tenant,
        age_s=record.age_s,
        idle_s=record.idle_s,
        hits=record.hits,
    )


def block_record_from_proto(message: pb.BlockRecord) -> BlockRecord:
    """Convert a BlockRecord; RemoteProtocolError for malformed keys."""
    return BlockRecord(
        key=checked_key(message.key, "block.key"),
        parent=checked_key(message.parent, "block.parent"),
        node_id=NodeId(message.node_id),
        tier=message.tier,
        tokens=message.tokens,
        size_bytes=message.size_bytes,
        model=message.model,
        tenant=message.tenant,
        age_s=checked_amount(message.age_s, "block.age_s"),
        idle_s=checked_amount(message.idle_s, "block.idle_s"),
        hits=message.hits,
    )


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
        name=namespace.name, tenants=namespace.tenants, cache_enabled=namespace.cache_enabled
    )


def namespace_from_proto(message: pb.Namespace) -> Namespace:
    """Convert a Namespace; its names are checked by the store, for they are a user's input."""
    return Namespace(message.name, tuple(message.tenants), message.cache_enabled)
