"""What people see of routing: what the scheduler knows of each node, and how wrong it was.

Pure; read by the admin views ``node_costs`` and ``routing_errors``. Everything is computed when
somebody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.events import Stage
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.routing_stats import Decision


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """How well times to the first token were predicted.

    Attributes:
        node_id: by whom the requests were answered; None: by any node.
        model: which model.
        stage: what was asked for.
        count: answers among the decisions that are still logged.
        mean_predicted_s: mean of the predictions.
        mean_actual_s: mean of the truth.
        error_s: mean, p50, p90 and p99 of the absolute difference.
        ratio: mean, p50, p90 and p99 of actual / predicted.
    """

    node_id: NodeId | None
    model: str
    stage: Stage
    count: int
    mean_predicted_s: float
    mean_actual_s: float
    error_s: tuple[float, float, float, float]
    ratio: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What the scheduler predicts with for one node.

    Attributes:
        record: its figures, as its heartbeats told them, with defaults where they do not.
        wait_tokens: prompt tokens it has to compute, ours and others'.
        queued_bytes: bytes it loads or will load from L2, L3 and L4.
    """

    record: NodeRecord
    wait_tokens: int
    queued_bytes: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Everything about routing that the admin views show.

    Attributes:
        decisions: the newest, oldest first.
        nodes: what predictions are made from.
    """

    decisions: tuple[Decision, ...] = ()
    nodes: tuple[NodeCosts, ...] = ()

    def errors(self) -> tuple[ErrorSummary, ...]:
        """Sum up how wrong the logged predictions were."""
        return summarise(self.decisions)


def node_costs(records: Iterable[NodeRecord]) -> tuple[NodeCosts, ...]:
    """Collect what is known of nodes, by name."""
    ordered = sorted(records, key=lambda record: record.info.node_id)
    return tuple(
        NodeCosts(r, r.waiting_tokens + r.others_waiting_tokens, r.queued_bytes) for r in ordered
    )


def summarise(decisions: Iterable[Decision]) -> tuple[ErrorSummary, ...]:
    """Summarise predictions whose truth is known: by model and stage, for all nodes and each."""
    groups: dict[tuple[str, Stage, NodeId | None], list[Decision]] = {}
    for decision in decisions:
        if decision.actual_ttft_s is not None:
            for node_id in (None, decision.node_id):
                key = (decision.model, decision.stage, node_id)
                groups.setdefault(key, []).append(decision)
    keys = sorted(groups, key=lambda key: (key[0], key[1], key[2] or ""))
    return tuple(_summary(key[2], groups[key]) for key in keys)


def _summary(node_id: NodeId | None, answered: list[Decision]) -> ErrorSummary:
    first = answered[0]
    predicted = [d.predicted_ttft_s for d in answered]
    actual = [d.actual_ttft_s or 0.0 for d in answered]
    return ErrorSummary(
        node_id,
        first.model,
        first.stage,
        len(answered),
        sum(predicted) / len(answered),
        sum(actual) / len(answered),
        _spread(predicted, actual, lambda p, a: abs(p - a)),
        _spread(predicted, actual, lambda p, a: a / p if p > 0.0 else math.inf),
    )


def _spread(
    predicted: Sequence[float], actual: Sequence[float], measure: Callable[[float, float], float]
) -> tuple[float, float, float, float]:
    """Mean, p50, p90 and p99, each quantile a value that occurred."""
    values = sorted(map(measure, predicted, actual))
    p50, p90, p99 = (values[math.ceil(q * len(values)) - 1] for q in (0.5, 0.9, 0.99))
    return sum(values) / len(values), p50, p90, p99
