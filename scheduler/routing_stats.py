"""Counters, a bounded log of routing decisions, and the accuracy of the scheduler's predictions.

Written by scheduler/dispatcher.py; read by /metrics and the admin views (``stat_scheduler``,
``node_costs``, ``routing_errors``), whose rows are computed when a view is read. Nothing here
decides anything. Old decisions are dropped on purpose.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.events import CandidateCost, Dispatch, Stage
from tierkv.scheduler.nodes.node_record import NodeRecord


@dataclass(slots=True)
class AffinityCounts:
    """Counters of one model since the front started.

    Attributes:
        decisions: sends of a prompt to a node, including resends after a loss.
        affinity_hit: decisions with a choice that picked the node with most of the prompt near.
        affinity_miss: decisions where no node had any of the prompt near.
        load_override: decisions against a node with more of the prompt near, because of its cost.
        matched_tokens: prompt tokens worth reusing at the node with most of them.
        predicted_tokens: prompt tokens expected to be reused at the chosen node.
        queued: waits for room at a node.
        queue_time: milliseconds of these waits.
    """

    decisions: int = 0
    affinity_hit: int = 0
    affinity_miss: int = 0
    load_override: int = 0
    matched_tokens: int = 0
    predicted_tokens: int = 0
    queued: int = 0
    queue_time: float = 0.0

    def decided(self, candidates: Sequence[CandidateCost], block_tokens: int) -> None:
        """Count a decision.

        Near means in a node's pages or on its host (L1 and L2); blocks further away are equally far
        from every node.

        Args:
            candidates: the compared candidates, the chosen node first.
            block_tokens: tokens per block of the model.
        """
        self.decisions += 1
        if len(candidates) == 1:
            matched = block_tokens * candidates[0].cost.service.reused_blocks
            self.matched_tokens += matched
            self.predicted_tokens += matched
            return
        plans = [candidate.cost.service for candidate in candidates]
        self.matched_tokens += block_tokens * max(plan.reused_blocks for plan in plans)
        self.predicted_tokens += block_tokens * plans[0].reused_blocks
        near = [plan.tier_blocks[0] + plan.tier_blocks[1] for plan in plans]
        most = max(near)
        self.affinity_miss += most == 0
        self.affinity_hit += 0 < most == near[0]
        self.load_override += near[0] < most

    def waited(self, seconds: float) -> None:
        """Count a wait."""
        self.queued += 1
        self.queue_time += 1000 * seconds


class Affinity:
    """The counters of all models."""

    def __init__(self) -> None:
        self._models: dict[str, AffinityCounts] = {}

    def of(self, model: str) -> AffinityCounts:
        """Return a model's counters."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = AffinityCounts()
        return counts

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return the current counters by model."""
        return {model: asdict(counts) for model, counts in self._models.items()}


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a node.

    Attributes:
        request_id: the request.
        attempt: number of this send of the request, from 1.
        stage: the stage that was asked for.
        node_id: the chosen node.
        candidates: the compared candidates, the chosen node first.
        decided_s: monotonic time of the decision.
        predicted_ttft_s: predicted time to the first token.
        decided_unix_s: wall-clock time of the decision.
        model: name of the model.
        prompt_tokens: tokens of the prompt and of the answer generated before.
        actual_ttft_s: measured time to the first token; None until (and unless) a token came.
    """

    request_id: RequestId
    attempt: int
    stage: Stage
    node_id: NodeId
    candidates: Sequence[CandidateCost]
    decided_s: float
    predicted_ttft_s: float
    decided_unix_s: float = 0.0
    model: str = ""
    prompt_tokens: int = 0
    actual_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the front started; ``cache_errors`` by ``CacheError.code``."""

    arrived: int
    live: int
    finished: int
    failed: int
    cancelled: int
    dispatched: int
    resent: int
    handoffs: int
    located: int
    prefetches: int
    nodes_alive: int
    nodes_suspended: int
    cache_errors: tuple[tuple[str, int], ...]
    waiting: int = 0
    queued: int = 0
    rejected: int = 0
    leases_reserved: int = 0
    leases_committed: int = 0
    leases_aborted: int = 0
    leases_lost: int = 0


class RoutingStats:
    """Counters and the newest decisions.

    Attributes:
        dispatched: sends to a node.
        resent: sends after a loss or a refusal.
        handoffs: prefill stages continued on another node.
        located: locates of chains sent to the directory.
        prefetches: times a node loaded blocks ahead, while the prompt was still computed on another
            node or waited.
        cache_errors: failures turned into "no hits" or a resend, by kind.
        leases_reserved: leases taken on chains until their request is served.
        leases_committed: leases ended because their blocks were read.
        leases_aborted: leases ended because their blocks were no longer needed.
        leases_lost: extensions and ends of leases that the directory did not accept.
    """

    def __init__(self, decisions_logged: int) -> None:
        self.dispatched = 0
        self.resent = 0
        self.handoffs = 0
        self.located = 0
        self.prefetches = 0
        self.leases_reserved = 0
        self.leases_committed = 0
        self.leases_aborted = 0
        self.leases_lost = 0
        self.cache_errors: Counter[str] = Counter()
        self._decisions: OrderedDict[tuple[RequestId, int], Decision] = OrderedDict()
        self._ttft_s: dict[tuple[RequestId, int], float] = {}
        self._capacity = decisions_logged

    def record_dispatch(
        self,
        dispatch: Dispatch,
        now: float,
        *,
        unix_s: float = 0.0,
        model: str = "",
        prompt_tokens: int = 0,
    ) -> None:
        """Log a decision and drop the oldest decision beyond the capacity."""
        self.dispatched += 1
        if dispatch.attempt > 1 and dispatch.stage is not Stage.DECODE:
            self.resent += 1
        key = (dispatch.request_id, dispatch.attempt)
        self._ttft_s.pop(key, None)
        self._decisions[key] = Decision(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            stage=dispatch.stage,
            node_id=dispatch.node_id,
            candidates=dispatch.candidates,
            decided_s=now,
            predicted_ttft_s=dispatch.candidates[0].cost.ttft_s,
            decided_unix_s=unix_s,
            model=model,
            prompt_tokens=prompt_tokens,
        )
        if len(self._decisions) > self._capacity:
            forgotten, _ = self._decisions.popitem(last=False)
            self._ttft_s.pop(forgotten, None)

    def record_first_token(self, dispatch: Dispatch, now: float) -> None:
        """Record the measured time next to the prediction."""
        key = (dispatch.request_id, dispatch.attempt)
        decision = self._decisions.get(key)
        if decision is not None:
            self._ttft_s[key] = now - decision.decided_s

    def decisions(self) -> Iterable[Decision]:
        """Return the newest decisions, oldest first."""
        return tuple(
            replace(decision, actual_ttft_s=self._ttft_s.get(key))
            for key, decision in self._decisions.items()
        )


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Accuracy of predicted times to the first token.

    Attributes:
        node_id: the answering node; None: all nodes.
        model: name of the model.
        stage: the stage that was asked for.
        count: answered requests among the logged decisions.
        mean_predicted_s: mean of the predictions.
        mean_actual_s: mean of the measured times.
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
    """Data for the scheduler's predictions for one node.

    Attributes:
        record: the node's record, from its heartbeats, with defaults for missing rates.
        wait_tokens: prompt tokens that the node has to compute, ours and other fronts'.
        queued_bytes: bytes that the node loads or will load from L2, L3 and L4.
    """

    record: NodeRecord
    wait_tokens: int
    queued_bytes: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Everything about routing in the admin views.

    Attributes:
        decisions: the newest decisions, oldest first.
        nodes: data behind the predictions.
    """

    decisions: tuple[Decision, ...] = ()
    nodes: tuple[NodeCosts, ...] = ()

    def errors(self) -> tuple[ErrorSummary, ...]:
        """Summarise the errors of the logged predictions."""
        return summarise(self.decisions)


def node_costs(records: Iterable[NodeRecord]) -> tuple[NodeCosts, ...]:
    """Collect the data of all nodes, sorted by name."""
    ordered = sorted(records, key=lambda record: record.info.node_id)
    return tuple(
        NodeCosts(r, r.waiting_tokens + r.others_waiting_tokens, r.queued_bytes) for r in ordered
    )


def summarise(decisions: Iterable[Decision]) -> tuple[ErrorSummary, ...]:
    """Summarise answered predictions by model and stage, for all nodes and for each node."""
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
    """Return mean, p50, p90 and p99; each quantile is a value from the data."""
    values = sorted(map(measure, predicted, actual))
    p50, p90, p99 = (values[math.ceil(q * len(values)) - 1] for q in (0.5, 0.9, 0.99))
    return sum(values) / len(values), p50, p90, p99
