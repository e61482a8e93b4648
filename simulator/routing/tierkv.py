"""Our own scheduler in the simulated cluster: production's SchedulerState, run in virtual time.

The core decides. This module only translates the simulation's events to scheduler events, and
instructions to orders, as scheduler/dispatcher.py does with real nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tierkv.costing.node_cost import CachedPrefix
from tierkv.costing.service_time import tell_cost
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeLoad, NodeRole
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    Event,
    Fail,
    FirstToken,
    Instruction,
    Locate,
    NodesSeen,
    Prefetch,
    PrefetchDone,
    RequestArrived,
    RequestFinished,
    SeenNode,
    Wait,
    WaitOver,
    WantedModel,
)
from tierkv.scheduler.requests.state import SchedulerState
from tierkv.simulator.nodes.job import SimulatedRequest
from tierkv.simulator.nodes.node import SimNode
from tierkv.simulator.options import Gate
from tierkv.simulator.routing.contract import (
    JobPlacement,
    JobRefusal,
    LoadAheadOrder,
    Order,
    RouterView,
    Wake,
)

MODEL = WantedModel("simulated")
PATIENCE_S = 300.0
"""Seconds without an event after which a waiting request looks again; no node is ever lost here."""


class TierKvRouter:
    """Drives a SchedulerState.

    Attributes:
        state: the scheduler's core.
        _jobs: live requests by id.
        _seen_s: time of the last look at the nodes' loads.
        _told: last load report of each node.
    """

    def __init__(self, cluster: RouterView, *, requests: int) -> None:
        """Make the core.

        Args:
            cluster: the simulated cluster.
            requests: number of requests in the whole trace; all may wait, so no request is refused.
        """
        self.state = SchedulerState(
            SchedulerConfig(
                max_requests=requests + 1, max_waiting=requests + 1, node_wait_s=PATIENCE_S
            )
        )
        self._cluster = cluster
        self._jobs: dict[RequestId, SimulatedRequest] = {}
        self._infos = [_info(index, cluster) for index in range(len(cluster.nodes))]
        self._numbers = {info.node_id: index for index, info in enumerate(self._infos)}
        self._seen_s = float("-inf")
        self._told: dict[int, NodeLoad] = {}

    def arrived(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        request_id = RequestId(str(job.prompt.number))
        self._jobs[request_id] = job
        event = RequestArrived(
            request_id,
            MODEL,
            job.prompt.input_tokens,
            session_id=job.prompt.session_id,
            locatable=bool(job.chain),
        )
        return self._tell(event, now)

    def first_token(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return self._tell(FirstToken(RequestId(str(job.prompt.number))), now)

    def finished(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        request_id = RequestId(str(job.prompt.number))
        orders = self._tell(RequestFinished(request_id), now)
        del self._jobs[request_id]
        return orders

    def woken(self, wake: Wake, now: float) -> Sequence[Order]:
        return self._tell(WaitOver(RequestId(wake.token)), now)

    def loaded_ahead(self, order: LoadAheadOrder, now: float) -> Sequence[Order]:
        request_id = RequestId(str(order.job.prompt.number))
        tokens = order.blocks * self._cluster.options.block_tokens
        return self._tell(PrefetchDone(request_id, self._infos[order.node].node_id, tokens), now)

    def _tell(self, event: Event, now: float) -> list[Order]:
        orders: list[Order] = []
        if now - self._seen_s >= self._cluster.constants.cluster.heartbeat_s:
            self._seen_s = now
            orders += self._orders(self.state.handle(self._look(), now), now)
        orders += self._orders(self.state.handle(event, now), now)
        return orders

    def _orders(self, instructions: Sequence[Instruction], now: float) -> Iterator[Order]:
        for instruction in instructions:
            match instruction:
                case Dispatch():
                    job = self._jobs[instruction.request_id]
                    yield JobPlacement(job, self._numbers[instruction.node_id])
                case Locate():
                    located = self._located(instruction.request_id)
                    yield from self._orders(self.state.handle(located, now), now)
                case Wait():
                    yield Wake(instruction.until_s, instruction.request_id)
                case Prefetch():
                    job = self._jobs[instruction.request_id]
                    blocks = instruction.tokens // self._cluster.options.block_tokens
                    yield LoadAheadOrder(job, self._numbers[instruction.node_id], blocks)
                case Fail():
                    yield JobRefusal(self._jobs.pop(instruction.request_id))
                case _:
                    pass  # The simulation itself repeats the looks at the nodes.

    def _located(self, request_id: RequestId) -> ChainLocated:
        """Answer like the directory."""
        if self._cluster.noise.locate_is_late():
            return ChainLocated(request_id)
        found = self._cluster.look_up(self._jobs[request_id])
        near = {
            info.node_id: CachedPrefix(l1_blocks=local, l2_blocks=local)
            for info, local in zip(self._infos, found.local, strict=True)
            if local
        }
        pool = CachedPrefix(l3_blocks=found.pool, l4_blocks=found.pool)
        return ChainLocated(request_id, near=near, pool=pool)

    def _look(self) -> NodesSeen:
        for node in self._cluster.nodes:
            if node.index not in self._told or not self._cluster.noise.heartbeat_is_late():
                self._told[node.index] = self._load(node)
        seen = tuple(SeenNode(info, self._told[n]) for n, info in enumerate(self._infos))
        # All nodes share one link; a router that must not see the link's queue is told of no
        # sharing.
        sees_queue = self._cluster.options.gate in (Gate.LIVE, Gate.OFF)
        return NodesSeen(seen, pool_nodes=1 if sees_queue else 0)

    def _load(self, node: SimNode) -> NodeLoad:
        """Return a node's load as in a heartbeat."""
        model, waiting = self._cluster.model, len(node.queue)
        return replace(
            tell_cost(model.cost),
            requests_running=node.outstanding - waiting,
            requests_waiting=waiting,
            waiting_prefill_tokens=node.queued_tokens,
            l3_bytes_per_s=self._cluster.pool.link.bytes_per_s,
            l3_latency_s=self._cluster.constants.cluster.fetch_latency_s / model.layers,
            decode_step_s=model.tpot_s,
            decodes_running=node.decoding,
        )


def _info(index: int, cluster: RouterView) -> NodeInfo:
    layout = cluster.model.layout(cluster.options.block_tokens)
    model = ModelInfo(
        name=MODEL.name,
        folder="",
        revision="",
        layout=layout,
        context_tokens=1 << 30,
        eos_token_ids=(),
        architecture="",
        parameters=0,
    )
    return NodeInfo(
        node_id=NodeId(f"node-{index}"),
        incarnation=Incarnation(1),
        role=NodeRole.COMPUTE,
        host=HostId(f"host-{index}"),
        models=(model,),
    )
