"""Locate's request and reply to values and back: the hot path, so in columns.

Called by metaserver/service.py and metaserver/grpc_client.py. A reply does not repeat the keys, so
reading one takes the keys that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from kvcore import limits
from kvcore.errors import LocalProtocolError, RemoteProtocolError
from kvcore.hold import LeaseId
from kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId, Incarnation, NodeId
from kvcore.location import Location, Replica, Tier
from kvwire.check import check_count, checked_choice, checked_name
from kvwire.v1 import meta_pb2 as pb
from metaserver.client import LocateReply, NodeCoverage

_AT_REST: Final = 0
"""Generation of a replica without a location; slots count theirs from 1."""

_Holder = tuple[NodeId, HostId, Tier, Incarnation]


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
    """Convert a LocateReply; a replica at rest, without a location, is one of generation 0."""
    indexes: dict[_Holder, int] = {}
    message = pb.LocateReply(
        replica_counts=[len(replicas) for replicas in reply.replicas],
        coverage=[
            pb.NodeCoverage(node_id=c.node_id, l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
            for c in reply.coverage
        ],
        prefix_blocks=reply.prefix_blocks,
        memory_blocks=reply.memory_blocks,
        lease=reply.lease,
    )
    locations = []
    holders = []
    for replicas in reply.replicas:
        for replica in replicas:
            location = replica.location or _at_rest(replica.node)
            holder = (replica.node, replica.host, replica.tier, location.incarnation)
            holders.append(indexes.setdefault(holder, len(indexes)))
            locations.append(location)
    message.holder.extend(holders)
    message.segment.extend([location.segment for location in locations])
    message.slot.extend([location.slot for location in locations])
    message.generation.extend([location.generation for location in locations])
    message.length.extend([location.length for location in locations])
    for node, host, tier, incarnation in indexes:
        message.holders.add(node=node, host=host, tier=tier.value, incarnation=incarnation)
    return message


def locate_reply_from_proto(message: pb.LocateReply, keys: Sequence[BlockKey]) -> LocateReply:
    """Convert the reply to a locate of ``keys``; RemoteProtocolError when columns don't fit."""
    _check_columns(message, keys)
    check_count(message.coverage, limits.MAX_NODES, "locate.coverage")
    holders = [_holder_from_proto(holder) for holder in message.holders]
    columns = zip(
        message.holder,
        message.segment,
        message.slot,
        message.generation,
        message.length,
        strict=True,
    )
    return LocateReply(
        replicas=tuple(
            tuple(_replicas(key, holders, islice(columns, count)))
            for key, count in zip(keys, message.replica_counts, strict=False)
        ),
        coverage=tuple(
            NodeCoverage(NodeId(c.node_id), l1_blocks=c.l1_blocks, l2_blocks=c.l2_blocks)
            for c in message.coverage
        ),
        prefix_blocks=message.prefix_blocks,
        memory_blocks=message.memory_blocks,
        lease=LeaseId(message.lease),
    )


def _replicas(
    key: BlockKey,
    holders: Sequence[_Holder],
    rows: Iterator[tuple[int, int, int, int, int]],
) -> Iterator[Replica]:
    for index, segment, slot, generation, length in rows:
        node, host, tier, incarnation = holders[index]
        if generation == _AT_REST and tier is Tier.L4:
            yield Replica(key, node, host, tier)
            continue
        location = Location(node, incarnation, segment, slot, generation, length)
        yield Replica(key, node, host, tier, location)


def _at_rest(node: NodeId) -> Location:
    return Location(node, Incarnation(0), 0, 0, _AT_REST, 0)


def _holder_from_proto(message: pb.ReplicaHolder) -> _Holder:
    return (
        NodeId(checked_name(message.node, "locate.holders.node")),
        HostId(checked_name(message.host, "locate.holders.host")),
        checked_choice(Tier, message.tier, "locate.holders.tier"),
        Incarnation(message.incarnation),
    )


def _check_columns(message: pb.LocateReply, keys: Sequence[BlockKey]) -> None:
    counts = message.replica_counts
    check_count(counts, len(keys), "locate.replica_counts")
    if counts and min(counts) == 0:
        raise RemoteProtocolError("locate.replica_counts has a block without a replica")
    columns = (
        message.holder,
        message.segment,
        message.slot,
        message.generation,
        message.length,
    )
    if {len(column) for column in columns} != {sum(counts)}:
        raise RemoteProtocolError("locate's columns differ in length")
    if message.holder and max(message.holder) >= len(message.holders):
        raise RemoteProtocolError("locate.holder names a holder that is not there")
    if message.length and max(message.length) > limits.MAX_SLOT_BYTES:
        raise RemoteProtocolError(f"locate.length exceeds {limits.MAX_SLOT_BYTES}")
