"""Rows of the views about a worker's scheduler: decisions, errors, costs, waiting calls.

dbfront/views/admin.py calls the functions; column names and types are in sql/views.py.
"""

from __future__ import annotations

import json
from typing import Final

from tierkv.kvcore.block import Tier
from tierkv.scheduler.dispatcher import WaitingRequest
from tierkv.scheduler.events import CandidateCost
from tierkv.scheduler.routing_stats import Decision, ErrorSummary, NodeCosts, RoutingView
from tierkv.sql.views import Row, timestamp

ROUTING_VIEWS: Final = frozenset({"routing_log", "routing_errors", "node_costs"})
WORKER_VIEWS: Final = ROUTING_VIEWS | {"queue", "answer_cache"}
"""Views with rows of each worker of a front."""

_DIGITS = 7


def routing_rows(view: str, routing: RoutingView) -> list[Row]:
    """Return the rows of one of ``ROUTING_VIEWS``."""
    if view == "routing_log":
        return [_decision(decision) for decision in routing.decisions]
    if view == "routing_errors":
        return [_errors(errors) for errors in routing.errors()]
    return [_routed_node(node) for node in routing.nodes]


def _decision(decision: Decision) -> Row:
    actual_s = decision.actual_ttft_s
    return {
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "stage": str(decision.stage),
        "decided_at": timestamp(decision.decided_unix_s),
        "model_name": decision.model,
        "prompt_tokens": decision.prompt_tokens,
        "node_id": decision.node_id,
        "candidates": json.dumps([_candidate(one) for one in decision.candidates]),
        "predicted_ttft_s": decision.predicted_ttft_s,
        "actual_ttft_s": actual_s,
        "error_s": None if actual_s is None else actual_s - decision.predicted_ttft_s,
    }


def _candidate(candidate: CandidateCost) -> Row:
    cost = candidate.cost
    seconds = {
        "wait_s": cost.wait_s,
        "load_s": cost.service.load_s,
        "prefill_s": cost.service.prefill_s,
        "service_s": cost.service.total_s,
        "charge": cost.charge,
        "taken_s": cost.taken_s,
        "harm_s": cost.harm_s,
        "handoff_s": cost.handoff_s,
        "total_s": cost.total_s,
    }
    blocks = {str(t): n for t, n in zip(Tier, cost.service.tier_blocks, strict=True) if n}
    rounded = {name: round(value, _DIGITS) for name, value in seconds.items()}
    return {"node": candidate.node_id, **rounded, "reused_blocks": blocks}


def _errors(errors: ErrorSummary) -> Row:
    names = ("mean", "p50", "p90", "p99")
    return {
        "node_id": errors.node_id,
        "model_name": errors.model,
        "stage": str(errors.stage),
        "answers": errors.count,
        "mean_predicted_s": errors.mean_predicted_s,
        "mean_actual_s": errors.mean_actual_s,
        **{f"{name}_abs_error_s": s for name, s in zip(names, errors.error_s, strict=True)},
        **{f"{name}_ratio": ratio for name, ratio in zip(names, errors.ratio, strict=True)},
    }


def _routed_node(node: NodeCosts) -> Row:
    record, rates = node.record, node.record.rates
    l2, l3, l4 = (int(size) for size in node.queued_bytes)
    return {
        "node_id": record.info.node_id,
        "models": ", ".join(model.name for model in record.info.models),
        "state": record.state,
        "requests": record.outstanding,
        "waiting_tokens": node.wait_tokens,
        "prefill_step_s": rates.cost.per_step_s,
        "prefill_token_s": rates.cost.per_token_s,
        "prefill_pair_s": rates.cost.per_pair_s,
        "prefill_sequence_s": rates.cost.per_sequence_s,
        "l2_bytes_per_s": rates.l2.bytes_per_s,
        "l3_bytes_per_s": rates.l3.bytes_per_s,
        "l4_bytes_per_s": rates.l4.bytes_per_s,
        "l2_latency_s": rates.l2.latency_s,
        "l3_latency_s": rates.l3.latency_s,
        "l4_latency_s": rates.l4.latency_s,
        "l2_queued_bytes": l2,
        "l3_queued_bytes": l3,
        "l4_queued_bytes": l4,
        "decodes_running": record.load.decodes_running,
        "decode_step_s": record.load.decode_step_s,
        "overhead_s": record.correction.overhead_s,
        "factor": record.correction.factor,
    }


def waiting_row(request: WaitingRequest) -> Row:
    """Return the row of ``queue`` of a waiting call."""
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
