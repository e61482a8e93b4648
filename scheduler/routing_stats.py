"""What the scheduler did and how well it predicted: counters and a bounded log of decisions.

Written by scheduler/dispatcher.py, read by the admin views and /metrics. Nothing here decides
anything; forgetting old decisions is on purpose.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.events import CandidateCost, Dispatch, Stage


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
