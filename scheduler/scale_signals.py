"""What an autoscaler has to know: per model the queue, the time to a first token, reuse; the pool.

Pure; called by scheduler/dispatcher.py when ``GET /v1/scale`` or ``/metrics`` is read. Loads are
those of the last heartbeats, so they count the requests of all fronts; predictions and reuse are
those of this front's decisions in the last minute.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.block import Tier
from tierkv.kvcore.node import NodeLoad, NodeRole
from tierkv.metaserver.client import DirectoryNode
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.routing_stats import Decision

WINDOW_S: Final = 60.0
"""Age of the oldest decision that counts."""

_P90: Final = 0.9


@dataclass(frozen=True, slots=True)
class ModelScale:
    """The nodes of one model.

    Attributes:
        model: name of the model.
        nodes: live nodes that compute.
        running: requests in the batches of these nodes.
        of_other_fronts: requests at these nodes that other fronts sent.
        waiting: requests queued at the nodes, and at this front for want of room.
        queue_s: seconds until the nodes have computed the prompts queued there, on average.
        ttft_s: predicted time to the first token that one of ten requests exceeds; None without a
            request in the last minute.
        kv_usage: share of the nodes' KV pages in use, on average; 0.0 to 1.0.
        hit_ratio: share of the prompts' tokens that need not be computed; None as ``ttft_s``.
    """

    model: str
    nodes: int
    running: int
    of_other_fronts: int
    waiting: int
    queue_s: float
    ttft_s: float | None
    kv_usage: float
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class PoolScale:
    """The memory of all live pool nodes."""

    nodes: int
    capacity_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class ScaleSignals:
    """All models, by name, and the pool."""

    models: tuple[ModelScale, ...]
    pool: PoolScale


def scale_signals(
    records: Iterable[NodeRecord],
    nodes: Iterable[DirectoryNode],
    decisions: Sequence[Decision],
    waiting: Iterable[str],
    now: float,
) -> ScaleSignals:
    """Compute the signals.

    Args:
        records: compute nodes with their loads.
        nodes: all nodes of the directory.
        decisions: this front's decisions.
        waiting: the model of each request that waits at this front.
        now: monotonic seconds.
    """
    serving: dict[str, list[NodeRecord]] = defaultdict(list)
    block_tokens: dict[str, int] = {}
    for record in records:
        for model in record.info.models:
            block_tokens[model.name] = model.layout.block_tokens
            if record.state == "alive" and record.info.role.prefills:
                serving[model.name].append(record)
    recent: dict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.decided_s > now - WINDOW_S:
            recent[decision.model].append(decision)
    held = Counter(waiting)
    names = sorted(block_tokens.keys() | held.keys())
    return ScaleSignals(
        tuple(
            _of_model(name, serving[name], recent[name], held[name], block_tokens.get(name, 0))
            for name in names
        ),
        _of_pool(nodes),
    )


def _of_model(
    name: str,
    records: Sequence[NodeRecord],
    decisions: Sequence[Decision],
    held: int,
    block_tokens: int,
) -> ModelScale:
    loads = [record.load for record in records]
    prompts = sum(each.prompt_tokens for each in decisions)
    reused = block_tokens * sum(
        each.candidates[0].cost.service.reused_blocks for each in decisions if each.candidates
    )
    return ModelScale(
        name,
        nodes=len(records),
        running=sum(load.requests_running for load in loads),
        of_other_fronts=sum(record.others_in_flight for record in records),
        waiting=held + sum(load.requests_waiting for load in loads),
        queue_s=statistics.fmean(map(_queue_s, loads)) if loads else 0.0,
        ttft_s=_p90([each.predicted_ttft_s for each in decisions]),
        kv_usage=statistics.fmean(load.kv_usage for load in loads) if loads else 0.0,
        hit_ratio=min(1.0, reused / prompts) if prompts else None,
    )


def _queue_s(load: NodeLoad) -> float:
    token_s = load.prefill_token_s or (
        1 / load.prefill_tokens_per_s if load.prefill_tokens_per_s else 0.0
    )
    return load.waiting_prefill_tokens * token_s


def _p90(values: Sequence[float]) -> float | None:
    return sorted(values)[int(_P90 * (len(values) - 1))] if values else None


def _of_pool(nodes: Iterable[DirectoryNode]) -> PoolScale:
    alive = [node for node in nodes if node.state == "alive" and node.info.role is NodeRole.DMP]
    tiers = [tier for node in alive for tier in node.report.tiers if tier.tier is Tier.L2]
    return PoolScale(
        len(alive),
        sum(tier.capacity_bytes for tier in tiers),
        sum(tier.used_bytes for tier in tiers),
    )
