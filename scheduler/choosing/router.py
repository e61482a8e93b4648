"""Which node a request should go to now, and whether that node has room.

Pure; a part of SchedulerState, which acts on the pick. Costs come from choice.py;
this file decides which nodes may be asked, which one continues after a prefill, and which request
waits behind which. Where one node is left and it has none of the prompt, plain sums replace the
arrays, which would take ten times as long; tests/property/test_routing_cost.py holds the two equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.costing.node_cost import (
    NOTHING_CACHED,
    CachedPrefix,
    CostSplit,
    ServiceCost,
    charged,
    turn_s,
)
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.layout import BlockLayout
from tierkv.kvcore.node import NodeRole
from tierkv.scheduler.choosing.admission import WaitQueue
from tierkv.scheduler.choosing.choice import Costs, Weighed, choose, prefer_direct, weigh, wished
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import CandidateCost, RequestArrived, Stage
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord, Work
from tierkv.scheduler.request_record import RequestPhase, RequestRecord


@dataclass(frozen=True, slots=True)
class LoneCost:
    """What a request costs at the only node for it, and what the node has to do."""

    split: CostSplit
    work: Work


def finds_nothing(request: RequestRecord) -> bool:
    """Whether nothing of the prompt is known to be anywhere."""
    return not request.near and request.pool == NOTHING_CACHED


def weigh_lone(
    request: RequestRecord,
    node: NodeRecord,
    *,
    config: SchedulerConfig,
    now: float,
    waiting: int = 0,
    awaited_tokens: int = 0,
) -> LoneCost:
    """Say what the request would cost at the only candidate, computed from its first token on.

    Args:
        request: of which nothing is cached.
        node: serves its model, and does not hand answers over.
        config: the charges.
        now: the time.
        waiting: requests that wait for the same node; they would be delayed, too.
        awaited_tokens: of these, prompt tokens that are computed before.
    """
    tokens, rates, learned, load = request.total_tokens, node.rates, node.correction, node.load
    begins_s = turn_s(node.account(), rates.cost.per_token_s, now)
    first_s, later_s = rates.cost.in_steps(0, tokens, rates.step_tokens)
    prefill_s = first_s + later_s
    ended_s = begins_s + first_s + later_s
    charge = config.queue_weight * (max(node.outstanding - load.decodes_running, 0) + waiting)
    taken_s = rates.cost.own_passes_s(0, tokens, rates.step_tokens)
    wait_s, service_s, harm_s, total_s = charged(
        learned,
        turn_s=begins_s,
        ended_s=ended_s,
        prefill_s=prefill_s,
        decodes=load.decodes_running,
        decode_step_s=load.decode_step_s,
        decode_harm=config.decode_harm,
        charge=charge,
        taken_s=taken_s,
    )
    before_s = awaited_tokens * rates.cost.per_token_s
    wait_s += before_s
    service = ServiceCost(0, 0.0, prefill_s, service_s)
    # Prompts that wait share forward passes.
    compute_s = (prefill_s - rates.cost.shared_pass_s(tokens, rates.step_tokens)) * learned.factor
    work = Work(tokens, compute_s, predicted_s=ended_s, corrected_s=wait_s + service_s)
    return LoneCost(
        CostSplit(wait_s, service, total_s + before_s, harm_s, 0.0, charge, taken_s), work
    )


SESSIONS_REMEMBERED = 65_536
CANDIDATES_LOGGED = 8
BATCH_TOKENS = 4_096
"""Two steps of a node's default token budget: with fewer queued its batches would not be full."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request should go, or wait to go.

    Attributes:
        node: the cheapest for it.
        cost: what it costs there.
        work: what the node would have to do for it.
        has_room: it may go there now.
        weighed: what the cheapest candidates cost, the picked one first.
    """

    node: NodeRecord
    cost: CostSplit
    work: Work
    has_room: bool
    weighed: Sequence[CandidateCost]


class Router:
    """Chooses among the nodes of a fleet. Mutated only through SchedulerState."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._sessions: OrderedDict[str, NodeId] = OrderedDict()
        self._serial = 0

    # -- who may be asked

    def choice_exists(self, event: RequestArrived, now: float) -> bool:
        """Whether knowing where the chain is could change the decision."""
        serving = self._fleet.candidates(event.model, Stage.WHOLE, refused=(), now=now)
        return len({id(r) for r in (*serving, *self.decoders(event, now))}) > 1

    def decoders(
        self, event: RequestArrived, now: float, refused: Collection[NodeId] = ()
    ) -> list[NodeRecord]:
        """Live nodes that are there to continue answers others began."""
        return self._fleet.decoders(event.model, refused=refused, now=now)

    def candidates(self, request: RequestRecord, now: float) -> list[NodeRecord]:
        """Nodes that could take the request's next stage, with room or without."""
        found = self._fleet.candidates(
            request.arrived.model,
            request.stage,
            refused=request.refused,
            now=now,
        )
        if request.stage is Stage.DECODE or not request.near:
            return found
        decoders = self.decoders(request.arrived, now, request.refused)
        more = [r for r in decoders if r not in found and self._is_short(request, r)]
        return [*found, *more] if more else found  # The fleet knows its own list again.

    def _is_short(self, request: RequestRecord, record: NodeRecord) -> bool:
        """Whether so little is missing on a decode node that it may compute that itself."""
        near = request.near.get(record.info.node_id, NOTHING_CACHED)
        cached = max(near.l1_blocks, near.l2_blocks)
        missing = request.total_tokens - cached * layout_of(request, record).block_tokens
        return missing <= min(self._config.direct_tokens, request.total_tokens // 2)

    # -- which of them

    def pick(
        self, request: RequestRecord, candidates: list[NodeRecord], now: float, queue: WaitQueue
    ) -> Pick:
        """Take the cheapest; where that has no place, another only if waiting costs more.

        Args:
            request: what it needs and where its blocks are.
            candidates: at least one.
            now: the time.
            queue: who waits. A new request goes behind them; one that waits is weighed only when
                its turn has come, so nobody is before it.
        """
        only = candidates[0] if len(candidates) == 1 and finds_nothing(request) else None
        if only is not None and not self.would_split(request, only, now):
            return self._pick_only(request, only, now, queue)
        costs = weigh(
            request,
            candidates,
            fleet=self._fleet,
            now=now,
            splits=self._splits(request, now),
            waiting=len(queue.lane(request).ranked),
        )
        among = prefer_direct(costs, stage=request.stage)
        if queue.awaited_tokens and request.phase is not RequestPhase.WAITING:
            costs = _behind(queue, costs)
        last = self._last_node(request)
        wish = None if request.stage is Stage.DECODE else request.arrived.preferred_node
        chosen = (
            None
            if wish is None
            else wished(
                costs, among, wish, request.total_tokens, layout_of(request, costs.nodes[0])
            )
        )
        if chosen is None:
            chosen = choose(costs, among, last_node=last)
        alone = len(among) == 1
        has_room = self.has_room(costs.nodes[chosen], alone=alone)
        if not has_room:
            place_s = self._place_wait_s(request, costs.nodes[chosen], now, queue)
            bound_s = costs.total_s[chosen] + place_s
            free = [
                at
                for at in among
                if costs.total_s[at] <= bound_s and self.has_room(costs.nodes[at], alone=alone)
            ]
            if free:
                chosen, has_room = choose(costs, free, last_node=last), True
        node = costs.nodes[chosen]
        work = costs.work(chosen, request.total_tokens, layout_of(request, node))
        return Pick(node, costs[chosen], work, has_room, _logged(costs, among, chosen))

    def _pick_only(
        self, request: RequestRecord, node: NodeRecord, now: float, queue: WaitQueue
    ) -> Pick:
        """Take the only one there is; what is left to find out is what it will take."""
        behind = request.phase is not RequestPhase.WAITING
        lone = weigh_lone(
            request,
            node,
            config=self._config,
            now=now,
            waiting=len(queue.lane(request).ranked),
            awaited_tokens=queue.awaited_tokens.get(node.info.node_id, 0) if behind else 0,
        )
        weighed = (CandidateCost(node.info.node_id, lone.split),)
        return Pick(node, lone.split, lone.work, self.has_room(node, alone=True), weighed)

    def _place_wait_s(
        self, request: RequestRecord, node: NodeRecord, now: float, queue: WaitQueue
    ) -> float:
        """Predict the wait for a place in a full batch; a queue of prompts is in the cost.

        Who waits already expects to wait as long again. So a request waits no longer for the best
        node than another one would have cost more, whatever was predicted.
        """
        waited_s = now - request.waiting_since_s if request.phase is RequestPhase.WAITING else 0.0
        if node.outstanding < self._config.max_in_flight_per_node:
            return waited_s
        return max(waited_s, queue.slot_wait_s(request, node.info.node_id, now))

    def has_room(self, record: NodeRecord, *, alone: bool) -> bool:
        """Whether a node should be given one more request now.

        One request may always go, whatever other fronts have sent there. A node that is the only
        choice (``alone``) batches best with all prompts at hand; else prompts wait where they can
        still go elsewhere.
        """
        if record.in_flight == 0:
            return True
        if record.outstanding >= self._config.max_in_flight_per_node:
            return False
        tokens = record.waiting_tokens + record.others_waiting_tokens
        return alone or tokens < max(
            BATCH_TOKENS, self._config.node_queue_s * record.rates.prefill_tokens_per_s
        )

    def some_have_room(self, candidates: Sequence[NodeRecord]) -> bool:
        """Whether weighing could end in a send; cheaper than weighing when all are busy.

        Where some only decode, a choice may narrow to one node, for which more room is made.
        """
        alone = len(candidates) == 1 or any(r.info.role is NodeRole.DECODE for r in candidates)
        return any(self.has_room(record, alone=alone) for record in candidates)

    def _last_node(self, request: RequestRecord) -> NodeId | None:
        if request.stage is Stage.DECODE and request.successor is not None:
            return request.successor.info.node_id
        return self._sessions.get(request.arrived.session_id or "")

    def would_split(self, request: RequestRecord, node: NodeRecord, now: float) -> bool:
        """Whether a node would hand the answer over after the prefill."""
        return node.info.role is NodeRole.PREFILL and self._splits(request, now)

    def _splits(self, request: RequestRecord, now: float) -> bool:
        """Whether nodes that only prefill would hand the answer over."""
        return (
            request.stage is not Stage.DECODE
            and request.arrived.splittable
            and self._fleet.decodes_elsewhere(request.arrived.model, now)
        )

    def successor(self, request: RequestRecord, now: float) -> NodeRecord | None:
        """Who will continue the answer: whoever was told to prepare, while it is there."""
        decoders = self.decoders(request.arrived, now)
        if request.successor in decoders:
            return request.successor
        request.successor, request.prefetched_tokens = None, 0
        if decoders:
            costs = weigh(request, decoders, fleet=self._fleet, now=now)
            last = self._sessions.get(request.arrived.session_id or "")
            request.successor = decoders[choose(costs, range(len(costs)), last_node=last)]
            self._mark(request.successor)
        return request.successor

    # -- what is remembered

    def took(self, request: RequestRecord, node: NodeRecord) -> None:
        """Note that the node was chosen: ties go to others next time, the session comes back."""
        self._mark(node)
        session_id = request.arrived.session_id
        if session_id is None:
            return
        self._sessions[session_id] = node.info.node_id
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > SESSIONS_REMEMBERED:
            self._sessions.popitem(last=False)

    def _mark(self, node: NodeRecord) -> None:
        self._serial += 1
        node.mark(self._serial)


def layout_of(request: RequestRecord, record: NodeRecord) -> BlockLayout:
    """KV layout of the request's model at a node that serves it."""
    return record.layout(request.arrived.model)


def near_after_handoff(
    request: RequestRecord, record: NodeRecord, prefilled: NodeRecord, blocks: int
) -> CachedPrefix:
    """What a node has near after a prefill: what it had, was told to load, or its host got."""
    known = request.near.get(record.info.node_id, NOTHING_CACHED)
    l1 = known.l1_blocks
    if record is request.successor:
        l1 = max(l1, request.prefetched_tokens // layout_of(request, record).block_tokens)
    same_host = record.info.host == prefilled.info.host
    return CachedPrefix(l1, max(l1, known.l2_blocks, blocks if same_host else 0))


def _behind(queue: WaitQueue, costs: Costs) -> Costs:
    """The costs behind those that wait for a node."""
    awaited = queue.awaited_tokens
    tokens = np.array([awaited.get(node.info.node_id, 0) for node in costs.nodes])
    return costs.behind(tokens * costs.figures.speeds.cost.per_token_s)


def _logged(costs: Costs, among: list[int], chosen: int) -> Weighed:
    """The chosen one and the cheapest others of those it was chosen from."""
    cheapest = costs.cheapest(CANDIDATES_LOGGED) if len(among) == len(costs) else among
    others = [at for at in cheapest if at != chosen][: CANDIDATES_LOGGED - 1]
    return costs.weighed([chosen, *others])
