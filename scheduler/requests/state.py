"""The scheduler's pure core: choose a node for each request, and another node after a loss.

scheduler/dispatcher.py feeds events to ``SchedulerState.handle`` and carries out the instructions.
The core never sees a socket, a clock or a token id: only counts, names and times.
"""

# Theory of operation.
# - Phases: LOCATING -> (RUNNING <-> WAITING) -> FINISHED | FAILED | CANCELLED; TRANSITIONS in
#   request_record.py is the table. A request has a node exactly while it is RUNNING, and stands in
#   the wait queue exactly while it is WAITING. Each accepted request ends once.
# - A Dispatch may answer any event, also an event about another request: ``handle`` first applies
#   the event, then offers the freed places to waiting requests, by rank (``_drain``).
# - A driver sends NodesSeen first and whenever a node's load changes. Per request: RequestArrived;
#   ChainLocated after a Locate; FirstToken; RequestFinished. A Wait needs WaitOver at its time.
# - Events race with the end of a request, so events about an unknown request are ignored.

from __future__ import annotations

from collections import Counter

from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.choosing.admission import MAX_PRIORITY, Refusal, WaitQueue, refusal
from tierkv.scheduler.choosing.prefetch_plan import PrefetchPlan
from tierkv.scheduler.choosing.router import Pick, Router, layout_of, near_after_handoff
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Abandon,
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    Failure,
    FirstToken,
    HandoffDone,
    Instruction,
    Locate,
    NodeLost,
    NodeRefused,
    NodesSeen,
    PrefetchDone,
    PrefillProgress,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Stage,
    Wait,
    WaitOver,
)
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.request_record import LIVE, RequestPhase, RequestRecord

LOOK_AHEAD = 8
"""Requests at the front of a lane that are considered for a new or idle node."""

MAX_ASKED = 8
"""Upper bound on placement rounds per event; later events consider the remaining requests."""


class SchedulerState:
    """Live requests and the nodes that run them. Mutated only through ``handle``.

    Attributes:
        config: bounds and defaults.
        fleet: the nodes.
        router: chooses a node for a request.
        queue: requests that wait for room at a node, or for a node.
        ahead: prefetches of blocks that nodes load before a request runs.
        requests: live requests by id.
        arrived: requests ever accepted for scheduling or refused as overload.
        queued: times a request had to wait for room.
        rejected: requests refused on arrival.
        ended: requests ended, by final phase; sums up to ``arrived - len(requests)``.
    """

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.fleet = Fleet(self.config)
        self.router = Router(self.config, self.fleet)
        self.queue = WaitQueue()
        self.ahead = PrefetchPlan(self.config, self.fleet, self.router)
        self.requests: dict[RequestId, RequestRecord] = {}
        self.arrived = 0
        self.queued = 0
        self.rejected = 0
        self.ended = {RequestPhase.FINISHED: 0, RequestPhase.FAILED: 0, RequestPhase.CANCELLED: 0}
        self._freed: set[NodeId] = set()
        self._fleet_changed = False

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Apply an event and return the instructions that follow from the event.

        Events about a request that has ended are ignored.
        """
        instructions = self._dispatch_event(event, now)
        if self._freed or self._fleet_changed:
            instructions += self._drain(now)
        return instructions

    def _dispatch_event(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, NodesSeen):
            return self._on_nodes(event, now)
        if isinstance(event, RequestArrived):
            return self._on_arrived(event, now)
        request = self.requests.get(event.request_id)
        if request is None:
            return []
        request.tell(type(event).__name__, now)
        return self._on_request_event(request, event, now)

    def _on_request_event(
        self, request: RequestRecord, event: Event, now: float
    ) -> list[Instruction]:
        match event:
            case ChainLocated():
                request.near, request.pool = dict(event.near), event.pool
                return self._route(request, now)
            case FirstToken():
                return self._on_first_token(request, now)
            case PrefillProgress():
                return self.ahead.for_handoff(request, event, now)
            case PrefetchDone():
                self.ahead.done(request, event)
                return self._load_next(event.node_id, now)
            case HandoffDone():
                return self._on_handoff(request, event, now)
            case NodeLost():
                return self._on_lost(request, event, now)
            case NodeRefused():
                return self._on_refused(request, now)
            case WaitOver():
                return self._on_wait_over(request, now)
            case RequestFinished():
                return self._end(request, RequestPhase.FINISHED, now)
            case RequestFailed():
                return self._end(request, RequestPhase.FAILED, now)
            case RequestCancelled():
                return self._end(request, RequestPhase.CANCELLED, now)
            case _:  # pragma: no cover - NodesSeen and RequestArrived are handled above
                raise AssertionError(event)

    # -- arrivals and nodes

    def _on_arrived(self, event: RequestArrived, now: float) -> list[Instruction]:
        if event.request_id in self.requests:
            raise AssertionError(f"request id {event.request_id} is in use")
        self.arrived += 1
        if len(self.requests) >= self.config.max_requests:
            self.ended[RequestPhase.FAILED] += 1
            self.rejected += 1
            retry_s = self.queue.retry_after_s(event.model, now)
            reason = f"{len(self.requests)} requests are being answered or wait"
            return [Fail(event.request_id, Failure.OVERLOADED, reason, retry_s)]
        priority = max(-MAX_PRIORITY, min(event.priority, MAX_PRIORITY))
        rank = (now + priority * self.config.priority_step_s, self.arrived)
        request = RequestRecord(event, total_tokens=event.prompt_tokens, arrived_s=now, rank=rank)
        self.requests[event.request_id] = request
        if event.locatable and self._worth_locating(event, now):
            return [Locate(event.request_id)]
        return self._route(request, now)

    def _worth_locating(self, event: RequestArrived, now: float) -> bool:
        """True when the location of the chain could change a choice, a promise or a wait."""
        if self.config.ttft_slo_s or self.queue or self.router.choice_exists(event, now):
            return True
        nodes = self.fleet.candidates(event.model, Stage.WHOLE, refused=(), now=now)
        return not any(self.router.has_room(node, alone=True, urgent=False) for node in nodes)

    def _on_nodes(self, event: NodesSeen, now: float) -> list[Instruction]:
        self._fleet_changed = True
        self.fleet.pool_nodes = event.pool_nodes
        return self._abandon(self.fleet.see(event.nodes, now), now)

    def _abandon(self, ended: list[NodeRecord], now: float) -> list[Instruction]:
        """Move requests off ended incarnations, unless a rumour leaves a request no node."""
        if not ended:
            return []
        lost: list[Instruction] = []
        for request in self.requests.values():
            if request.node not in ended:
                continue
            replaced = self.fleet.records.get(request.node.info.node_id) is not request.node
            others = self.router.candidates(request, now)
            if replaced or any(r.state != "dead" and r is not request.node for r in others):
                lost.append(Abandon(request.request_id))
        return lost

    # -- progress of one request

    def _on_first_token(self, request: RequestRecord, now: float) -> list[Instruction]:
        request.first_token_seen = True
        request.give_up_s = None
        node = request.node
        if node is not None:
            node.answered(request.request_id, now)
            request.queued_tokens = 0
            self._freed.add(node.info.node_id)
            self._trust(node)
        return []

    def _trust(self, node: NodeRecord) -> None:
        """Clear the failures of a node that answered, and offer the node to waiting requests."""
        if node.failures:
            self.fleet.trust(node)
            self._fleet_changed = True

    def _on_handoff(
        self, request: RequestRecord, event: HandoffDone, now: float
    ) -> list[Instruction]:
        node = request.node
        assert node is not None, request.story
        blocks = (event.total_tokens - 1) // layout_of(request, node).block_tokens
        request.pool = CachedPrefix(l3_blocks=blocks, l4_blocks=blocks)
        request.near = {
            r.info.node_id: near_after_handoff(request, r, node, blocks)
            for r in self.fleet.records.values()
        }
        request.total_tokens = event.total_tokens
        request.stage = Stage.DECODE
        request.refused.clear()
        self._leave(request)
        self._trust(node)
        return self._route(request, now)

    def _on_lost(self, request: RequestRecord, event: NodeLost, now: float) -> list[Instruction]:
        node = request.node
        assert node is not None, request.story
        life = (node.info.node_id, int(node.info.incarnation))
        if request.first_token_seen or life not in request.lives_lost:
            request.losses += 1
        request.lives_lost.add(life)
        if request.give_up_s is None:
            request.give_up_s = now + self.config.node_wait_s
        request.total_tokens = event.total_tokens
        if request.stage is Stage.PREFILL and event.total_tokens > request.arrived.prompt_tokens:
            request.stage = Stage.DECODE
        self._leave(request)
        self.fleet.fail(node, request.request_id, now)
        if request.losses >= self.config.max_attempts:
            reason = f"{request.losses} nodes were lost while answering"
            return [*self._fail(request, Failure.NODE_LOST, reason, now), RefreshNodes()]
        return [RefreshNodes(), *self._route(request, now)]

    def _on_refused(self, request: RequestRecord, now: float) -> list[Instruction]:
        node = request.node
        assert node is not None, request.story
        request.refused.add(node.info.node_id)
        self._leave(request)
        self._trust(node)
        return self._route(request, now)

    # -- to a node, or not yet

    def _route(self, request: RequestRecord, now: float) -> list[Instruction]:
        candidates = self.router.candidates(request, now)
        if not candidates:
            return self._wait_for_a_node(request, now)
        pick = self.router.pick(request, candidates, now, self.queue)
        if request.phase is RequestPhase.LOCATING:
            refused = self._refusal(request, pick, now)
            if refused is not None:
                self.rejected += 1
                return self._fail(
                    request, Failure.OVERLOADED, refused.reason, now, refused.retry_after_s
                )
        if pick.has_room:
            return self._send(request, pick, now)
        self._wait_for_room(request, pick, len(candidates), now)
        wait = Wait(request.request_id, now + self.config.node_wait_s)
        return [wait, *self._load_ahead(request, pick)]

    def _refusal(self, request: RequestRecord, pick: Pick, now: float) -> Refusal | None:
        return refusal(
            self.queue,
            request,
            wait_s=pick.cost.wait_s if pick.has_room else self.queue.wait_s(request, now),
            service_s=pick.cost.service.total_s,
            has_room=pick.has_room,
            config=self.config,
            now=now,
        )

    def _send(self, request: RequestRecord, pick: Pick, now: float) -> list[Instruction]:
        node = pick.node
        if request.phase is RequestPhase.WAITING:
            self.queue.take(request, now)
        request.move(RequestPhase.RUNNING, now)
        if request.stage is not Stage.DECODE:
            # A prefill node hands over when another node can take over; else it answers to the end.
            split = self.router.would_split(request, node, now)
            request.stage = Stage.PREFILL if split else Stage.WHOLE
        self.router.took(request, node)
        request.attempts += 1
        request.node = node
        request.first_token_seen = False
        request.queued_tokens = pick.work.tokens
        node.take(request.request_id, pick.work, now)
        if node.failures:
            node.probe = request.request_id
        info = node.info
        return [
            Dispatch(
                request.request_id,
                info.node_id,
                info.incarnation,
                request.stage,
                pick.weighed,
                request.attempts,
            )
        ]

    def _wait_for_room(self, request: RequestRecord, pick: Pick, servers: int, now: float) -> None:
        """Queue a request whose chosen node has no room now."""
        request.give_up_s = None
        awaits, tokens = pick.node.info.node_id, pick.work.tokens
        if request.phase is RequestPhase.WAITING:
            self.queue.reconsider(request, awaits, tokens)
            return
        self.queued += 1
        request.awaits, request.awaited_tokens = awaits, tokens
        request.service_s = pick.cost.service.total_s
        self._start_waiting(request, now)
        self.queue.lane(request).servers = servers

    def _wait_for_a_node(self, request: RequestRecord, now: float) -> list[Instruction]:
        """Queue a request without a usable node, or fail the request at its time limit."""
        if request.refused:
            return self._fail(request, Failure.OVERLOADED, "every node's queue is full", now)
        if request.give_up_s is None:
            request.give_up_s = now + self.config.node_wait_s
        if now >= request.give_up_s:
            failure = Failure.NODE_LOST if request.losses else Failure.NO_NODE
            reason = f"no node came back within {self.config.node_wait_s:g} s"
            return self._fail(request, failure, reason, now)
        if request.phase is RequestPhase.WAITING:
            self.queue.reconsider(request, None, 0)
        else:
            request.service_s = 0.0
            self._start_waiting(request, now)
        probe_s = self.fleet.next_probe_s(request.arrived.model, now)
        until_s = request.give_up_s if probe_s is None else min(request.give_up_s, probe_s)
        return [Wait(request.request_id, until_s), RefreshNodes()]

    def _start_waiting(self, request: RequestRecord, now: float) -> None:
        request.waiting_since_s = now
        request.asked_ahead = False
        request.move(RequestPhase.WAITING, now)
        self.queue.add(request, now)

    def _on_wait_over(self, request: RequestRecord, now: float) -> list[Instruction]:
        if request.phase is not RequestPhase.WAITING:
            return []
        return self._route(request, now)

    def _drain(self, now: float) -> list[Instruction]:
        """Give freed places to waiting requests."""
        freed, self._freed = self._freed, set()
        changed, self._fleet_changed = self._fleet_changed, False
        instructions: list[Instruction] = []
        if not self.queue:
            return instructions
        for node_id in list(self.queue.by_node) if changed else freed:
            instructions += self._fill(node_id, now)
        if changed:
            instructions += self._send_heads(now)
        return instructions

    def _fill(self, node_id: NodeId, now: float) -> list[Instruction]:
        """Send requests to a node that may have room, by rank.

        Considers the first request that waits for the node and the first of each lane; for an idle
        node the first LOOK_AHEAD requests of each lane.
        """
        instructions: list[Instruction] = []
        for _ in range(MAX_ASKED):
            record = self.fleet.records.get(node_id)
            count = LOOK_AHEAD if record is not None and not record.in_flight else 1
            moved = False
            for request in self.queue.next_for(node_id, count):
                if not self._may_take(record, request, now):
                    continue
                awaited = request.awaits
                instructions += self._send_waiting(request, now)
                moved = moved or request.phase is RequestPhase.RUNNING or request.awaits != awaited
            if not moved:
                break
        return instructions

    def _may_take(self, record: NodeRecord | None, request: RequestRecord, now: float) -> bool:
        """True when a node may have room for a request, or when the node has left the fleet."""
        if record is None:
            return True
        alone = self.queue.lane(request).servers == 1
        room = self.router.has_room(record, alone=alone, urgent=request.is_urgent(now))
        return room and record.serves(request.arrived.model)

    def _send_heads(self, now: float) -> list[Instruction]:
        """Send the first requests of each lane to any node with room, for example a new node."""
        instructions: list[Instruction] = []
        sent = True
        while sent:
            sent = False
            for request in self.queue.heads(LOOK_AHEAD):
                instructions += self._send_waiting(request, now)
                sent = sent or request.phase is RequestPhase.RUNNING
        return instructions

    def _send_waiting(self, request: RequestRecord, now: float) -> list[Instruction]:
        candidates = self.router.candidates(request, now)
        some_room = self.router.some_have_room(candidates, urgent=request.is_urgent(now))
        if not candidates or not (some_room or self.ahead.may_ask(request)):
            return []
        pick = self.router.pick(request, candidates, now, self.queue)
        if pick.has_room:
            return self._send(request, pick, now)
        self._wait_for_room(request, pick, len(candidates), now)
        return self._load_ahead(request, pick)

    def _load_ahead(self, request: RequestRecord, pick: Pick) -> list[Instruction]:
        """Prefetch for a request near the front of the queue."""
        near = self.queue.position(request) < LOOK_AHEAD
        return self.ahead.for_turn(request, pick) if near else []

    def _load_next(self, node_id: NodeId, now: float) -> list[Instruction]:
        """Start the next prefetch on a node that ended a prefetch."""
        for request in self.queue.next_for(node_id, 0, LOOK_AHEAD):
            if self.ahead.may_ask(request):
                return self._send_waiting(request, now)
        return []

    # -- ends and accounts

    def _leave(self, request: RequestRecord) -> None:
        """Remove the request from its node's account."""
        node = request.node
        if node is None:
            return
        had_room = self.router.has_room(node, alone=False, urgent=False)
        node.leave(request.request_id)
        request.node, request.queued_tokens = None, 0
        if not (had_room and request.first_token_seen):  # Else no request waited for this room.
            self._freed.add(node.info.node_id)

    def _fail(
        self,
        request: RequestRecord,
        failure: Failure,
        reason: str,
        now: float,
        retry_after_s: float = 1.0,
    ) -> list[Instruction]:
        self._end(request, RequestPhase.FAILED, now)
        return [Fail(request.request_id, failure, reason, retry_after_s)]

    def _end(self, request: RequestRecord, phase: RequestPhase, now: float) -> list[Instruction]:
        node = request.node
        if request.phase is RequestPhase.WAITING:
            self.queue.remove(request)
        self._leave(request)
        self.ahead.drop(request)
        request.move(phase, now)
        del self.requests[request.request_id]
        self.ended[phase] += 1
        if node is not None and phase is not RequestPhase.CANCELLED:
            self._trust(node)
        elif node is not None and node.probe == request.request_id:
            node.probe = None
        return []

    # -- what others read

    def check_invariants(self) -> None:
        """Assert what must hold between any two events; O(requests + nodes)."""
        assert self.arrived == len(self.requests) + sum(self.ended.values())
        assert len(self.requests) <= self.config.max_requests
        in_flight, waiting, ahead = Counter[int](), Counter[int](), Counter[NodeId]()
        for request in self.requests.values():
            assert request.phase in LIVE, request.story
            running = request.phase is RequestPhase.RUNNING
            assert running == (request.node is not None), request.story
            if request.node is not None:
                in_flight[id(request.node)] += 1
                waiting[id(request.node)] += request.queued_tokens
            if request.ahead is not None:
                ahead[request.ahead] += 1
        for record in self.fleet.records.values():
            assert record.in_flight == in_flight[id(record)], record
            assert record.in_flight <= self.config.max_in_flight_per_node, record
            assert record.waiting_tokens == waiting[id(record)], record
            if record.probe is not None:
                assert record.failures, record
                assert self.requests[record.probe].node is record, record
        assert self.ahead.loading == ahead
        assert all(count <= self.config.prefetches_per_node for count in ahead.values())
        self.queue.check_invariants()
        phases = Counter(request.phase for request in self.requests.values())
        assert len(self.queue) == phases[RequestPhase.WAITING]
