"""What a prompt costs where one node could take it and has none of it: plain numbers, no arrays.

Pure; called by scheduler/choosing/router.py. The formula is scheduler/choosing/choice.py's and
scheduler/choosing/service.py's without what falls away where nothing can be loaded; with one number
per column, arrays would take ten times as long as the sums in them.
tests/property/test_routing_cost.py holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.costing.service_time import StepCost, pipelined_evenly
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.cost import NOTHING_CACHED, CostSplit, ServiceCost
from tierkv.scheduler.nodes.node_record import NodeRecord, Work
from tierkv.scheduler.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class LoneCost:
    """What a request costs at the only node for it, and what the node has to do."""

    split: CostSplit
    work: Work


def finds_nothing(request: RequestRecord) -> bool:
    """Whether nothing of the prompt is known to be anywhere."""
    return not request.near and request.pool == NOTHING_CACHED


def weigh_lone(
    request: RequestRecord,
    node: NodeRecord,
    *,
    config: SchedulerConfig,
    now: float,
    waiting: int = 0,
    awaited_tokens: int = 0,
) -> LoneCost:
    """Say what the request would cost at the only candidate, computed from its first token on.

    Args:
        request: of which nothing is cached.
        node: serves its model, and does not hand answers over.
        config: the charges.
        now: the time.
        waiting: requests that wait for the same node; they would be delayed, too.
        awaited_tokens: of these, prompt tokens that are computed before.
    """
    tokens, rates, factor = request.total_tokens, node.rates, node.correction.factor
    token_s = 1.0 / rates.prefill_tokens_per_s
    turn_s = _turn_s(node, token_s, now)
    first_s, later_s = _compute_s(node, token_s, tokens)
    layers = node.layout(request.arrived.model).layers
    ended_s = later_s + pipelined_evenly(
        0.0, first_s, layers, load_from_s=0.0, compute_from_s=turn_s
    )
    prefill_s = first_s + later_s
    wait_s = factor * turn_s
    service_s = factor * ended_s + node.correction.overhead_s - wait_s
    decodes = node.load.decodes_running
    charge = config.queue_weight * (max(node.outstanding - decodes, 0) + waiting)
    harm_s = config.decode_harm * decodes * max(prefill_s - node.load.decode_step_s, 0.0)
    before_s = awaited_tokens * token_s
    taken_s = StepCost(token_s, rates.pair_s, rates.step_s, rates.sequence_s).causal_seconds(
        0, tokens, steps=max(1.0, tokens / rates.step_tokens)
    )
    total_s = wait_s + service_s + charge * taken_s + harm_s + before_s
    wait_s += before_s
    service = ServiceCost(0, 0.0, prefill_s, service_s)
    # Prompts that wait share forward passes: each takes as much of one as it has tokens.
    shared = 1.0 - min(1.0, tokens / rates.step_tokens)
    compute_s = (prefill_s - shared * (rates.step_s - rates.sequence_s)) * factor
    work = Work(tokens, compute_s, predicted_s=ended_s, corrected_s=wait_s + service_s)
    return LoneCost(CostSplit(wait_s, service, total_s, harm_s, 0.0, charge, taken_s), work)


def _turn_s(node: NodeRecord, token_s: float, now: float) -> float:
    """Seconds until the prompt's turn; see ``choice.weigh``."""
    account = node.account()
    left_s = account.head_end_s - now
    head_s = max(min(left_s, account.head_s), -left_s)
    ours_s = account.waiting_s - account.head_s + head_s
    return ours_s + (account.others_tokens + account.outstanding) * token_s


def _compute_s(node: NodeRecord, token_s: float, tokens: int) -> tuple[float, float]:
    """Seconds of the first forward pass over the whole prompt, and of all later ones."""
    rates = node.rates
    cost = StepCost(token_s, rates.pair_s, rates.step_s, rates.sequence_s)
    first = min(tokens, rates.step_tokens)
    later = tokens - first
    if not later:
        return cost.causal_seconds(0, first), 0.0
    steps = later / rates.step_tokens
    return cost.causal_seconds(0, first), cost.causal_seconds(first, later, steps=steps)
