"""The admin views of several meta servers as one. Pure.

Called by metaserver/several/several.py. A block's copies are told to two servers, so what counts
blocks is counted as often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tierkv.kvcore.ids import BlockKey, NodeId
from tierkv.metaserver.client import BlockListing, BlockRecord, DirectoryNode

_PER_OWNER: Final = ("blocks", "copies", "events_")
"""Beginnings of counts that every owner of a block adds to; every server counts stale batches."""


def joined_nodes(listings: Iterable[tuple[DirectoryNode, ...]]) -> tuple[DirectoryNode, ...]:
    """Return each node as the server saw it that heard from it last."""
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
