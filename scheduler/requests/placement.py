"""Places requests: to a node, or into the queue, with blocks loaded ahead.

Pure; parts of SchedulerState, mutated only through SchedulerState (scheduler/requests/state.py).
The places that a node frees go to waiting requests, by rank (``drain``). Blocks are loaded ahead in
two cases: the successor loads blocks while the prefill goes on at another node; a node loads blocks
for a waiting request.
"""

from __future__ import annotations

from tierkv.costing.node_cost import NOTHING_CACHED, CachedPrefix
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.choosing.admission import Refusal, WaitQueue, refusal
from tierkv.scheduler.choosing.router import Pick, Router, layout_of
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    Dispatch,
    Fail,
    Failure,
    Instruction,
    Prefetch,
    PrefetchDone,
    PrefillProgress,
    RefreshNodes,
    Stage,
    Wait,
)
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord
from tierkv.scheduler.request_record import RequestPhase, RequestRecord

LOOK_AHEAD = 8
"""Requests at the front of a lane that are considered for a new or idle node."""

MAX_ASKED = 8
"""Upper bound on placement rounds per event; later events consider the remaining requests."""

PREFETCH_BLOCKS = 4
"""Fewer new blocks are not worth a prefetch."""

PREFETCH_STEPS = 8
"""Approximate number of prefetches of one prompt; each prefetch names all tokens so far."""


class PrefetchPlan:
    """Prefetches that nodes were asked for.

    Attributes:
        loading: per node, waiting requests whose blocks the node is loading now.
    """

    def __init__(self, config: SchedulerConfig, fleet: Fleet, router: Router) -> None:
        self.loading: dict[NodeId, int] = {}
        self._config = config
        self._fleet = fleet
        self._router = router

    def for_handoff(
        self, request: RequestRecord, event: PrefillProgress, now: float
    ) -> list[Instruction]:
        """Have the successor load the published blocks, in a few large steps."""
        if request.stage is not Stage.PREFILL or request.node is None:
            return []
        block_tokens = layout_of(request, request.node).block_tokens
        step = max(PREFETCH_BLOCKS * block_tokens, request.total_tokens // PREFETCH_STEPS)
        if event.published_tokens - request.prefetched_tokens < step:
            return []
        successor = self._router.successor(request, now)
        if successor is None:
            return []
        request.prefetched_tokens = event.published_tokens
        return [_prefetch(request, successor, event.published_tokens)]

    def for_turn(self, request: RequestRecord, pick: Pick) -> list[Instruction]:
        """Prefetch worthwhile blocks for a waiting request; once per wait, and few at a time."""
        node_id, reused_blocks = pick.node.info.node_id, pick.cost.service.reused_blocks
        in_l1 = request.near.get(node_id, NOTHING_CACHED).l1_blocks
        loading = self.loading.get(node_id, 0)
        if (
            request.asked_ahead
            or request.ahead is not None
            or reused_blocks - in_l1 < PREFETCH_BLOCKS
            or loading >= self._config.prefetches_per_node
        ):
            return []
        request.asked_ahead, request.ahead = True, node_id
        self.loading[node_id] = loading + 1
        block_tokens = layout_of(request, pick.node).block_tokens
        return [_prefetch(request, pick.node, reused_blocks * block_tokens)]

    def may_ask(self, request: RequestRecord) -> bool:
        """Return whether ``for_turn`` could start a prefetch, whatever the costs are."""
        return (
            not request.asked_ahead
            and request.ahead is None
            and max(request.pool.l3_blocks, request.pool.l4_blocks) >= PREFETCH_BLOCKS
            and (
                request.awaits is None
                or self.loading.get(request.awaits, 0) < self._config.prefetches_per_node
            )
        )

    def done(self, request: RequestRecord, event: PrefetchDone) -> None:
        """Record the blocks that a node has after a prefetch for a waiting request."""
        if request.ahead != event.node_id:
            return
        self.drop(request)
        record = self._fleet.records.get(event.node_id)
        if record is not None and record.serves(request.arrived.model):
            blocks = event.tokens // layout_of(request, record).block_tokens
            known = request.near.get(event.node_id, NOTHING_CACHED)
            request.near[event.node_id] = CachedPrefix(
                max(blocks, known.l1_blocks), max(blocks, known.l2_blocks)
            )

    def drop(self, request: RequestRecord) -> None:
        """Forget the running prefetch of a request."""
        node_id, request.ahead = request.ahead, None
        if node_id is None:
            return
        self.loading[node_id] -= 1
        if not self.loading[node_id]:
            del self.loading[node_id]


def _prefetch(request: RequestRecord, node: NodeRecord, tokens: int) -> Prefetch:
    return Prefetch(request.request_id, node.info.node_id, node.info.incarnation, tokens)


class RequestPlacement:
    """Gives each request a node, or a place in the queue.

    Attributes:
        router: chooses a node for a request.
        queue: requests that wait for room at a node, or for a node.
        ahead: prefetches of blocks that nodes load before a request runs.
        freed: nodes that freed a place since the last ``drain``.
        fleet_changed: the nodes changed since the last ``drain``.
        queued: times a request had to wait for room.
        rejected: requests refused on arrival.
    """

    def __init__(self, config: SchedulerConfig, fleet: Fleet) -> None:
        self.router = Router(config, fleet)
        self.queue = WaitQueue()
        self.ahead = PrefetchPlan(config, fleet, self.router)
        self.freed: set[NodeId] = set()
        self.fleet_changed = False
        self.queued = 0
        self.rejected = 0
        self._config = config
        self._fleet = fleet

    def route(self, request: RequestRecord, now: float) -> list[Instruction]:
        """Send or queue a request, or return a Fail; the caller then ends the request."""
        candidates = self.router.candidates(request, now)
        if not candidates:
            return self._wait_for_a_node(request, now)
        pick = self.router.pick(request, candidates, now, self.queue)
        if request.phase is RequestPhase.LOCATING:
            refused = self._refusal(request, pick, now)
            if refused is not None:
                self.rejected += 1
                reason, retry_s = refused.reason, refused.retry_after_s
                return [Fail(request.request_id, Failure.OVERLOADED, reason, retry_s)]
        if pick.has_room:
            return self._send(request, pick, now)
        self._wait_for_room(request, pick, len(candidates), now)
        wait = Wait(request.request_id, now + self._config.node_wait_s)
        return [wait, *self._load_ahead(request, pick)]

    def _refusal(self, request: RequestRecord, pick: Pick, now: float) -> Refusal | None:
        return refusal(
            self.queue,
            request,
            wait_s=pick.cost.wait_s if pick.has_room else self.queue.wait_s(request, now),
            service_s=pick.cost.service.total_s,
            has_room=pick.has_room,
            config=self._config,
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
        self.queue.lane(request).servers = servers
        self._start_waiting(request, now)

    def _wait_for_a_node(self, request: RequestRecord, now: float) -> list[Instruction]:
        """Queue a request without a usable node, or refuse the request at its time limit."""
        if request.refused:
            full = "every node's queue is full"
            return [Fail(request.request_id, Failure.OVERLOADED, full)]
        if request.give_up_s is None:
            request.give_up_s = now + self._config.node_wait_s
        if now >= request.give_up_s:
            failure = Failure.NODE_LOST if request.losses else Failure.NO_NODE
            reason = f"no node came back within {self._config.node_wait_s:g} s"
            return [Fail(request.request_id, failure, reason)]
        if request.phase is RequestPhase.WAITING:
            self.queue.reconsider(request, None, 0)
        else:
            request.service_s = 0.0
            self._start_waiting(request, now)
        probe_s = self._fleet.next_probe_s(request.arrived.model, now)
        until_s = request.give_up_s if probe_s is None else min(request.give_up_s, probe_s)
        return [Wait(request.request_id, until_s), RefreshNodes()]

    def _start_waiting(self, request: RequestRecord, now: float) -> None:
        request.waiting_since_s = now
        request.asked_ahead = False
        request.move(RequestPhase.WAITING, now)
        self.queue.add(request, now)

    def drain(self, now: float) -> list[Instruction]:
        """Give freed places to waiting requests."""
        freed, self.freed = self.freed, set()
        changed, self.fleet_changed = self.fleet_changed, False
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
            record = self._fleet.records.get(node_id)
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

    def load_next(self, node_id: NodeId, now: float) -> list[Instruction]:
        """Start the next prefetch on a node that ended a prefetch."""
        for request in self.queue.next_for(node_id, 0, LOOK_AHEAD):
            if self.ahead.may_ask(request):
                return self._send_waiting(request, now)
        return []

    def leave(self, request: RequestRecord) -> None:
        """Remove the request from its node's account."""
        node = request.node
        if node is None:
            return
        had_room = self.router.has_room(node, alone=False, urgent=False)
        node.leave(request.request_id)
        request.node, request.queued_tokens = None, 0
        if not (had_room and request.first_token_seen):  # Else no request waited for this room.
            self.freed.add(node.info.node_id)

    def trust(self, node: NodeRecord) -> None:
        """Clear the failures of a node that answered, and offer the node to waiting requests."""
        if node.failures:
            self._fleet.trust(node)
            self.fleet_changed = True
