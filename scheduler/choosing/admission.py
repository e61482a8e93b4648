"""Requests waiting for room at a node: their order, and their predicted waits.

Pure; a part of SchedulerState, mutated only through SchedulerState. Every waiting request has a
turn, and earlier turns go first. The turn is the time of arrival; a request of priority ``p``
counts as arrived ``p`` times ``priority_step_s`` later. The second of a tenant's waiting requests
has its turn at the begin of a fair share: after the mean time between turns, times the weights of
all waiting tenants, divided by the tenant's own weight (as start-time fair queueing: Goyal, Vin,
Cheng, SIGCOMM 1996, with the clock as virtual time); and so on. A tenant with a thousand waiting
requests thus delays the request of another tenant by a few. No request waits forever: a turn is a
time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.kvcore import limits
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import Stage, WantedModel
from tierkv.scheduler.request_record import RequestPhase, RequestRecord

MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
"""Bounds of the retry time told to a refused caller, whatever was predicted."""

LaneKey = tuple[WantedModel, bool]
"""A model, and True for a decode stage: requests with equal keys are served by the same nodes."""

MAX_PRIORITY = 100
"""Larger priorities are clamped to this value, which bounds how far a request may overtake others.
"""

TURNS_REMEMBERED = 64
"""Turns counted in the mean time between turns; older turns fade."""

TURNS_NEEDED = 3
"""The mean is used after more turns than this; until then predictions add up service times."""


def lane_key(request: RequestRecord) -> LaneKey:
    """Return the key of the lane where a request waits."""
    return request.arrived.model, request.stage is Stage.DECODE


class Ranked:
    """Requests in order of rank. Insertion and removal cost a binary search and a move."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, RequestRecord]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestRecord]:
        return (entry[2] for entry in self._entries)

    def add(self, request: RequestRecord) -> None:
        """Insert a request by rank."""
        insort(self._entries, (*request.rank, request))

    def remove(self, request: RequestRecord) -> None:
        """Remove a contained request."""
        at = self.before(request.rank)
        assert self._entries[at][2] is request, request.story
        del self._entries[at]

    def before(self, rank: tuple[float, int]) -> int:
        """Count the requests before a rank."""
        return bisect_left(self._entries, rank)

    def heads(self, count: int) -> list[RequestRecord]:
        """Return the first ``count`` requests."""
        return [entry[2] for entry in self._entries[:count]]


class Lane:
    """Requests waiting for the same nodes, and the rate of their turns.

    Attributes:
        ranked: the waiting requests.
        backlog_s: predicted seconds of service of all waiting requests.
        servers: number of candidate nodes, as of the last arrival.
    """

    def __init__(self) -> None:
        self.ranked = Ranked()
        self.backlog_s = 0.0
        self.servers = 1
        self._turns = 0.0
        self._turns_s = 0.0
        self._since_s = 0.0

    def add(self, request: RequestRecord, now: float) -> None:
        """Add a request; ``service_s`` is set."""
        if not self.ranked:
            self._since_s, self.backlog_s = now, 0.0
        self.ranked.add(request)
        self.backlog_s += request.service_s

    def remove(self, request: RequestRecord) -> None:
        """Remove a request that gave up."""
        self.ranked.remove(request)
        self.backlog_s = max(0.0, self.backlog_s - request.service_s)

    def take(self, request: RequestRecord, now: float) -> None:
        """Remove a request that goes to its node, and count the time since the previous turn."""
        self.remove(request)
        fade = 1.0 - 1.0 / TURNS_REMEMBERED
        self._turns = self._turns * fade + 1.0
        self._turns_s = self._turns_s * fade + max(0.0, now - self._since_s)
        self._since_s = now

    def turn_s(self, now: float) -> float:
        """Return the mean time between two turns; 0.0 until enough turns were seen.

        A late turn counts with the time elapsed so far.
        """
        if self._turns < TURNS_NEEDED:
            return 0.0
        late_s = max(0.0, now - self._since_s) if self.ranked else 0.0
        return (self._turns_s + late_s) / self._turns

    def wait_s(self, position: int, now: float) -> float:
        """Predict the time until the turn of a request with ``position`` requests before it."""
        turn_s = self.turn_s(now)
        if turn_s:
            return (position + 1) * turn_s
        waiting = max(1, len(self.ranked))
        return self.backlog_s * min(1.0, position / waiting) / self.servers


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A waiting request, for the views.

    Attributes:
        request_id: the request.
        priority: a lower priority goes earlier.
        waited_s: seconds since the request began to wait.
        predicted_ttft_s: from its arrival to its first token; None while no node serves its model.
        node_id: the node for which the request waits; None: any node.
    """

    request_id: RequestId
    priority: int
    waited_s: float
    predicted_ttft_s: float | None
    node_id: NodeId | None


@dataclass(slots=True)
class _Turns:
    """The turns of one tenant's waiting requests of one priority.

    Attributes:
        weight: share of the turns, relative to other tenants.
        waiting: number of these requests.
        next_s: earliest turn of the next one.
    """

    weight: float = 1.0
    waiting: int = 0
    next_s: float = -math.inf


class WaitQueue:
    """All waiting requests: by lane, and by the node for which a request waits.

    Attributes:
        lanes: by model and stage; an empty lane is kept for its mean time between turns.
        by_node: requests waiting for a node cheaper than nodes with room.
        awaited_tokens: tokens to be added to each node's queue by waiting requests.
    """

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self.by_node: dict[NodeId, Ranked] = {}
        self.awaited_tokens: dict[NodeId, int] = {}
        self._turns: dict[tuple[str, int], _Turns] = {}
        self._weights = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def lane(self, request: RequestRecord) -> Lane:
        """Return the lane of a request; creates the lane for the first request."""
        key = lane_key(request)
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= 2 * limits.MAX_MODELS_PER_NODE:
                self.lanes = {k: v for k, v in self.lanes.items() if v.ranked}
            lane = self.lanes[key] = Lane()
        return lane

    def add(self, request: RequestRecord, now: float) -> None:
        """Add a request; ``awaits`` names the node to wait for, None means any node."""
        lane = self.lane(request)
        rank = self._next_rank(request)
        turns = self._turns_of(request)
        if not request.has_turn:
            request.rank, request.has_turn = rank, True
            alone_s = max(request.service_s / lane.servers, lane.turn_s(now))
            turns.next_s = rank[0] + self._weights / turns.weight * alone_s
        turns.waiting += 1
        lane.add(request, now)
        self._size += 1
        self._await(request)

    def _turns_of(self, request: RequestRecord) -> _Turns:
        """Return the turns of the request's tenant, with the weight of now."""
        turns = self._turns.setdefault(_turns_key(request), _Turns(weight=0.0))
        self._weights += request.arrived.weight - turns.weight
        turns.weight = request.arrived.weight
        return turns

    def _next_rank(self, request: RequestRecord) -> tuple[float, int]:
        """Return the rank of a request, waiting or about to wait."""
        turns = self._turns.get(_turns_key(request))
        if request.has_turn or turns is None:
            return request.rank
        return max(request.due_s, turns.next_s), request.rank[1]

    def reconsider(self, request: RequestRecord, awaits: NodeId | None, tokens: int) -> None:
        """Update the node for which a waiting request waits."""
        if request.awaits == awaits and request.awaited_tokens == tokens:
            return
        self._forget(request)
        request.awaits, request.awaited_tokens = awaits, tokens
        self._await(request)

    def remove(self, request: RequestRecord) -> None:
        """Remove a request that gave up."""
        self.lane(request).remove(request)
        self._gone(request)

    def take(self, request: RequestRecord, now: float) -> None:
        """Remove a request that goes to its node."""
        self.lane(request).take(request, now)
        self._gone(request)

    def _gone(self, request: RequestRecord) -> None:
        self._size -= 1
        turns = self._turns[_turns_key(request)]
        turns.waiting -= 1
        if not turns.waiting:
            del self._turns[_turns_key(request)]
            self._weights = self._weights - turns.weight if self._turns else 0.0
        self._forget(request)
        request.awaits, request.awaited_tokens = None, 0

    def _await(self, request: RequestRecord) -> None:
        node_id = request.awaits
        if node_id is not None:
            self.by_node.setdefault(node_id, Ranked()).add(request)
            tokens = self.awaited_tokens.get(node_id, 0)
            self.awaited_tokens[node_id] = tokens + request.awaited_tokens

    def _forget(self, request: RequestRecord) -> None:
        node_id = request.awaits
        if node_id is None:
            return
        self.by_node[node_id].remove(request)
        self.awaited_tokens[node_id] -= request.awaited_tokens
        if not self.by_node[node_id]:
            del self.by_node[node_id], self.awaited_tokens[node_id]

    def wait_s(self, request: RequestRecord, now: float) -> float:
        """Predict the remaining wait of a request, waiting or about to wait, for its turn."""
        lane = self.lane(request)
        return lane.wait_s(lane.ranked.before(self._next_rank(request)), now)

    def slot_wait_s(self, request: RequestRecord, node_id: NodeId, now: float) -> float:
        """Predict when a full node will have a place for the request; infinite if unknown."""
        lane = self.lane(request)
        turn_s = lane.turn_s(now) * lane.servers
        before = 0 if request.phase is RequestPhase.WAITING else len(self.by_node.get(node_id, ()))
        return (before + 1) * turn_s if turn_s else math.inf

    def next_for(self, node_id: NodeId, heads: int, own: int = 1) -> list[RequestRecord]:
        """Return the requests to consider when a node may have room, by rank.

        Contains the first requests waiting for this node, because requests waiting for other nodes
        must not keep the node idle, and the first requests of each lane, because any node may suit
        a request.
        """
        found = self.heads(heads)
        if node_id in self.by_node:
            found += [r for r in self.by_node[node_id].heads(own) if r not in found]
        return sorted(found, key=lambda request: request.rank)

    def heads(self, count: int) -> list[RequestRecord]:
        """Return the first ``count`` requests of each lane."""
        return [r for lane in self.lanes.values() for r in lane.ranked.heads(count)]

    def position(self, request: RequestRecord) -> int:
        """Count the requests that go to the same node before a waiting request."""
        ranked = self.by_node.get(request.awaits) if request.awaits is not None else None
        return 0 if ranked is None else ranked.before(request.rank)

    def retry_after_s(self, model: WantedModel, now: float) -> float:
        """Predict when a quarter of the requests waiting for a model will have gone."""
        lane = self.lanes.get((model, False))
        wait_s = lane.wait_s(len(lane.ranked) // 4, now) if lane else 0.0
        return _retry_s(wait_s or 1.0)

    def calls(self, now: float) -> tuple[WaitingCall, ...]:
        """Return all waiting requests, lane by lane, by rank."""
        return tuple(
            _waiting_call(request, lane.wait_s(position, now), now)
            for lane in self.lanes.values()
            for position, request in enumerate(lane.ranked)
        )

    def check_invariants(self) -> None:
        """Assert that both indexes hold the same requests, in order of rank."""
        waiting = [r for lane in self.lanes.values() for r in lane.ranked]
        assert len(waiting) == self._size
        assert all(request.phase is RequestPhase.WAITING for request in waiting)
        for key, lane in self.lanes.items():
            ranks = [request.rank for request in lane.ranked]
            assert ranks == sorted(ranks)
            assert all(lane_key(request) == key for request in lane.ranked)
        for node_id, ranked in self.by_node.items():
            assert len(ranked) and all(request.awaits == node_id for request in ranked)
            assert self.awaited_tokens[node_id] == sum(r.awaited_tokens for r in ranked)
        assert sum(turns.waiting for turns in self._turns.values()) == self._size
        weights = sum(turns.weight for turns in self._turns.values())
        assert math.isclose(weights, self._weights, abs_tol=1e-6)
        assert sum(map(len, self.by_node.values())) == sum(
            request.awaits is not None for request in waiting
        )


def _turns_key(request: RequestRecord) -> tuple[str, int]:
    return request.arrived.tenant, request.arrived.priority


def _waiting_call(request: RequestRecord, turn_s: float, now: float) -> WaitingCall:
    ttft_s = now - request.arrived_s + turn_s + request.service_s
    return WaitingCall(
        request.request_id,
        request.arrived.priority,
        now - request.waiting_since_s,
        None if request.awaits is None else ttft_s,
        request.awaits,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a new request may not even wait, and when to retry."""

    reason: str
    retry_after_s: float


def refusal(
    queue: WaitQueue,
    request: RequestRecord,
    *,
    wait_s: float,
    service_s: float,
    has_room: bool,
    config: SchedulerConfig,
    now: float,
) -> Refusal | None:
    """Return a Refusal if a new request has to be refused.

    A request is refused if earlier requests would delay its first token beyond the target, even as
    the queue drains, or if the request has to wait and too many requests wait already. A long
    prompt alone is no reason to refuse: a request may always wait half of the target, since a retry
    would not make the prompt shorter.

    Args:
        queue: the waiting requests.
        request: the new request; not in any lane yet.
        wait_s: predicted time until the turn, here and in the node's queue.
        service_s: predicted time of the request's own prefill.
        has_room: the request could go to a node now.
        config: target and bounds.
        now: current time.
    """
    slo_s = config.ttft_slo_s
    if slo_s:
        allowed_s = max(slo_s - service_s, slo_s / 2) - (now - request.arrived_s)
        if wait_s > allowed_s:
            reason = f"its first token would take {wait_s + service_s:.1f} s, more than {slo_s:g} s"
            return Refusal(reason, _retry_s(wait_s - allowed_s))
    if not has_room and len(queue) >= config.max_waiting:
        retry_s = queue.retry_after_s(request.arrived.model, now)
        return Refusal(f"{len(queue)} requests wait already", retry_s)
    return None


def _retry_s(predicted_s: float) -> float:
    return max(MIN_RETRY_S, min(predicted_s, MAX_RETRY_S))
