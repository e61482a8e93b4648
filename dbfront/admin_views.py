"""Rows of the admin views, gathered when a statement reads them.

The cluster is seen through ClusterSource, the front's own sessions through what the server hands
in. Column names and types are sql/views.py's; a row here is a dictionary with those names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from dbfront.routing_views import VIEWS as ROUTING_VIEWS
from dbfront.routing_views import routing_rows
from kvcore.node import LoadChoiceStats, ModelInfo, TierStats
from metaserver.client import BlockListing, BlockRecord, Namespace, NodeState
from scheduler.dispatcher import WaitingRequest
from scheduler.routing_view import RoutingView

MAX_LISTED_BLOCKS = 100_000
"""Blocks shown by tierkv.kvcache_blocks; the stat views count all."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A configuration value and where it came from."""

    name: str
    value: str
    source: str
    description: str = ""


class ClusterSource(Protocol):
    """What the admin views know about the cluster.

    1. No method raises because the meta server is away: it answers what is known, else nothing.
    2. ``settings`` are the process's configuration, secrets masked.
    """

    async def nodes(self) -> tuple[NodeState, ...]: ...

    async def blocks(self, limit: int) -> BlockListing: ...

    async def models(self) -> tuple[ModelInfo, ...]: ...

    async def namespaces(self) -> tuple[Namespace, ...]: ...

    async def directory(self) -> tuple[tuple[str, int], ...]: ...

    async def queue(self) -> tuple[WaitingRequest, ...]: ...

    async def routing(self) -> RoutingView: ...

    async def settings(self) -> tuple[SettingRow, ...]: ...


async def cluster_rows(view: str, source: ClusterSource, *, now_s: float) -> list[Row]:
    """Return the rows of a view about the cluster; of ``settings``, the configuration's.

    Args:
        view: its name without the schema.
        source: the cluster.
        now_s: Unix time, to turn ages into timestamps.
    """
    if view == "models":
        return [_model(model) for model in await source.models()]
    if view == "namespaces":
        return [_namespace(namespace) for namespace in await source.namespaces()]
    if view == "directory":
        return [{"name": name, "value": value} for name, value in await source.directory()]
    if view == "queue":
        return [_waiting(request) for request in await source.queue()]
    if view in ROUTING_VIEWS:
        return routing_rows(view, await source.routing())
    if view == "settings":
        return [
            {
                "name": row.name,
                "setting": row.value,
                "source": row.source,
                "description": row.description,
            }
            for row in await source.settings()
        ]
    if view == "kvcache_blocks":
        listing = await source.blocks(MAX_LISTED_BLOCKS)
        return [_block(block, now_s) for block in listing.blocks]
    nodes = await source.nodes()
    if view == "nodes":
        return [_node(node) for node in nodes]
    if view == "load_decisions":
        return [_load_choice(node, s) for node in nodes for s in node.report.load_choices]
    if view == "stat_kvcache":
        return _tiers(tier for node in nodes for tier in node.report.tiers)
    return [row for node in nodes for row in _node_tiers(node)]


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as the text a view unpacks."""
    return json.dumps(rows)


def timestamp(unix_s: float) -> str:
    """Return a UTC timestamp as the views read it."""
    return datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).isoformat(sep=" ")


def _tiers(stats: Any) -> list[Row]:
    """Sum counters over nodes, one row per tier.

    Readers count queries and hits, owners capacity and use; both belong to the same tier.
    """
    sums: dict[str, Row] = {}
    for tier in stats:
        row = _tier(tier)
        known = sums.setdefault(row["tier"], {})
        for name, value in row.items():
            known[name] = _joined(known.get(name), value)
    for row in sums.values():
        row["hit_ratio"] = _ratio(row)
    return [sums[key] for key in sorted(sums)]


def _joined(known: Any, value: Any) -> Any:
    """Add numbers; list different names once each."""
    if isinstance(value, int | float):
        return (known or 0) + value
    names = [name for name in (known or "").split(", ") if name]
    return ", ".join([*names, value] if value and value not in names else names)


def _tier(stats: TierStats) -> Row:
    row = asdict(stats)
    row["tier"] = str(stats.tier)
    row["model_name"] = row.pop("model")
    row["read_time"] = row.pop("read_time_s") * 1000
    row["write_time"] = row.pop("write_time_s") * 1000
    row["hit_ratio"] = _ratio(row)
    return row


def _ratio(row: Row) -> float:
    asked = row["query_tokens"]
    return row["hit_tokens"] / asked if asked else 0.0


def _node_tiers(node: NodeState) -> list[Row]:
    report = node.report
    base: Row = {
        "node_id": node.info.node_id,
        "role": str(node.info.role),
        "address": node.info.control_address,
        "heartbeat_age_s": node.heartbeat_age_s,
        "kv_cache_usage": report.load.kv_usage,
        "requests_running": report.load.requests_running,
        "requests_waiting": report.load.requests_waiting,
        "transfer_bytes_in": report.transfer_bytes_in,
        "transfer_bytes_out": report.transfer_bytes_out,
        "transfer_errors": report.transfer_errors,
        "cache_errors": sum(count for _, count in report.cache_errors),
    }
    return [base | _tier(tier) for tier in report.tiers] or [base]


def _node(node: NodeState) -> Row:
    info = node.info
    return {
        "node_id": info.node_id,
        "incarnation": info.incarnation,
        "role": str(info.role),
        "host": info.host,
        "address": info.control_address,
        "data_address": info.data_address,
        "state": node.state,
        "heartbeat_age_s": node.heartbeat_age_s,
        "capacity_bytes": info.capacity_bytes,
        "models": ", ".join(model.name for model in info.models),
        "paths": "; ".join(map(str, node.report.paths)),
    }


def _load_choice(node: NodeState, stats: LoadChoiceStats) -> Row:
    measured = stats.measured
    return {
        "node_id": node.info.node_id,
        "choice": stats.choice,
        "decisions": stats.decisions,
        "measured": measured,
        "mean_predicted_s": stats.predicted_s / measured if measured else None,
        "mean_actual_s": stats.actual_s / measured if measured else None,
        "mean_abs_error_s": stats.error_s / measured if measured else None,
    }


def _model(model: ModelInfo) -> Row:
    return {
        "model_name": model.name,
        "revision": model.revision,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "context_tokens": model.context_tokens,
        "block_tokens": model.layout.block_tokens,
        "block_bytes": model.layout.payload_bytes,
        "kv_codec": str(model.layout.codec),
        "stored_block_bytes": model.layout.stored_bytes,
        "folder": model.folder,
        "blend_refusal": model.blend_refusal,
    }


def _namespace(namespace: Namespace) -> Row:
    policy = namespace.policy
    return {
        "name": namespace.name,
        "tenants": ", ".join(namespace.tenants or (namespace.name,)),
        "cache_enabled": namespace.cache_enabled,
        "kv_codec": None if policy.kv_codec is None else str(policy.kv_codec),
        "blend": policy.blend,
        "recompute_ratio": policy.recompute_ratio,
        "selector": str(policy.selector),
        "gradual": policy.gradual,
    }


def _waiting(request: WaitingRequest) -> Row:
    call = request.call
    return {
        "request_id": call.request_id,
        "tenant": request.tenant,
        "model_name": request.model,
        "priority": call.priority,
        "waited_s": call.waited_s,
        "predicted_ttft_s": call.predicted_ttft_s,
        "node_id": call.node_id,
    }


def _block(block: BlockRecord, now_s: float) -> Row:
    return {
        "block_hash": block.key.hex(),
        "parent_hash": block.parent.hex(),
        "model_name": block.model,
        "cache_scope": block.tenant,
        "tier": block.tier,
        "node_id": block.node_id,
        "tokens": block.tokens,
        "bytes": block.size_bytes,
        "created_at": timestamp(now_s - block.age_s),
        "last_access_at": timestamp(now_s - block.idle_s),
        "hits": block.hits,
        "session_id": block.session or None,
        "heat": block.heat,
        "leases": block.leases,
    }
