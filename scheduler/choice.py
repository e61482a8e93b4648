"""Choosing a node: one cost in seconds for every candidate, and what to do among equals.

Pure functions, called by scheduler/state.py. Costs of equal nodes are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.ids import NodeId
from kvcore.node import NodeRole
from scheduler.cost import (
    CachedPrefix,
    CostSplit,
    Rates,
    ServiceCost,
    service_cost,
    total_cost,
    wait_cost,
)
from scheduler.events import Stage
from scheduler.fleet import NodeRecord
from scheduler.request_record import RequestRecord

EQUAL_COST = 1.02
"""Costs within two per cent are the same: the estimate is no better than that."""

PREFERRED_COST = 1.5
"""A plan's wish bends the cost by that much: what it knows of calls to come is worth some wait."""


def weigh(
    request: RequestRecord, candidates: Sequence[NodeRecord], *, queue_weight: float
) -> list[CostSplit]:
    """Say what the request would cost at each candidate, in their order.

    Args:
        request: its tokens and where its blocks are.
        candidates: at least one node that serves its model.
        queue_weight: ``c`` of the charge for delaying others.
    """
    outstanding = sum(r.outstanding for r in candidates) / len(candidates)
    layout = candidates[0].layout(request.arrived.model)
    services: dict[tuple[Rates, CachedPrefix], ServiceCost] = {}
    costs: list[CostSplit] = []
    for record in candidates:
        key = (record.rates, _prefix(request, record))
        service = services.get(key)
        if service is None:
            service = service_cost(request.total_tokens, key[1], record.rates, layout)
            services[key] = service
        waiting = record.waiting_tokens + record.others_waiting_tokens
        wait_s = wait_cost(waiting, record.outstanding, record.rates)
        costs.append(
            total_cost(wait_s, service, mean_outstanding=outstanding, queue_weight=queue_weight)
        )
    return costs


def prefer_direct(
    candidates: list[NodeRecord], costs: list[CostSplit], *, stage: Stage
) -> tuple[list[NodeRecord], list[CostSplit]]:
    """Leave only decode nodes to a prompt that costs no more there: they need no handoff."""
    direct = [i for i, r in enumerate(candidates) if r.info.role is NodeRole.DECODE]
    bound = min(cost.total_s for cost in costs) * EQUAL_COST
    if stage is Stage.DECODE or not any(costs[i].total_s <= bound for i in direct):
        return candidates, costs
    return [candidates[i] for i in direct], [costs[i] for i in direct]


def choose(
    candidates: Sequence[NodeRecord],
    costs: Sequence[CostSplit],
    *,
    last_node: NodeId | None,
    preferred: NodeId | None = None,
) -> int:
    """Take the cheapest; among equals the session's last node, then the one idle longest.

    Where the plan of a statement prefers a node, that one is taken while it is not much dearer.

    Returns:
        the index of the chosen candidate.
    """
    least = min(cost.total_s for cost in costs)
    for index, record in enumerate(candidates if preferred is not None else ()):
        if record.info.node_id == preferred and costs[index].total_s <= least * PREFERRED_COST:
            return index
    bound = least * EQUAL_COST

    def order(index: int) -> tuple[bool, int, int]:
        record = candidates[index]
        return (record.info.node_id != last_node, record.outstanding, record.last_chosen)

    return min((i for i, c in enumerate(costs) if c.total_s <= bound), key=order)


def _prefix(request: RequestRecord, record: NodeRecord) -> CachedPrefix:
    """What of the request's chain the node could reuse, from near and far."""
    near = request.near.get(record.info.node_id)
    if near is None:
        return request.pool
    l2 = max(near.l1_blocks, near.l2_blocks)
    l3 = max(l2, request.pool.l3_blocks)
    return CachedPrefix(near.l1_blocks, l2, l3, max(l3, request.pool.l4_blocks))
