"""Rows of the admin views about cached KV: tiers, nodes, blocks, prefixes.

Nodes count from their start and do not know ``tierkv.stat_reset``. The front stores the nodes'
counters at a reset as a baseline and subtracts the baseline. Only the front has the text of
prompts, and the front stores no text: a hash alone identifies a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import TierStats
from tierkv.metaserver.client import BlockRecord, DirectoryNode
from tierkv.sql.views import Row, timestamp

Baseline = Mapping[str, float]
"""Counters at the last reset, by node, its incarnation, tier, medium, model and name."""

_COUNTERS: Final = (
    "query_tokens",
    "hit_tokens",
    "stored_tokens",
    "evicted_blocks",
    "promoted_blocks",
    "demoted_blocks",
    "read_bytes",
    "write_bytes",
    "read_time",
    "write_time",
    "alloc_failures",
    "transfer_bytes_in",
    "transfer_bytes_out",
    "transfer_errors",
    "cross_zone_bytes_in",
    "cross_zone_bytes_out",
    "cross_zone_refusals",
    "cache_errors",
)
_ERRORS: Final = "errors"
_WHO: Final = (
    "node_id",
    "role",
    "address",
    "zone",
    "heartbeat_age_s",
    "heartbeat_at",
    "kv_cache_usage",
    "requests_running",
    "requests_waiting",
)
_NOT_OF_TIER: Final = frozenset((*_WHO, *_COUNTERS[-7:], "as_of"))
"""Columns of a node, which are the same in the rows of all tiers of the node."""


def baseline_of(nodes: Iterable[DirectoryNode]) -> Baseline:
    """Return the present counters of the nodes."""
    nodes = list(nodes)
    counters = {
        f"{_life(node, row)}/{name}": row[name]
        for node in nodes
        for row in _counted(node)
        for name in _COUNTERS
        if row.get(name)
    }
    errors = {
        _error_counter(node, kind): count
        for node in nodes
        for kind, count in node.report.cache_errors
    }
    return counters | errors


def error_rows(nodes: Sequence[DirectoryNode], baseline: Baseline, now_s: float) -> list[Row]:
    """Return ``cache_errors``: the number of misses caused by errors, per kind and node."""
    return [
        {
            "node_id": node.info.node_id,
            "role": str(node.info.role),
            "kind": kind,
            "errors": count - _number(baseline.get(_error_counter(node, kind), 0)),
            "as_of": as_of(node, now_s),
        }
        for node in nodes
        for kind, count in node.report.cache_errors
    ]


def node_rows(nodes: Sequence[DirectoryNode], baseline: Baseline, now_s: float) -> list[Row]:
    """Return ``stat_kvcache_node``: one row per tier and node."""
    rows = []
    for node in nodes:
        for row in _counted(node):
            counted = _since(row, _life(node, row), baseline)
            rows.append(_who(node, now_s) | _with_ratio(counted) | {"as_of": as_of(node, now_s)})
    return rows


def tier_rows(nodes: Sequence[DirectoryNode], baseline: Baseline, now_s: float) -> list[Row]:
    """Return ``stat_kvcache``: counters summed over nodes, one row per tier.

    Readers count queries and hits, owners count capacity and use; both belong to the same tier. The
    time of a sum is the oldest time of its parts.
    """
    sums: dict[str, Row] = {}
    for row in node_rows(nodes, baseline, now_s):
        if "tier" in row:
            known = sums.setdefault(row["tier"], {"as_of": row["as_of"]})
            known["as_of"] = min(known["as_of"], row["as_of"])
            for name in row.keys() - _NOT_OF_TIER:
                known[name] = _joined(known.get(name), row[name])
    return [_with_ratio(sums[tier]) for tier in sorted(sums)]


def block_row(copy: BlockRecord, now_s: float) -> Row:
    """Return the row of one replica in ``kvcache_blocks``."""
    block = copy.block
    return {
        "block_hash": block.key.hex(),
        "parent_hash": block.parent.hex(),
        "model_name": block.owner.model,
        "cache_scope": block.owner.tenant,
        "tier": copy.tier,
        "node_id": copy.node_id,
        "tokens": block.tokens,
        "bytes": copy.size_bytes,
        "created_at": timestamp(now_s - copy.age_s),
        "last_access_at": timestamp(now_s - copy.idle_s),
        "hits": copy.hits,
        "session_id": block.owner.session or None,
        "heat": copy.heat,
        "leases": copy.leases,
        "ref_count": copy.leases,
        "pinned": copy.leases > 0,
    }


def prefix_rows(blocks: Iterable[BlockRecord]) -> list[Row]:
    """Return ``kvcache_prefixes``: the ends of chains, and the points where several chains diverge.

    Blocks between two rows are counted with the later row, so the sum of ``tokens_saved`` covers
    all blocks.
    """
    copies: dict[BlockKey, list[BlockRecord]] = {}
    for copy in blocks:
        copies.setdefault(copy.block.key, []).append(copy)
    children: dict[BlockKey, int] = {}
    for same in copies.values():
        parent = same[0].block.parent
        children[parent] = children.get(parent, 0) + 1
    depths: dict[BlockKey, int] = {}
    return [
        _prefix(key, copies, children) | {"depth_tokens": _depth(key, copies, depths)}
        for key in copies
        if children.get(key, 0) != 1
    ]


def _prefix(
    key: BlockKey, copies: Mapping[BlockKey, list[BlockRecord]], children: Mapping[BlockKey, int]
) -> Row:
    first = copies[key][0]
    saved, at = first.block.tokens * first.hits, first.block.parent
    while at in copies and children[at] == 1:
        before = copies[at][0]
        saved, at = saved + before.block.tokens * before.hits, before.block.parent
    return {
        "prefix_hash": key.hex(),
        "model_name": first.block.owner.model,
        "cache_scope": first.block.owner.tenant,
        "children": children.get(key, 0),
        "hits": first.hits,
        "tokens_saved": saved,
        "tiers": sorted({copy.tier for copy in copies[key]}),
        "sample_text": None,
    }


def _depth(
    key: BlockKey, copies: Mapping[BlockKey, list[BlockRecord]], depths: dict[BlockKey, int]
) -> int:
    """Return the number of tokens from the oldest known block; each block is visited once."""
    chain = []
    at = key
    while at in copies and at not in depths:
        chain.append(at)
        at = copies[at][0].block.parent
    depth = depths.get(at, 0)
    for at in reversed(chain):
        depth += copies[at][0].block.tokens
        depths[at] = depth
    return depth


def _counted(node: DirectoryNode) -> list[Row]:
    report = node.report
    base: Row = {
        "transfer_bytes_in": report.transfer_bytes_in,
        "transfer_bytes_out": report.transfer_bytes_out,
        "transfer_errors": report.transfer_errors,
        "cross_zone_bytes_in": report.cross_zone_bytes_in,
        "cross_zone_bytes_out": report.cross_zone_bytes_out,
        "cross_zone_refusals": report.cross_zone_refusals,
        "cache_errors": sum(count for _, count in report.cache_errors),
    }
    return [base | _tier(tier) for tier in report.tiers] or [base]


def _tier(stats: TierStats) -> Row:
    row = asdict(stats)
    row["tier"] = str(stats.tier)
    row["model_name"] = row.pop("model")
    row["read_time"] = row.pop("read_time_s") * 1000
    row["write_time"] = row.pop("write_time_s") * 1000
    return row


def _error_counter(node: DirectoryNode, kind: str) -> str:
    return f"{_life(node, {})}/{_ERRORS}/{kind}"


def as_of(node: DirectoryNode, now_s: float) -> str:
    """Return the time of a node's numbers."""
    return timestamp(now_s - node.heartbeat_age_s)


def _who(node: DirectoryNode, now_s: float) -> Row:
    load = node.report.load
    values = (
        node.info.node_id,
        str(node.info.role),
        node.info.control_address,
        node.info.zone,
        node.heartbeat_age_s,
        timestamp(now_s - node.heartbeat_age_s),
        load.kv_usage,
        load.requests_running,
        load.requests_waiting,
    )
    return dict(zip(_WHO, values, strict=True))


def _life(node: DirectoryNode, row: Row) -> str:
    """Identify a node's counters; a restarted node counts from zero under a new incarnation."""
    names = (row.get(name, "") for name in ("tier", "medium", "model_name"))
    return "/".join(map(str, (node.info.node_id, int(node.info.incarnation), *names)))


def _since(row: Row, life: str, baseline: Baseline) -> Row:
    if not baseline:
        return row
    counted = (name for name in _COUNTERS if name in row)
    return row | {name: row[name] - _number(baseline.get(f"{life}/{name}", 0)) for name in counted}


def _number(value: float) -> float:
    """Return an integral value as int."""
    return int(value) if value == int(value) else value


def _with_ratio(row: Row) -> Row:
    asked = row.get("query_tokens")
    if asked is None:
        return row
    return row | {"hit_ratio": row["hit_tokens"] / asked if asked else 0.0}


def _joined(known: Any, value: Any) -> Any:
    """Add numbers; list distinct names once each."""
    if isinstance(value, int | float):
        return (known or 0) + value
    names = [name for name in (known or "").split(", ") if name]
    return ", ".join([*names, value] if value and value not in names else names)
