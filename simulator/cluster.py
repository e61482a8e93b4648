"""A cluster of nodes and a pool in virtual time, driven by a queue of events in time order.

The shell around the routers makes requests arrive, lets nodes load and compute, updates caches and
pool, and records the results. This module never reads a clock; equal options give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Final

from tierkv.costing.service_time import pipeline_ends
from tierkv.policies.select import make_policy
from tierkv.simulator.nodes.job import NOWHERE, AheadLoad, Lookup, SimulatedRequest, look_up
from tierkv.simulator.nodes.node import LoadGate, Noise, SimNode
from tierkv.simulator.nodes.prefix_cache import PoolLink, PrefixCache, SimPool, Write
from tierkv.simulator.nodes.serving_model import Constants, ServingModel
from tierkv.simulator.options import GB, ClusterOptions, RouterName
from tierkv.simulator.results import ResultLedger
from tierkv.simulator.routing.contract import (
    ConductorRouter,
    DynamoRouter,
    InstantRouter,
    JobPlacement,
    JobRefusal,
    LeastWorkRouter,
    LoadAheadOrder,
    Order,
    RandomRouter,
    RoundRobinRouter,
    RouterView,
    RoutingPolicy,
    StickyRouter,
    Wake,
)
from tierkv.simulator.routing.tierkv import TierKvRouter
from tierkv.simulator.workload import NOBODY, Workload, WorkloadPrompt

Progress = Callable[[int, int], None]
"""Called with the finished and the total number of requests; may raise to stop the simulation."""

PROGRESS_EVERY = 64
"""Events between two calls."""


class EventKind(IntEnum):
    """Kinds of events; at equal times, events that free a resource come first."""

    PREFILLED = 0
    ANSWERED = 1
    MOVED = 2
    WAKE = 3
    ARRIVED = 4


class Cluster:
    """One simulation. Create a cluster, call ``run`` once, read ``ledger``.

    Attributes:
        options: options of the simulation.
        constants: constants of nodes and routers.
        model: cost of computing.
        layout: layout of one block.
        nodes: nodes by number.
        noise: random deviations from the predictions.
        pool: the shared pool; without a pool its capacity is 0.
        ledger: the results.
    """

    def __init__(self, workload: Workload, options: ClusterOptions, constants: Constants) -> None:
        self.options = options
        self.constants = constants
        self.model: ServingModel = constants.model(options.model)
        self.layout = self.model.layout(options.block_tokens)
        self.ledger = ResultLedger()
        self._workload = workload
        self._residents = [0] * len(workload.facts)
        self.nodes = [
            SimNode(i, self._cache(options.local_gb, i), constants.cluster)
            for i in range(options.nodes)
        ]
        self.noise = Noise(on=options.noise, nodes=options.nodes, seed=options.seed)
        self.pool = SimPool(
            self._cache(options.pool_gb, options.nodes),
            PoolLink(options.pool_gbps * GB),
            constants.cluster,
            block_bytes=self.layout.stored_bytes,
        )
        self._gate = LoadGate(
            options.gate,
            self.model,
            self.layout,
            pool_bytes_per_s=options.pool_gbps * GB,
            latency_s=constants.cluster.fetch_latency_s,
        )
        self._events: list[tuple[float, int, int, object]] = []
        self._serial = count()
        self._router: RoutingPolicy = _make_router(self, requests=len(workload.prompts))

    def run(self, progress: Progress | None = None) -> ResultLedger:
        """Run until every request is answered or refused."""
        prompts = self._workload.prompts
        for prompt in prompts:
            if prompt.is_first or not self.options.closed_loop:
                self._at(prompt.arrival_s, EventKind.ARRIVED, prompt)
        events, happened = self._events, 0
        while events:
            now, _, _, what = heappop(events)
            self._happen(what, now)
            happened += 1
            if progress is not None and happened % PROGRESS_EVERY == 0:
                progress(self.ledger.requests, len(prompts))
        left = len(prompts) - self.ledger.requests
        assert not left, f"{left} requests were never served"
        self.ledger.close(self.nodes, self.pool, block_bytes=self.layout.stored_bytes)
        return self.ledger

    def look_up(self, job: SimulatedRequest) -> Lookup:
        """Return the current locations of a job's chain, like an up-to-date directory."""
        return look_up(job.chain, self._residents, len(self.nodes))

    # -- events

    def _at(self, when_s: float, kind: EventKind, what: object) -> None:
        heappush(self._events, (when_s, kind, next(self._serial), what))

    def _happen(self, what: object, now: float) -> None:
        match what:
            case WorkloadPrompt():
                self._on_arrived(what, now)
            case SimNode():
                self._on_prefilled(what, now)
            case SimulatedRequest():
                self._on_answered(what, now)
            case Write():
                self._on_moved(what, now)
            case LoadAheadOrder():
                self._on_loaded_ahead(what, now)
            case Wake():
                self._obey(self._router.woken(what, now), now)

    def _on_arrived(self, prompt: WorkloadPrompt, now: float) -> None:
        usable = (prompt.input_tokens - 1) // self.options.block_tokens
        job = SimulatedRequest(prompt, prompt.blocks[:usable], now)
        depth = self.pool.cache.depth(job.chain)
        if depth and self.options.reserve:
            job.held_pool = job.chain[depth - 1]
            self.pool.cache.hold(job.held_pool)
        self._obey(self._router.arrived(job, now), now)

    def _on_prefilled(self, node: SimNode, now: float) -> None:
        job = node.finish_prefill(now)
        self.ledger.served(job, self.options.block_tokens)
        self._keep(job, node, now)
        self._obey(self._router.first_token(job, now), now)
        self._decode(job, node, now)
        self._begin(node, now)

    def _on_answered(self, job: SimulatedRequest, now: float) -> None:
        node = self.nodes[job.node]
        rest_s = node.rest_of_answer_s(job, now, self.model.tpot_s)
        if rest_s:
            self._at(now + rest_s, EventKind.ANSWERED, job)
            return
        waiting = node.finish_answer(job)
        if waiting is not None:
            self._decode(waiting, node, now)
        self._obey(self._router.finished(job, now), now)
        self._go_on(job, now)

    def _go_on(self, job: SimulatedRequest, now: float) -> None:
        """In a closed loop, schedule the session's next request after its pause."""
        follower = job.prompt.follower
        if not self.options.closed_loop or follower == NOBODY:
            return
        prompt = self._workload.prompts[follower]
        pause_s = prompt.pause_s
        arrival_s = job.arrived_s + prompt.gap_s if pause_s is None else now + pause_s
        self._at(max(now, arrival_s), EventKind.ARRIVED, prompt)

    def _on_moved(self, write: Write, now: float) -> None:
        rest_s = self.pool.written(write, now)
        if rest_s:
            self._at(now + rest_s, EventKind.MOVED, write)

    def _on_loaded_ahead(self, order: LoadAheadOrder, now: float) -> None:
        job = order.job
        if order.blocks and job.node in (NOWHERE, order.node) and not job.first_token_s:
            self.nodes[order.node].cache.add(job.chain[: order.blocks], now)
        self._obey(self._router.loaded_ahead(order, now), now)

    # -- nodes

    def _obey(self, orders: Iterable[Order], now: float) -> None:
        for order in orders:
            match order:
                case JobPlacement():
                    self._place(order.job, self.nodes[order.node], now)
                case Wake():
                    self._at(max(now, order.at_s), EventKind.WAKE, order)
                case LoadAheadOrder():
                    self._start_ahead(order, now)
                case JobRefusal():
                    self._let_go(order.job)
                    self.ledger.refused += 1
                    self._go_on(order.job, now)

    def _start_ahead(self, order: LoadAheadOrder, now: float) -> None:
        """Move blocks to a node while the job waits for this node; fewer if the pool has fewer."""
        job = order.job
        local = self.nodes[order.node].cache.depth(job.chain)
        blocks = min(order.blocks, self.pool.cache.depth(job.chain))
        end_s = now
        if blocks > local:
            transfer = self.pool.load(blocks - local, now)
            job.ahead = AheadLoad(order.node, local, blocks, transfer)
            end_s = transfer.end_s
        there = LoadAheadOrder(job, order.node, max(local, blocks))
        self._at(end_s, EventKind.MOVED, there)

    def _place(self, job: SimulatedRequest, node: SimNode, now: float) -> None:
        """Send a job to its node and hold the reusable blocks there."""
        local = node.cache.depth(job.chain)
        job.node = node.index
        self._hold_local(job, node, local)
        loaded = self._worth_loading(job, local, node.work_s(now), now)
        reused = (local + loaded) * self.options.block_tokens
        job.expected_tokens = job.prompt.input_tokens - reused
        compute_s = self.model.prefill_s(reused, job.expected_tokens)
        job.expected_s = max(compute_s, self.pool.nominal_load_s(loaded))
        node.take(job)
        if node.running is None:
            self._begin(node, now)
        elif node.queue[0] is job:
            self._load_ahead(node, now)

    def _hold_local(self, job: SimulatedRequest, node: SimNode, depth: int) -> None:
        """Hold the job's reusable blocks in the node's cache."""
        if not self.options.reserve or not depth or job.held_local == job.chain[depth - 1]:
            return
        held, job.held_local = job.held_local, job.chain[depth - 1]
        node.cache.hold(job.held_local)
        if held != NOWHERE:
            node.cache.release(held)

    def _begin(self, node: SimNode, now: float) -> None:
        """Compute the next prompt of an idle node, and load for the prompt after it."""
        if not node.queue or node.running is not None:
            return
        job = node.queue[0]
        if job.load is not None and node.cache.depth(job.chain) < job.local_blocks:
            job.load = None  # Evicted before its turn: loaded blocks behind are useless.
        if job.load is None:
            self._load(job, node, now, idle_from_s=now)
        reused = (job.local_blocks + job.loaded_blocks) * self.options.block_tokens
        compute_s = self.model.prefill_s(reused, job.prompt.input_tokens - reused)
        compute_s *= self.noise.factor(node.index, now)
        end_s = now + compute_s
        if job.load is not None:
            end_s = pipeline_ends(
                job.load.end_s - job.load.start_s,
                compute_s,
                self.layout.layers,
                load_from_s=job.load.start_s,
                compute_from_s=now,
            ).latest()
        node.start(job, now, end_s)
        self._at(end_s, EventKind.PREFILLED, node)
        self._load_ahead(node, now)

    def _load_ahead(self, node: SimNode, now: float) -> None:
        """Load for the next prompt while the node computes another."""
        if node.queue and node.queue[0].load is None:
            self._load(node.queue[0], node, now, idle_from_s=node.free_s)

    def _load(
        self, job: SimulatedRequest, node: SimNode, now: float, *, idle_from_s: float
    ) -> None:
        """Decide the number of blocks to load, and queue the load.

        Without a load the decision is repeated later.
        """
        job.local_blocks = node.cache.depth(job.chain)
        self._hold_local(job, node, job.local_blocks)
        ahead = job.ahead
        if ahead is not None and ahead.comes_to(node.index, job.local_blocks, now):
            job.load, job.loaded_blocks = ahead.transfer, ahead.stop - job.local_blocks
            return
        job.loaded_blocks = self._worth_loading(job, job.local_blocks, idle_from_s - now, now)
        if job.loaded_blocks:
            job.load = self.pool.load(job.loaded_blocks, now)

    def _worth_loading(self, job: SimulatedRequest, local: int, busy_s: float, now: float) -> int:
        pool = self.pool.cache.depth(job.chain)
        if pool <= local:
            return 0
        return self._gate.blocks_to_load(
            job.prompt.input_tokens,
            local=local,
            pool=pool,
            queue_s=self.pool.link.queue_s(now),
            busy_s=busy_s,
        )

    def _decode(self, job: SimulatedRequest, node: SimNode, now: float) -> None:
        when_s = node.start_answer(job, now, self.model.tpot_s)
        if when_s is not None:
            self._at(when_s, EventKind.ANSWERED, job)

    # -- caches

    def _keep(self, job: SimulatedRequest, node: SimNode, now: float) -> None:
        """Store computed blocks in the node's cache, and in the pool if the link keeps up."""
        blocks = job.prompt.blocks
        node.cache.touch(blocks, now)
        node.cache.add(blocks, now)
        write = self.pool.keep(blocks, now)
        if write is not None:
            self._on_moved(write, now)
        self._let_go(job)

    def _let_go(self, job: SimulatedRequest) -> None:
        """Release all holds of a job."""
        if job.held_local != NOWHERE:
            self.nodes[job.node].cache.release(job.held_local)
        if job.held_pool != NOWHERE:
            self.pool.cache.release(job.held_pool)
        job.held_local = job.held_pool = NOWHERE

    def _cache(self, size_gb: float, index: int) -> PrefixCache:
        capacity_blocks = int(size_gb * GB) // self.layout.stored_bytes
        policy = make_policy(self.options.policy, capacity_blocks, seed=self.options.seed + index)
        facts = self._workload.facts
        return PrefixCache(policy, capacity_blocks, facts, self._residents, 1 << index)


_INSTANT: Final[dict[RouterName, type[InstantRouter]]] = {
    RouterName.RANDOM: RandomRouter,
    RouterName.ROUND_ROBIN: RoundRobinRouter,
    RouterName.LEAST_WORK: LeastWorkRouter,
    RouterName.STICKY: StickyRouter,
    RouterName.DYNAMO: DynamoRouter,
    RouterName.CONDUCTOR: ConductorRouter,
}


def _make_router(cluster: RouterView, *, requests: int) -> RoutingPolicy:
    """Return the router of the cluster's options.

    Args:
        cluster: the cluster for the router to read.
        requests: number of requests in the whole trace.
    """
    name = cluster.options.router
    if name is RouterName.TIERKV:
        return TierKvRouter(cluster, requests=requests)
    return _INSTANT[name](cluster)
