"""Which meta servers own which block, and what their answers say together. Pure.

Called by metaserver/several_meta.py. Every block has two owners: the servers with the highest
scores of the block's key (rendezvous hashing: D. Thaler and C. Ravishankar, "Using name-based
mappings to increase hit rates", 1998). All nodes compute the same owners from the same list of
servers, without asking. Blocks of a chain are spread by the keys of the blocks, not by the first
block of the prompt: a shared system prompt does not end on a single server.

An owner that is asked for its blocks of a chain, in chain order, answers with the longest prefix of
these. The first block missing at any owner ends the prefix of the whole chain. Views join likewise;
what counts blocks counts each as often as it has owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore.block import Replica
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NodeId
from tierkv.metaserver.client import (
    BlockListing,
    BlockRecord,
    DirectoryNode,
    LocateReply,
    NodeCoverage,
)

OWNERS: Final = 2
"""Owners of a block, or all servers if there are fewer."""

_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
"""Of splitmix64's finaliser (S. Vigna, public domain)."""

OwnerTable = NDArray[np.int64]
"""Shape ``[blocks, owners]``: numbers of servers, best first."""


class BlockOwners:
    """Computes owners for one list of servers, whose order does not matter for the result.

    Attributes:
        servers: number of servers.
        each: owners of a block.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.servers = len(addresses)
        self.each = min(OWNERS, self.servers)
        digests = (blake2b(address.encode(), digest_size=8).digest() for address in addresses)
        self._seeds = np.array([int.from_bytes(each, "little") for each in digests], np.uint64)

    def of(self, keys: Sequence[BlockKey]) -> OwnerTable:
        """Return the owners of each key."""
        raw = np.frombuffer(b"".join(keys), "<u8").reshape(-1, BLOCK_KEY_BYTES // 8)
        score = raw[:, :1] ^ self._seeds
        for shift, multiplier in zip(_SHIFTS[:2], _MULTIPLIERS, strict=True):
            score = (score ^ (score >> shift)) * multiplier
        score ^= score >> _SHIFTS[2]
        table: OwnerTable = np.argsort(~score, axis=1, kind="stable")[:, : self.each]
        return table


def asked_of(table: OwnerTable, usable: Sequence[bool]) -> dict[int, list[int]]:
    """Return the positions to ask each server about: its own, and those of owners out of use.

    A position whose owners are all out of use is asked of its best owner all the same.
    """
    open_to = np.asarray(usable, bool)[table]
    choice = np.where(open_to.any(axis=1), open_to.argmax(axis=1), 0)
    servers = table[np.arange(len(table)), choice]
    return {int(each): np.flatnonzero(servers == each).tolist() for each in np.unique(servers)}


@dataclass(frozen=True, slots=True)
class PartAnswer:
    """One server's answer about some positions of a chain, in ascending order."""

    positions: Sequence[int]
    reply: LocateReply

    def reach(self, blocks: int, length: int) -> int:
        """Return the first position of the chain that a prefix of ``blocks`` asked ones lacks."""
        return self.positions[blocks] if blocks < len(self.positions) else length


def joined(parts: Sequence[PartAnswer], length: int) -> LocateReply:
    """Join the answers about all positions of one chain of ``length`` blocks, without leases."""
    prefix = min((part.reach(part.reply.prefix_blocks, length) for part in parts), default=0)
    memory = min((part.reach(part.reply.memory_blocks, length) for part in parts), default=0)
    return LocateReply(_replicas(parts, prefix), _coverage(parts, length), prefix, memory)


def _replicas(parts: Sequence[PartAnswer], prefix: int) -> tuple[tuple[Replica, ...], ...]:
    found: list[tuple[Replica, ...]] = [()] * prefix
    for part in parts:
        for position, replicas in zip(part.positions, part.reply.replicas, strict=False):
            if position < prefix:
                found[position] = replicas
    return tuple(found) if all(found) else ()


def _coverage(parts: Sequence[PartAnswer], length: int) -> tuple[NodeCoverage, ...]:
    near: list[Mapping[NodeId, NodeCoverage]] = [
        {each.node_id: each for each in part.reply.coverage} for part in parts
    ]
    nodes = sorted(set().union(*near))
    nothing = {node: NodeCoverage(node, 0, 0) for node in nodes}
    joined_up = []
    for node in nodes:
        seen = [
            (part, some.get(node, nothing[node])) for part, some in zip(parts, near, strict=True)
        ]
        l1 = min(part.reach(each.l1_blocks, length) for part, each in seen)
        l2 = min(part.reach(each.l2_blocks, length) for part, each in seen)
        if l2:
            joined_up.append(NodeCoverage(node, l1, l2))
    return tuple(joined_up)


_PER_OWNER: Final = ("blocks", "copies", "events_")
"""Beginnings of counts that every owner of a block adds to; every server counts stale batches."""


def joined_versions(versions: Mapping[int, int]) -> int:
    """Return a number that differs when any server's differs, or others answer; 0: unknown."""
    if not all(versions.values()):
        return 0
    digest = blake2b(repr(sorted(versions.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def joined_nodes(listings: Iterable[tuple[DirectoryNode, ...]]) -> tuple[DirectoryNode, ...]:
    """Return each node as seen by the server with the latest heartbeat."""
    found: dict[NodeId, DirectoryNode] = {}
    for listing in listings:
        for node in listing:
            known = found.get(node.info.node_id)
            if known is None or node.heartbeat_age_s < known.heartbeat_age_s:
                found[node.info.node_id] = node
    return tuple(found[node_id] for node_id in sorted(found))


def joined_listing(
    listings: Sequence[BlockListing], limit: int, *, copies_told: float
) -> BlockListing:
    """Return the newest copies of all listings, each once; the total is exact with all servers."""
    found: dict[tuple[BlockKey, NodeId, str], BlockRecord] = {}
    for listing in listings:
        for record in listing.blocks:
            place = (record.block.key, record.node_id, record.tier)
            known = found.get(place)
            found[place] = record if known is None else _together(known, record)
    newest = sorted(found.values(), key=lambda record: record.age_s)[:limit]
    total = round(sum(listing.total for listing in listings) / copies_told)
    return BlockListing(tuple(newest), total)


def _together(one: BlockRecord, other: BlockRecord) -> BlockRecord:
    """Join what two owners know; each sees the uses that it was asked about."""
    return replace(
        one,
        age_s=max(one.age_s, other.age_s),
        idle_s=min(one.idle_s, other.idle_s),
        hits=one.hits + other.hits,
        heat=one.heat + other.heat,
        leases=one.leases + other.leases,
    )


def joined_counts(
    counts: Sequence[tuple[tuple[str, int], ...]], *, copies_told: float
) -> tuple[tuple[str, int], ...]:
    """Return the sums over all servers; what several servers were told of counts once."""
    sums: dict[str, int] = {}
    for server in counts:
        for name, count in server:
            sums[name] = sums.get(name, 0) + count
    for name in sums:
        if name.startswith(_PER_OWNER):
            sums[name] = round(sums[name] / copies_told)
        elif name == "stale_batches":
            sums[name] = max(dict(server)[name] for server in counts)
    return tuple(sorted(sums.items()))
