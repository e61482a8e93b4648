"""Rows of the admin views, gathered when a statement reads them.

The cluster is seen through ClusterSource, the front's own sessions through what the server hands
in. Column names and types are sql/views.py's; a row here is a dictionary with those names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.dbfront.views.kvcache import (
    Baseline,
    as_of,
    block_row,
    error_rows,
    node_rows,
    prefix_rows,
    tier_rows,
)
from tierkv.dbfront.views.routing import VIEWS as ROUTING_VIEWS
from tierkv.dbfront.views.routing import routing_rows
from tierkv.dbfront.views.rows import Row
from tierkv.kvcore.node import LoadChoiceStats, ModelInfo
from tierkv.metaserver.client import BlockListing, Namespace, NodeState
from tierkv.scheduler.dispatcher import WaitingRequest
from tierkv.scheduler.routing_view import RoutingView

MAX_LISTED_BLOCKS = 100_000
"""Blocks shown by tierkv.kvcache_blocks; the stat views count all."""


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


async def cluster_rows(
    view: str, source: ClusterSource, *, now_s: float, baseline: Baseline | None = None
) -> list[Row]:
    """Return the rows of a view about the cluster; of ``settings``, the configuration's.

    Args:
        view: its name without the schema.
        source: the cluster.
        now_s: Unix time, to turn ages into timestamps.
        baseline: what nodes had counted when their counters were reset.
    """
    baseline = baseline or {}
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
        return [block_row(block, now_s) for block in listing.blocks]
    if view == "kvcache_prefixes":
        listing = await source.blocks(MAX_LISTED_BLOCKS)
        return await asyncio.to_thread(prefix_rows, listing.blocks)
    nodes = await source.nodes()
    if view == "nodes":
        return [_node(node) | {"as_of": as_of(node, now_s)} for node in nodes]
    if view == "load_decisions":
        return [
            _load_choice(node, choice) | {"as_of": as_of(node, now_s)}
            for node in nodes
            for choice in node.report.load_choices
        ]
    if view == "cache_errors":
        return error_rows(nodes, baseline, now_s)
    if view == "stat_kvcache":
        return tier_rows(nodes, baseline, now_s)
    return node_rows(nodes, baseline, now_s)


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as the text a view unpacks."""
    # Row by row, so that a thread that does it lets the event loop go on.
    return "[" + ",".join(map(json.dumps, rows)) + "]"


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
        "notes": "; ".join(node.notes),
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
