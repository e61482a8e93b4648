"""The scheduler's pure core: which node answers which request, and what to do when one dies.

``SchedulerState.handle`` is the only mutator; scheduler/dispatcher.py feeds it events and carries
out its instructions. It never sees a socket, a clock or a token id: only counts, names and times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from heapq import nsmallest

from kvcore.ids import NodeId, RequestId
from kvcore.layout import BlockLayout
from kvcore.node import ModelInfo, NodeRole
from scheduler.choice import choose, prefer_direct, weigh
from scheduler.config import SchedulerConfig
from scheduler.cost import NOTHING_CACHED, CachedPrefix, CostSplit, handoff_cost
from scheduler.events import (
    Abandon,
    CandidateCost,
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
    Prefetch,
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
from scheduler.fleet import Fleet, NodeRecord
from scheduler.request_record import LIVE, Phase, RequestRecord

SESSIONS_REMEMBERED = 65_536
CANDIDATES_LOGGED = 8
PREFETCH_BLOCKS = 4
"""Fewer new blocks are not worth asking the next node to load ahead."""

PREFETCH_STEPS = 8
"""A prompt is loaded ahead in about so many requests: each names all tokens so far."""


class SchedulerState:
    """Who runs what. Mutated only through ``handle``.

    Attributes:
        config: bounds and defaults.
        fleet: the nodes.
        requests: live requests by id.
        arrived: requests ever accepted for scheduling or refused as overload.
        ended: how many ended in each final phase; sums up to ``arrived - len(requests)``.
    """

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.fleet = Fleet(self.config)
        self.requests: dict[RequestId, RequestRecord] = {}
        self.arrived = 0
        self.ended = {Phase.FINISHED: 0, Phase.FAILED: 0, Phase.CANCELLED: 0}
        self._sessions: OrderedDict[str, NodeId] = OrderedDict()
        self._serial = 0

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened and say what to do about it.

        Events about a request that has ended are ignored: they crossed its end on the way.
        """
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
                return self._on_progress(request, event, now)
            case HandoffDone():
                return self._on_handoff(request, event, now)
            case NodeLost():
                return self._on_lost(request, event, now)
            case NodeRefused():
                return self._on_refused(request, now)
            case WaitOver():
                return self._route(request, now) if request.phase is Phase.WAITING else []
            case RequestFinished():
                return self._end(request, Phase.FINISHED, now)
            case RequestFailed():
                return self._end(request, Phase.FAILED, now)
            case RequestCancelled():
                return self._end(request, Phase.CANCELLED, now)
            case _:  # pragma: no cover - NodesSeen and RequestArrived are handled above
                raise AssertionError(event)

    # -- arrivals and nodes

    def _on_arrived(self, event: RequestArrived, now: float) -> list[Instruction]:
        if event.request_id in self.requests:
            raise AssertionError(f"request id {event.request_id} is in use")
        self.arrived += 1
        if len(self.requests) >= self.config.max_requests:
            self.ended[Phase.FAILED] += 1
            return [Fail(event.request_id, Failure.OVERLOADED, f"{len(self.requests)} requests")]
        request = RequestRecord(event, total_tokens=event.prompt_tokens)
        self.requests[event.request_id] = request
        if event.locatable and self._choice_exists(event, now):
            return [Locate(event.request_id)]
        return self._route(request, now)

    def _choice_exists(self, event: RequestArrived, now: float) -> bool:
        """Whether knowing where the chain is could change the decision."""
        serving = self.fleet.candidates(event.model, Stage.WHOLE, refused=(), now=now)
        return len({id(r) for r in (*serving, *self._decoders(event, now))}) > 1

    def _decoders(
        self, event: RequestArrived, now: float, refused: Collection[NodeId] = ()
    ) -> list[NodeRecord]:
        return self.fleet.decoders(event.model, refused=refused, now=now)

    def _on_nodes(self, event: NodesSeen, now: float) -> list[Instruction]:
        ended = self.fleet.see(event.nodes, now)
        instructions = self._abandon(ended, now)
        return instructions + self._route_waiting(now)

    def _abandon(self, ended: list[NodeRecord], now: float) -> list[Instruction]:
        """Move requests off lives that ended, unless a mere rumour leaves them nowhere to go."""
        if not ended:
            return []
        lost: list[Instruction] = []
        for request in self.requests.values():
            if request.node not in ended:
                continue
            replaced = self.fleet.records.get(request.node.info.node_id) is not request.node
            others = self._candidates(request, now)
            if replaced or any(r.state != "dead" and r is not request.node for r in others):
                lost.append(Abandon(request.request_id))
        return lost

    def _route_waiting(self, now: float) -> list[Instruction]:
        waiting = [r for r in self.requests.values() if r.phase is Phase.WAITING]
        return [
            instruction
            for request in waiting
            if self._candidates(request, now)
            for instruction in self._route(request, now)
        ]

    # -- progress of one request

    def _on_first_token(self, request: RequestRecord, now: float) -> list[Instruction]:
        request.first_token_seen = True
        request.give_up_s = None
        node = request.node
        if node is None:
            return []
        node.waiting_tokens -= request.queued_tokens
        request.queued_tokens = 0
        return self._trust(node, now)

    def _trust(self, node: NodeRecord, now: float) -> list[Instruction]:
        """The node answered: nothing is held against it, and requests waiting for it may go."""
        if not node.failures:
            return []
        node.failures, node.probe = 0, None
        return self._route_waiting(now)

    def _on_progress(
        self, request: RequestRecord, event: PrefillProgress, now: float
    ) -> list[Instruction]:
        """Have the node that will go on load what is in the pool, in a few large steps."""
        if request.stage is not Stage.PREFILL or request.node is None:
            return []
        block_tokens = self._layout(request, request.node).block_tokens
        step = max(PREFETCH_BLOCKS * block_tokens, request.total_tokens // PREFETCH_STEPS)
        if event.published_tokens - request.prefetched_tokens < step:
            return []
        successor = self._successor(request, now)
        if successor is None:
            return []
        request.prefetched_tokens = event.published_tokens
        info = successor.info
        return [
            Prefetch(request.request_id, info.node_id, info.incarnation, event.published_tokens)
        ]

    def _successor(self, request: RequestRecord, now: float) -> NodeRecord | None:
        """Who will continue the answer: whoever was told to prepare, while it is there."""
        decoders = self._decoders(request.arrived, now)
        if request.successor in decoders:
            return request.successor
        request.successor, request.prefetched_tokens = None, 0
        if decoders:
            costs = weigh(request, decoders, queue_weight=self.config.queue_weight)
            last = self._sessions.get(request.arrived.session_id or "")
            request.successor = decoders[choose(decoders, costs, last_node=last)]
            self._serial += 1
            request.successor.last_chosen = self._serial
        return request.successor

    def _on_handoff(
        self, request: RequestRecord, event: HandoffDone, now: float
    ) -> list[Instruction]:
        node = request.node
        assert node is not None, request.story
        blocks = (event.total_tokens - 1) // self._layout(request, node).block_tokens
        request.pool = CachedPrefix(l3_blocks=blocks, l4_blocks=blocks)
        request.near = {
            r.info.node_id: self._near_after_handoff(request, r, node, blocks)
            for r in self.fleet.records.values()
        }
        request.total_tokens = event.total_tokens
        request.stage = Stage.DECODE
        request.refused.clear()
        self._leave(request)
        return [*self._trust(node, now), *self._route(request, now)]

    def _near_after_handoff(
        self, request: RequestRecord, record: NodeRecord, prefilled: NodeRecord, blocks: int
    ) -> CachedPrefix:
        """What a node has near: what it had, what it was told to load, what its host got."""
        known = request.near.get(record.info.node_id, NOTHING_CACHED)
        l1 = known.l1_blocks
        if record is request.successor:
            l1 = max(l1, request.prefetched_tokens // self._layout(request, record).block_tokens)
        same_host = record.info.host == prefilled.info.host
        return CachedPrefix(l1, max(l1, known.l2_blocks, blocks if same_host else 0))

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
        return [*self._trust(node, now), *self._route(request, now)]

    # -- routing

    def _route(self, request: RequestRecord, now: float) -> list[Instruction]:
        candidates = self._candidates(request, now)
        if not candidates:
            return self._wait_or_fail(request, now)
        costs = self._weigh(request, candidates, now)
        candidates, costs = prefer_direct(candidates, costs, stage=request.stage)
        last = self._sessions.get(request.arrived.session_id or "")
        if request.stage is Stage.DECODE and request.successor is not None:
            last = request.successor.info.node_id
        chosen = choose(candidates, costs, last_node=last)
        self._start(request, candidates[chosen], costs[chosen], now)
        weighed = [
            CandidateCost(r.info.node_id, cost) for r, cost in zip(candidates, costs, strict=True)
        ]
        first = weighed.pop(chosen)
        others = nsmallest(CANDIDATES_LOGGED - 1, weighed, key=lambda c: c.cost.total_s)
        return [
            Dispatch(
                request.request_id,
                candidates[chosen].info.node_id,
                candidates[chosen].info.incarnation,
                request.stage,
                (first, *others),
                request.attempts,
            )
        ]

    def _candidates(self, request: RequestRecord, now: float) -> list[NodeRecord]:
        found = self.fleet.candidates(
            request.arrived.model,
            request.stage,
            refused=request.refused,
            now=now,
        )
        if request.stage is Stage.DECODE or not request.near:
            return found
        decoders = self._decoders(request.arrived, now, request.refused)
        return found + [r for r in decoders if r not in found and self._is_short(request, r)]

    def _is_short(self, request: RequestRecord, record: NodeRecord) -> bool:
        """Whether so little is missing on a decode node that it may compute that itself."""
        near = request.near.get(record.info.node_id, NOTHING_CACHED)
        cached = max(near.l1_blocks, near.l2_blocks)
        missing = request.total_tokens - cached * self._layout(request, record).block_tokens
        return missing <= min(self.config.direct_tokens, request.total_tokens // 2)

    def _weigh(
        self, request: RequestRecord, candidates: list[NodeRecord], now: float
    ) -> list[CostSplit]:
        """Say what each candidate costs, until somebody decodes."""
        costs = weigh(request, candidates, queue_weight=self.config.queue_weight)
        for at, record in enumerate(candidates):
            if request.stage is not Stage.DECODE and self._would_split(request, record, now):
                layout = self._layout(request, record)
                extra_s = handoff_cost(
                    request.total_tokens, record.rates, layout, fixed_s=self.config.handoff_s
                )
                costs[at] = replace(costs[at], total_s=costs[at].total_s + extra_s)
        return costs

    def _start(self, request: RequestRecord, node: NodeRecord, cost: CostSplit, now: float) -> None:
        request.move(Phase.RUNNING, now)
        self._settle_stage(request, node, now)
        self._serial += 1
        node.last_chosen = self._serial
        request.attempts += 1
        request.node = node
        request.first_token_seen = False
        block_tokens = self._layout(request, node).block_tokens
        request.queued_tokens = request.total_tokens - cost.service.reused_blocks * block_tokens
        node.add(request.queued_tokens)
        if node.failures:
            node.probe = request.request_id
        self._remember_session(request.arrived.session_id, node.info.node_id)

    def _settle_stage(self, request: RequestRecord, node: NodeRecord, now: float) -> None:
        """A prefill node hands over when somebody can take over; else it answers to the end."""
        if request.stage is Stage.DECODE:
            return
        split = self._would_split(request, node, now)
        request.stage = Stage.PREFILL if split else Stage.WHOLE

    def _would_split(self, request: RequestRecord, node: NodeRecord, now: float) -> bool:
        return (
            request.arrived.splittable
            and node.info.role is NodeRole.PREFILL
            and self.fleet.decodes_elsewhere(request.arrived.model, now)
        )

    def _remember_session(self, session_id: str | None, node_id: NodeId) -> None:
        if session_id is None:
            return
        self._sessions[session_id] = node_id
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)

    def _wait_or_fail(self, request: RequestRecord, now: float) -> list[Instruction]:
        if request.refused:
            return self._fail(request, Failure.OVERLOADED, "every node's queue is full", now)
        if request.give_up_s is None:
            request.give_up_s = now + self.config.node_wait_s
        if now >= request.give_up_s:
            failure = Failure.NODE_LOST if request.losses else Failure.NO_NODE
            reason = f"no node came back within {self.config.node_wait_s:g} s"
            return self._fail(request, failure, reason, now)
        request.move(Phase.WAITING, now)
        probe_s = self.fleet.next_probe_s(request.arrived.model, now)
        until_s = request.give_up_s if probe_s is None else min(request.give_up_s, probe_s)
        return [Wait(request.request_id, until_s), RefreshNodes()]

    # -- ends and accounts

    def _leave(self, request: RequestRecord) -> None:
        """Take the request off its node's account."""
        node = request.node
        if node is None:
            return
        node.in_flight -= 1
        node.waiting_tokens -= request.queued_tokens
        request.node, request.queued_tokens = None, 0

    def _fail(
        self, request: RequestRecord, failure: Failure, reason: str, now: float
    ) -> list[Instruction]:
        return [
            *self._end(request, Phase.FAILED, now),
            Fail(request.request_id, failure, reason),
        ]

    def _end(self, request: RequestRecord, phase: Phase, now: float) -> list[Instruction]:
        node = request.node
        self._leave(request)
        request.move(phase, now)
        del self.requests[request.request_id]
        self.ended[phase] += 1
        if node is None:
            return []
        if phase is Phase.CANCELLED:
            if node.probe == request.request_id:
                node.probe = None
            return []
        return self._trust(node, now)

    def _layout(self, request: RequestRecord, record: NodeRecord) -> BlockLayout:
        return record.layout(request.arrived.model)

    def models(self) -> tuple[ModelInfo, ...]:
        """Models that live nodes serve."""
        return self.fleet.models()

    def check_invariants(self) -> None:
        """Assert what must hold between any two events; O(requests + nodes)."""
        assert self.arrived == len(self.requests) + sum(self.ended.values())
        in_flight: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for request in self.requests.values():
            assert request.phase in LIVE, request.story
            assert (request.node is not None) == (request.phase is Phase.RUNNING), request.story
            if request.node is not None:
                key = id(request.node)
                in_flight[key] = in_flight.get(key, 0) + 1
                waiting[key] = waiting.get(key, 0) + request.queued_tokens
        for record in self.fleet.records.values():
            assert record.in_flight == in_flight.get(id(record), 0), record
            assert record.waiting_tokens == waiting.get(id(record), 0), record
            if record.probe is not None:
                assert record.failures, record
                assert self.requests[record.probe].node is record, record
