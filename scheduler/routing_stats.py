"""What the scheduler did and how well it predicted: counters, a bounded log of decisions, views.

Written by scheduler/dispatcher.py; read by /metrics and the admin views (``stat_scheduler``,
``node_costs``, ``routing_errors``), whose rows are computed when a view is read. Nothing here
decides anything; forgetting old decisions is on purpose.
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
        decisions: sends of a prompt to a node, again after a loss included.
        affinity_hit: of those with a choice, to the node that had most of it near.
        affinity_miss: no node had any of it near.
        load_override: another node had more, but would have cost more.
        matched_tokens: prompt tokens worth reusing where most of them were.
        predicted_tokens: prompt tokens expected to be reused at the chosen node.
        queued: waits for room at a node.
        queue_time: milliseconds of these.
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

        Near is what lies in a node's pages or on its host (L1 and L2); what is further away is as
        far from every node.

        Args:
            candidates: those that were weighed, the chosen one first.
            block_tokens: of the model's blocks.
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
        """Return all numbers by model, as they are now."""
        return {model: asdict(counts) for model, counts in self._models.items()}


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a node.

    Attributes:
        request_id: for which request.
        attempt: its how many-th send.
        stage: what was asked for.
        node_id: who was chosen.
        candidates: all that were weighed, the chosen one first.
        decided_s: monotonic time of the decision.
        predicted_ttft_s: what the cost said.
        decided_unix_s: the same time for people.
        model: name of the model.
        prompt_tokens: tokens of the prompt, with what was generated before.
        actual_ttft_s: what it was; None until (and unless) a token came.
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
        handoffs: prefill stages that were continued elsewhere.
        located: chains the directory was asked for.
        prefetches: times a node loaded blocks ahead: while their prompt was still computed
            elsewhere, or waited.
        cache_errors: failures that became "no hits" or a resend, by kind.
        leases_reserved: chains that were promised to stay until their request is served.
        leases_committed: of these, ended because their blocks were taken.
        leases_aborted: ended because they were not wanted any more.
        leases_lost: ends and prolongations that the directory did not take.
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
        """Log a decision and forget the oldest one too many."""
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
        """Note the truth beside the prediction."""
        key = (dispatch.request_id, dispatch.attempt)
        decision = self._decisions.get(key)
        if decision is not None:
            self._ttft_s[key] = now - decision.decided_s

    def decisions(self) -> Iterable[Decision]:
        """The newest decisions, oldest first."""
        return tuple(
            replace(decision, actual_ttft_s=self._ttft_s.get(key))
            for key, decision in self._decisions.items()
        )


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
