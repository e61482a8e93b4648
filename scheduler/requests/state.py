"""The scheduler's pure core: choose a node for each request, and another node after a loss.

scheduler/dispatcher.py feeds events to ``SchedulerState.handle`` and carries out the instructions.
The core never sees a socket, a clock or a token id: only counts, names and times.
"""

# Theory of operation.
# - Phases: LOCATING -> (RUNNING <-> WAITING) -> FINISHED | FAILED | CANCELLED; TRANSITIONS in
#   request_record.py is the table. A request has a node exactly while it is RUNNING, and stands in
#   the wait queue exactly while it is WAITING. Each accepted request ends once.
# - A Dispatch may answer any event, also an event about another request: ``handle`` first applies
#   the event, then offers the freed places to waiting requests, by rank (placement.py).
# - A driver sends NodesSeen first and whenever a node's load changes. Per request: RequestArrived;
#   ChainLocated after a Locate; FirstToken; RequestFinished. A Wait needs WaitOver at its time.
# - Events race with the end of a request, so events about an unknown request are ignored.

from __future__ import annotations

from collections import Counter

from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.scheduler.choosing.admission import MAX_PRIORITY
from tierkv.scheduler.choosing.router import layout_of, near_after_handoff
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Abandon,
    ChainLocated,
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
    OthersSeen,
    PrefetchDone,
    PrefillProgress,
    RefreshNodes,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Stage,
    WaitOver,
)
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.request_record import LIVE, RequestPhase, RequestRecord
from tierkv.scheduler.requests.placement import RequestPlacement


class SchedulerState:
    """Live requests and the nodes that run them. Mutated only through ``handle``.

    Attributes:
        config: bounds and defaults.
        fleet: the nodes.
        placement: sends requests to nodes, or queues them; counts the queued and rejected requests.
        router, queue, ahead: parts of ``placement``.
        requests: live requests by id.
        arrived: requests ever accepted for scheduling or refused as overload.
        ended: requests ended, by final phase; sums up to ``arrived - len(requests)``.
    """

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.fleet = Fleet(self.config)
        self.placement = RequestPlacement(self.config, self.fleet)
        self.router = self.placement.router
        self.queue = self.placement.queue
        self.ahead = self.placement.ahead
        self.requests: dict[RequestId, RequestRecord] = {}
        self.arrived = 0
        self.ended = {RequestPhase.FINISHED: 0, RequestPhase.FAILED: 0, RequestPhase.CANCELLED: 0}

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Apply an event and return the instructions that follow from the event.

        Events about a request that has ended are ignored.
        """
        instructions = self._dispatch_event(event, now)
        if self.placement.freed or self.placement.fleet_changed:
            instructions += self.placement.drain(now)
        return instructions

    def _dispatch_event(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, NodesSeen):
            return self._on_nodes(event, now)
        if isinstance(event, OthersSeen):
            self.placement.fleet_changed = True
            self.fleet.see_others(event.work, now)
            return []
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
                return self.placement.load_next(event.node_id, now)
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
            case _:  # pragma: no cover - events without a request are handled above
                raise AssertionError(event)

    # -- arrivals and nodes

    def _on_arrived(self, event: RequestArrived, now: float) -> list[Instruction]:
        if event.request_id in self.requests:
            raise AssertionError(f"request id {event.request_id} is in use")
        self.arrived += 1
        if len(self.requests) >= self.config.max_requests:
            self.ended[RequestPhase.FAILED] += 1
            self.placement.rejected += 1
            retry_s = self.queue.retry_after_s(event.model, now)
            reason = f"{len(self.requests)} requests are being answered or wait"
            return [Fail(event.request_id, Failure.OVERLOADED, reason, retry_s)]
        priority = max(-MAX_PRIORITY, min(event.priority, MAX_PRIORITY))
        due_s = now + priority * self.config.priority_step_s
        request = RequestRecord(
            event,
            total_tokens=event.prompt_tokens,
            arrived_s=now,
            due_s=due_s,
            rank=(due_s, self.arrived),
        )
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
        self.placement.fleet_changed = True
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
            self.placement.freed.add(node.info.node_id)
            self.placement.trust(node)
        return []

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
        self.placement.leave(request)
        self.placement.trust(node)
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
        self.placement.leave(request)
        self.fleet.fail(node, request.request_id, now)
        if request.losses >= self.config.max_attempts:
            reason = f"{request.losses} nodes were lost while answering"
            return [*self._fail(request, Failure.NODE_LOST, reason, now), RefreshNodes()]
        return [RefreshNodes(), *self._route(request, now)]

    def _on_refused(self, request: RequestRecord, now: float) -> list[Instruction]:
        node = request.node
        assert node is not None, request.story
        request.refused.add(node.info.node_id)
        self.placement.leave(request)
        self.placement.trust(node)
        return self._route(request, now)

    def _route(self, request: RequestRecord, now: float) -> list[Instruction]:
        """Place a request, or end the request if it was refused."""
        instructions = self.placement.route(request, now)
        if any(isinstance(instruction, Fail) for instruction in instructions):
            self._end(request, RequestPhase.FAILED, now)
        return instructions

    def _on_wait_over(self, request: RequestRecord, now: float) -> list[Instruction]:
        if request.phase is not RequestPhase.WAITING:
            return []
        return self._route(request, now)

    # -- ends and accounts

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
        self.placement.leave(request)
        self.ahead.drop(request)
        request.move(phase, now)
        del self.requests[request.request_id]
        self.ended[phase] += 1
        if node is not None and phase is not RequestPhase.CANCELLED:
            self.placement.trust(node)
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
