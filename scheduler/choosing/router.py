"""Which node a request should go to now, and whether the node has room.

Pure; a part of SchedulerState, which acts on the pick. Costs come from choice.py; this file decides
which nodes may be asked, which node continues after a prefill, and how requests queue. A single
candidate without any of the prompt, and a plan's node that loads nothing, are priced by plain sums,
because arrays would take ten times as long; tests/property/test_routing_cost.py checks that both
agree.
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
from tierkv.kvcore.request import places_for
from tierkv.scheduler.choosing.admission import WaitQueue
from tierkv.scheduler.choosing.choice import (
    PREFERRED_COST,
    Costs,
    Weighed,
    choose,
    prefer_direct,
    weigh,
    wished,
)
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import CandidateCost, RequestArrived, Stage
from tierkv.scheduler.nodes.fleet import Fleet
from tierkv.scheduler.nodes.node_record import NodeRecord, Work
from tierkv.scheduler.request_record import RequestPhase, RequestRecord


@dataclass(frozen=True, slots=True)
class LoneCost:
    """Cost of a request at one node, and the work of the node."""

    split: CostSplit
    work: Work


def finds_nothing(request: RequestRecord) -> bool:
    """Return whether no blocks of the prompt are known anywhere."""
    return not request.near and request.pool == NOTHING_CACHED


def weigh_lone(
    request: RequestRecord,
    node: NodeRecord,
    *,
    config: SchedulerConfig,
    now: float,
    waiting: int = 0,
    awaited_tokens: int = 0,
    l1_blocks: int = 0,
) -> LoneCost:
    """Compute the cost of a request at a node that loads nothing.

    Args:
        request: the request.
        node: serves the request's model, and does not hand answers over.
        config: gives the charges.
        now: current time.
        waiting: requests waiting for the same node; the request would delay them too.
        awaited_tokens: prompt tokens of waiting requests to be computed before.
        l1_blocks: blocks of the prompt in the node's pages.
    """
    rates, learned, load = node.rates, node.correction, node.load
    cached = l1_blocks * layout_of(request, node).block_tokens if l1_blocks else 0
    tokens = request.total_tokens - cached
    begins_s = turn_s(node.account(), rates.cost.per_token_s, now)
    first_s, later_s = rates.cost.in_steps(cached, tokens, rates.step_tokens)
    prefill_s = first_s + later_s
    ended_s = begins_s + first_s + later_s
    charge = config.queue_weight * (max(node.outstanding - load.decodes_running, 0) + waiting)
    taken_s = rates.cost.own_passes_s(cached, tokens, rates.step_tokens)
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
    service = ServiceCost(l1_blocks, 0.0, prefill_s, service_s, (l1_blocks, 0, 0, 0))
    # Waiting prompts share forward passes.
    compute_s = (prefill_s - rates.cost.shared_pass_s(tokens, rates.step_tokens)) * learned.factor
    work = Work(tokens, compute_s, predicted_s=ended_s, corrected_s=wait_s + service_s)
    return LoneCost(
        CostSplit(wait_s, service, total_s + before_s, harm_s, 0.0, charge, taken_s), work
    )


SESSIONS_REMEMBERED = 65_536
CANDIDATES_LOGGED = 8
_FEW_NODES = 64
"""With more nodes a loop over the nodes takes longer than arrays."""
BATCH_TOKENS = 4_096
"""Two steps of a node's default token budget: with fewer queued tokens batches would not be full.
"""


@dataclass(frozen=True, slots=True)
class Pick:
    """The node where a request should go, or wait to go.

    Attributes:
        node: the best node for the request.
        cost: cost at this node.
        work: work of this node for the request.
        has_room: the request may go there now.
        weighed: costs of the cheapest candidates, the picked node first.
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

    # -- which nodes may be asked

    def choice_exists(self, event: RequestArrived, now: float) -> bool:
        """Return whether the location of the chain could change the decision."""
        serving = self._fleet.candidates(event.model, Stage.WHOLE, refused=(), now=now)
        if len(serving) > 1:
            return True
        return len({id(record) for record in (*serving, *self.decoders(event, now))}) > 1

    def decoders(
        self, event: RequestArrived, now: float, refused: Collection[NodeId] = ()
    ) -> list[NodeRecord]:
        """Return live decode nodes, which continue answers begun on other nodes."""
        return self._fleet.decoders(event.model, refused=refused, now=now)

    def candidates(self, request: RequestRecord, now: float) -> list[NodeRecord]:
        """Return nodes that could take the request's next stage, with or without room."""
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
        return [*found, *more] if more else found  # The fleet recognises its own list.

    def _is_short(self, request: RequestRecord, record: NodeRecord) -> bool:
        """Return whether a decode node lacks few enough tokens to compute the rest alone."""
        near = request.near.get(record.info.node_id, NOTHING_CACHED)
        cached = max(near.l1_blocks, near.l2_blocks)
        missing = request.total_tokens - cached * layout_of(request, record).block_tokens
        return missing <= min(self._config.direct_tokens, request.total_tokens // 2)

    # -- the best node

    def pick(
        self, request: RequestRecord, candidates: list[NodeRecord], now: float, queue: WaitQueue
    ) -> Pick:
        """Pick the cheapest node; if the node is full, another node only if waiting costs more.

        Args:
            request: has the tokens and the locations of the blocks.
            candidates: at least one node.
            now: current time.
            queue: the waiting requests. A new request queues behind the waiting requests. A waiting
                request is considered only in its turn, with no request before.
        """
        only = candidates[0] if len(candidates) == 1 and finds_nothing(request) else None
        if only is not None and not self.would_split(request, only, now):
            return self._pick_only(request, only, now, queue)
        planned = self._pick_planned(request, candidates, now, queue)
        if planned is not None:
            return planned
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
        urgent = request.is_urgent(now)
        has_room = self.has_room(costs.nodes[chosen], alone=alone, urgent=urgent)
        if not has_room:
            place_s = self._place_wait_s(request, costs.nodes[chosen], now, queue)
            bound_s = costs.total_s[chosen] + place_s
            free = [
                at
                for at in among
                if costs.total_s[at] <= bound_s
                and self.has_room(costs.nodes[at], alone=alone, urgent=urgent)
            ]
            if free:
                chosen, has_room = choose(costs, free, last_node=last), True
        node = costs.nodes[chosen]
        work = costs.work(chosen, request.total_tokens, layout_of(request, node))
        return Pick(node, costs[chosen], work, has_room, _logged(costs, among, chosen))

    def _pick_only(
        self, request: RequestRecord, node: NodeRecord, now: float, queue: WaitQueue
    ) -> Pick:
        """Pick the only candidate; only its cost has to be computed."""
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
        has_room = self.has_room(node, alone=True, urgent=request.is_urgent(now))
        return Pick(node, lone.split, lone.work, has_room, weighed)

    def _pick_planned(
        self, request: RequestRecord, candidates: list[NodeRecord], now: float, queue: WaitQueue
    ) -> Pick | None:
        """Pick the plan's node without comparing all nodes, where the comparison would accept it.

        No other node then has more of the prompt, and the node delays few decodes. None if all
        nodes have to be compared.
        """
        wish = request.arrived.preferred_node
        if wish is None or queue.awaited_tokens or len(candidates) > _FEW_NODES:
            return None
        if any(record.info.role is not NodeRole.COMPUTE for record in candidates):
            return None
        node = next((r for r in candidates if r.info.node_id == wish.node_id), None)
        if node is None or not self.has_room(node, alone=False, urgent=request.is_urgent(now)):
            return None
        reached = request.near.get(wish.node_id, NOTHING_CACHED).l1_blocks
        most = max(request.pool.l3_blocks, request.pool.l4_blocks)
        for near in request.near.values():
            most = max(most, near.l1_blocks, near.l2_blocks)
        if reached < most:
            return None
        whole_blocks = (request.total_tokens - 1) // layout_of(request, node).block_tokens
        lone = weigh_lone(
            request,
            node,
            config=self._config,
            now=now,
            waiting=len(queue.lane(request).ranked),
            l1_blocks=min(reached, whole_blocks),
        )
        if lone.split.harm_s > (PREFERRED_COST - 1.0) * lone.split.taken_s:
            return None
        weighed = (CandidateCost(wish.node_id, lone.split),)
        return Pick(node, lone.split, lone.work, has_room=True, weighed=weighed)

    def _place_wait_s(
        self, request: RequestRecord, node: NodeRecord, now: float, queue: WaitQueue
    ) -> float:
        """Predict the wait for a place in a full batch; a queue of prompts is part of the cost.

        A waiting request is expected to wait as long again. Thus its wait for the best node never
        exceeds the extra cost of another node, whatever was predicted.
        """
        waited_s = now - request.waiting_since_s if request.phase is RequestPhase.WAITING else 0.0
        if node.outstanding < self._places(request.is_urgent(now)):
            return waited_s
        return max(waited_s, queue.slot_wait_s(request, node.info.node_id, now))

    def has_room(self, record: NodeRecord, *, alone: bool, urgent: bool) -> bool:
        """Return whether a node should get a further request now, urgent or not.

        A first request may always go, whatever other fronts have sent to the node; a front that
        knows the others may use its share of the places. The only candidate (``alone``) batches
        best with all prompts at hand; otherwise prompts wait here, still free to go to another
        node.
        """
        if record.in_flight == 0:
            return True
        places = self._places(urgent)
        has_share = record.other_fronts and record.in_flight * (record.other_fronts + 1) < places
        if record.outstanding >= places and not has_share:
            return False
        tokens = record.waiting_tokens + record.others_waiting_tokens
        return alone or tokens < max(
            BATCH_TOKENS, self._config.node_queue_s * record.rates.prefill_tokens_per_s
        )

    def _places(self, urgent: bool) -> int:
        return places_for(self._config.max_in_flight_per_node, urgent=urgent)

    def some_have_room(self, candidates: Sequence[NodeRecord], *, urgent: bool) -> bool:
        """Return whether a pick could end in a send; cheaper than a pick while all nodes are busy.

        With decode-only nodes a choice may narrow to a single node, which then gets more room.
        """
        alone = len(candidates) == 1 or any(r.info.role is NodeRole.DECODE for r in candidates)
        return any(self.has_room(r, alone=alone, urgent=urgent) for r in candidates)

    def _last_node(self, request: RequestRecord) -> NodeId | None:
        if request.stage is Stage.DECODE and request.successor is not None:
            return request.successor.info.node_id
        return self._sessions.get(request.arrived.session_id or "")

    def would_split(self, request: RequestRecord, node: NodeRecord, now: float) -> bool:
        """Return whether a node would hand the answer over after the prefill."""
        return node.info.role is NodeRole.PREFILL and self._splits(request, now)

    def _splits(self, request: RequestRecord, now: float) -> bool:
        """Return whether prefill-only nodes would hand the answer over."""
        return (
            request.stage is not Stage.DECODE
            and request.arrived.splittable
            and self._fleet.decodes_elsewhere(request.arrived.model, now)
        )

    def successor(self, request: RequestRecord, now: float) -> NodeRecord | None:
        """Return the node to continue the answer: the prepared successor while it is live."""
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

    # -- memory of past choices

    def took(self, request: RequestRecord, node: NodeRecord) -> None:
        """Record a choice: later ties go to other nodes, and the session returns to the node."""
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
    """Return the KV layout of the request's model at a serving node."""
    return record.layout(request.arrived.model)


def near_after_handoff(
    request: RequestRecord, record: NodeRecord, prefilled: NodeRecord, blocks: int
) -> CachedPrefix:
    """Return the blocks near a node after a prefill: known, prefetched, or on its host."""
    known = request.near.get(record.info.node_id, NOTHING_CACHED)
    l1 = known.l1_blocks
    if record is request.successor:
        l1 = max(l1, request.prefetched_tokens // layout_of(request, record).block_tokens)
    same_host = record.info.host == prefilled.info.host
    return CachedPrefix(l1, max(l1, known.l2_blocks, blocks if same_host else 0))


def _behind(queue: WaitQueue, costs: Costs) -> Costs:
    """Add the work of requests waiting for each node to the costs."""
    awaited = queue.awaited_tokens
    tokens = np.array([awaited.get(node.info.node_id, 0) for node in costs.nodes])
    return costs.behind(tokens * costs.figures.speeds.cost.per_token_s)


def _logged(costs: Costs, among: list[int], chosen: int) -> Weighed:
    """Return the costs of the chosen node and of the cheapest alternatives."""
    cheapest = costs.cheapest(CANDIDATES_LOGGED) if len(among) == len(costs) else among
    others = [at for at in cheapest if at != chosen][: CANDIDATES_LOGGED - 1]
    return costs.weighed([chosen, *others])
