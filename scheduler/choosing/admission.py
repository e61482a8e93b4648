"""Requests that wait for room at a node: in which order they go, and how long that will take.

Pure; a part of SchedulerState, mutated only through it. A request of priority ``p`` counts as if it
had arrived ``p`` times ``priority_step_s`` later, so nobody waits for ever behind more important
ones: who is that much older goes first.
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
"""What a refused caller is told to wait is between these, whatever was predicted."""

LaneKey = tuple[WantedModel, bool]
"""A model, and whether a decode stage waits: these are served by the same nodes."""

MAX_PRIORITY = 100
"""Priorities beyond it count as it: how far one request may overtake others is bounded."""

TURNS_REMEMBERED = 64
"""Turns that count in the mean time between two; older ones fade."""

TURNS_NEEDED = 3
"""More turns than this before that mean is believed; until then service times are added up."""


def lane_key(request: RequestRecord) -> LaneKey:
    """Say behind whom a request waits."""
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
        """Put a request in its place."""
        insort(self._entries, (*request.rank, request))

    def remove(self, request: RequestRecord) -> None:
        """Take a request out, which is in."""
        at = self.position(request)
        assert self._entries[at][2] is request, request.story
        del self._entries[at]

    def position(self, request: RequestRecord) -> int:
        """Count those that go before a request, which may be in or not."""
        return bisect_left(self._entries, request.rank)

    def heads(self, count: int) -> list[RequestRecord]:
        """The first few."""
        return [entry[2] for entry in self._entries[:count]]


class Lane:
    """The requests that wait for the same nodes, and how fast they get their turns.

    Attributes:
        ranked: who waits.
        backlog_s: predicted seconds of service of all of them.
        servers: how many nodes they may go to, as of the last time one came.
    """

    def __init__(self) -> None:
        self.ranked = Ranked()
        self.backlog_s = 0.0
        self.servers = 1
        self._turns = 0.0
        self._turns_s = 0.0
        self._since_s = 0.0

    def add(self, request: RequestRecord, now: float) -> None:
        """Take in a request; ``service_s`` is set."""
        if not self.ranked:
            self._since_s, self.backlog_s = now, 0.0
        self.ranked.add(request)
        self.backlog_s += request.service_s

    def remove(self, request: RequestRecord) -> None:
        """Let a request go that gave up."""
        self.ranked.remove(request)
        self.backlog_s = max(0.0, self.backlog_s - request.service_s)

    def take(self, request: RequestRecord, now: float) -> None:
        """Let a request go to its node, and count the time since the last one did."""
        self.remove(request)
        fade = 1.0 - 1.0 / TURNS_REMEMBERED
        self._turns = self._turns * fade + 1.0
        self._turns_s = self._turns_s * fade + max(0.0, now - self._since_s)
        self._since_s = now

    def turn_s(self, now: float) -> float:
        """Mean time between two turns; 0.0 until some were seen.

        A turn that is late already counts with the time it has taken so far.
        """
        if self._turns < TURNS_NEEDED:
            return 0.0
        late_s = max(0.0, now - self._since_s) if self.ranked else 0.0
        return (self._turns_s + late_s) / self._turns

    def wait_s(self, position: int, now: float) -> float:
        """Predict when the turn of a request comes that has ``position`` others before it."""
        turn_s = self.turn_s(now)
        if turn_s:
            return (position + 1) * turn_s
        waiting = max(1, len(self.ranked))
        return self.backlog_s * min(1.0, position / waiting) / self.servers


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A request that waits, for the views.

    Attributes:
        request_id: which.
        priority: lower goes earlier.
        waited_s: since it began to wait.
        predicted_ttft_s: from its arrival to its first token; None while no node serves its model.
        node_id: for whom it waits; None: for any node.
    """

    request_id: RequestId
    priority: int
    waited_s: float
    predicted_ttft_s: float | None
    node_id: NodeId | None


class WaitQueue:
    """All waiting requests: by lane, and by the node each of them waits for.

    Attributes:
        lanes: by model and stage; an empty one is kept for what it learned.
        by_node: who waits for a node, since that is cheaper than those that have room.
        awaited_tokens: what they will add to its queue.
    """

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self.by_node: dict[NodeId, Ranked] = {}
        self.awaited_tokens: dict[NodeId, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def lane(self, request: RequestRecord) -> Lane:
        """The lane of a request; made when it is the first."""
        key = lane_key(request)
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= 2 * limits.MAX_MODELS_PER_NODE:
                self.lanes = {k: v for k, v in self.lanes.items() if v.ranked}
            lane = self.lanes[key] = Lane()
        return lane

    def add(self, request: RequestRecord, now: float) -> None:
        """Let a request wait; ``awaits`` says for whom, None for any node at all."""
        self.lane(request).add(request, now)
        self._size += 1
        self._await(request)

    def reconsider(self, request: RequestRecord, awaits: NodeId | None, tokens: int) -> None:
        """Note that a waiting request now waits for another node."""
        if request.awaits == awaits and request.awaited_tokens == tokens:
            return
        self._forget(request)
        request.awaits, request.awaited_tokens = awaits, tokens
        self._await(request)

    def remove(self, request: RequestRecord) -> None:
        """Let a request go that gave up."""
        self.lane(request).remove(request)
        self._gone(request)

    def take(self, request: RequestRecord, now: float) -> None:
        """Let a request go to its node."""
        self.lane(request).take(request, now)
        self._gone(request)

    def _gone(self, request: RequestRecord) -> None:
        self._size -= 1
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
        """Predict how long a request, waiting or about to, will go on to wait for its turn."""
        lane = self.lane(request)
        return lane.wait_s(lane.ranked.position(request), now)

    def slot_wait_s(self, request: RequestRecord, node_id: NodeId, now: float) -> float:
        """Predict when a full node would have a place for the request; infinite when unknown."""
        lane = self.lane(request)
        turn_s = lane.turn_s(now) * lane.servers
        before = 0 if request.phase is RequestPhase.WAITING else len(self.by_node.get(node_id, ()))
        return (before + 1) * turn_s if turn_s else math.inf

    def next_for(self, node_id: NodeId, heads: int, own: int = 1) -> list[RequestRecord]:
        """Whom to weigh when a node may have room, by rank.

        The first of those who wait for it, so that who waits for others does not keep it idle; and
        the first few of each lane, since any node may be theirs.
        """
        found = self.heads(heads)
        if node_id in self.by_node:
            found += [r for r in self.by_node[node_id].heads(own) if r not in found]
        return sorted(found, key=lambda request: request.rank)

    def heads(self, count: int) -> list[RequestRecord]:
        """The first few of each lane."""
        return [r for lane in self.lanes.values() for r in lane.ranked.heads(count)]

    def position(self, request: RequestRecord) -> int:
        """Count those that go to the same node before a waiting request."""
        ranked = self.by_node.get(request.awaits) if request.awaits is not None else None
        return 0 if ranked is None else ranked.position(request)

    def retry_after_s(self, model: WantedModel, now: float) -> float:
        """Predict when a quarter of those who wait for a model will have gone."""
        lane = self.lanes.get((model, False))
        wait_s = lane.wait_s(len(lane.ranked) // 4, now) if lane else 0.0
        return _retry_s(wait_s or 1.0)

    def calls(self, now: float) -> tuple[WaitingCall, ...]:
        """Everybody who waits, lane by lane, by rank."""
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
        assert sum(map(len, self.by_node.values())) == sum(
            request.awaits is not None for request in waiting
        )


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
    """Why a new request may not even wait, and when another try makes sense."""

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
    """Say whether a new request has to be refused.

    It is, when those before it would make it miss the target for its first token, even as the queue
    drains; or when it would have to wait and too many do. A prompt that alone takes long is not
    refused for that: it may wait half of the target, since trying again would not make it shorter.

    Args:
        queue: who waits.
        request: the new one; it is in no lane yet.
        wait_s: predicted time until its turn, here and in its node's queue.
        service_s: predicted time of its own prefill.
        has_room: it could go to a node now.
        config: target and bounds.
        now: the time.
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
