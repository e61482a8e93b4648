"""A node of the simulated cluster: queue, choice to load or recompute, deviations.

A node computes one prefill at a time and many answers. Driven by simulator/cluster.py, whose event
queue makes the ends happen; read by the routers. LoadGate decides with costing/node_service.py, the
scheduler's own function, with the figures of the simulated node: one function for both, as in
production. Noise makes steps longer, nodes slow for a while and news late; without it each node
takes exactly the time predicted by the router, and a router with too much trust in predictions
looks as good as any.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np

from tierkv.costing.node_cost import CachedPrefix, Rates
from tierkv.costing.node_service import lone_speeds, serve_one
from tierkv.costing.service_time import Line
from tierkv.kvcore.layout import BlockLayout
from tierkv.simulator.nodes.job import SimulatedRequest
from tierkv.simulator.nodes.prefix_cache import PrefixCache
from tierkv.simulator.nodes.serving_model import NodeConstants, ServingModel
from tierkv.simulator.options import Gate

DONE_WITHIN_S = 1e-3
"""Remaining time at which an answer counts as ended: delays are added in ever smaller steps."""

AT_ONCE = 1e18
"""Bytes per second of paths that do not exist and are never used."""

LEAST, MOST = 0.5, 2.0
"""Bounds of the random factor on the duration of a prefill."""

QUICK_S: Final = 60.0
SLOW_S: Final = 10.0
SLOWED: Final = 2.0
"""A node is slow from time to time: mean seconds of both phases, and the factor in slow phases."""

LATE_HEARTBEATS: Final = 0.3
"""Share of looks at a node that still see the previous heartbeat."""

LATE_LOCATES: Final = 0.02
"""Share of calls to the directory that miss the deadline."""


class SimNode:
    """A node's queue and accounts.

    Attributes:
        index: number of the node.
        cache: the node's memory for KV.
        queue: waiting prompts, the next prompt first.
        running: the prompt being computed.
        free_s: end time of the running prefill.
        outstanding: requests of the node with an unfinished answer.
        queued_tokens: predicted tokens to compute, over all requests without a first token.
        queued_s: predicted seconds of prefill, over all requests in the queue.
        active_blocks: blocks of all requests of the node.
        busy_s: seconds of finished prefills.
        decoding: number of answers in generation.
    """

    def __init__(self, index: int, cache: PrefixCache, constants: NodeConstants) -> None:
        self.index = index
        self.cache = cache
        self.queue: deque[SimulatedRequest] = deque()
        self.running: SimulatedRequest | None = None
        self.free_s = 0.0
        self.outstanding = 0
        self.queued_tokens = 0
        self.queued_s = 0.0
        self.active_blocks = 0
        self.busy_s = 0.0
        self.decoding = 0
        self._constants = constants
        self._undecoded: deque[SimulatedRequest] = deque()

    def take(self, job: SimulatedRequest) -> None:
        """Put a job into the queue."""
        self.queue.append(job)
        self.outstanding += 1
        self.queued_tokens += job.expected_tokens
        self.queued_s += job.expected_s
        self.active_blocks += len(job.prompt.blocks) + 1

    def work_s(self, now: float) -> float:
        """Return the predicted seconds of computing until a new job's turn."""
        rest_s = max(0.0, self.free_s - now) if self.running is not None else 0.0
        return rest_s + self.queued_s

    def start(self, job: SimulatedRequest, now: float, end_s: float) -> None:
        """Compute the job at the head of the queue until ``end_s``."""
        assert self.running is None and self.queue[0] is job
        self.queue.popleft()
        self.queued_s -= job.expected_s
        self.running = job
        job.started_s, self.free_s = now, end_s

    def finish_prefill(self, now: float) -> SimulatedRequest:
        """End the running prefill."""
        job = self.running
        assert job is not None
        self.running = None
        self.queued_tokens -= job.expected_tokens
        self.busy_s += now - job.started_s
        job.first_token_s = now
        return job

    def start_answer(self, job: SimulatedRequest, now: float, tpot_s: float) -> float | None:
        """Continue an answer after its first token.

        Returns:
            time to check whether the answer has ended; None while all slots are taken.
        """
        if self.decoding >= self._constants.decode_slots:
            self._undecoded.append(job)
            return None
        self.decoding += 1
        job.decode_from_s, job.decode_busy_s = now, self._busy_until(now)
        return now + (job.prompt.output_tokens - 1) * tpot_s

    def rest_of_answer_s(self, job: SimulatedRequest, now: float, tpot_s: float) -> float:
        """Return the remaining seconds of an answer.

        Each second of concurrent prefill delays the answer by a share of a second.
        """
        beside_s = self._busy_until(now) - job.decode_busy_s
        done_s = now - job.decode_from_s - self._constants.decode_harm * beside_s
        rest_s = (job.prompt.output_tokens - 1) * tpot_s - done_s
        return rest_s if rest_s > DONE_WITHIN_S else 0.0

    def finish_answer(self, job: SimulatedRequest) -> SimulatedRequest | None:
        """End an answer.

        Returns:
            the next job, which gets the free slot.
        """
        self.decoding -= 1
        self.outstanding -= 1
        self.active_blocks -= len(job.prompt.blocks) + 1
        return self._undecoded.popleft() if self._undecoded else None

    def _busy_until(self, now: float) -> float:
        return self.busy_s + (now - self.running.started_s if self.running is not None else 0.0)


class LoadGate:
    """Decides how many blocks a node loads.

    Attributes:
        gate: what the decision knows about the pool's queue.
    """

    def __init__(
        self,
        gate: Gate,
        model: ServingModel,
        layout: BlockLayout,
        *,
        pool_bytes_per_s: float,
        latency_s: float,
    ) -> None:
        self.gate = gate
        self._layout = layout
        at_once = Line(0.0, AT_ONCE)
        pool = Line(latency_s / model.layers, pool_bytes_per_s or AT_ONCE)
        self._speeds = lone_speeds(Rates(model.cost, at_once, pool, at_once))

    def blocks_to_load(
        self, tokens: int, *, local: int, pool: int, queue_s: float, busy_s: float
    ) -> int:
        """Return the number of blocks beyond the local blocks that are worth loading.

        Args:
            tokens: tokens of the prompt.
            local: blocks in the node's own cache.
            pool: blocks in the pool, from the beginning of the chain.
            queue_s: seconds until the transfer begins.
            busy_s: seconds until the node can compute the prompt.
        """
        if pool <= local or self.gate is Gate.OFF:
            return max(0, pool - local)
        seen_s = 0.0 if self.gate is Gate.BLIND else queue_s
        best = serve_one(
            tokens,
            CachedPrefix(local, local, pool, pool),
            self._speeds,
            self._layout,
            compute_s=busy_s,
            paths_s=(0.0, seen_s, 0.0),
        )
        return max(0, best.reused_blocks - local)


class Noise:
    """The random deviations of one simulation; ``on`` False: no deviations."""

    def __init__(self, *, on: bool, nodes: int, seed: int) -> None:
        self._on = on
        self._steps, self._news, *self._phases = np.random.default_rng(seed).spawn(2 + nodes)
        self._slow = [False] * nodes
        self._until_s = [float(phase.exponential(QUICK_S)) for phase in self._phases]

    def factor(self, node: int, now: float) -> float:
        """Return the factor on the duration of a prefill that begins now.

        The mean in quick phases is 1.0.
        """
        if not self._on:
            return 1.0
        while now >= self._until_s[node]:
            self._slow[node] = not self._slow[node]
            mean_s = SLOW_S if self._slow[node] else QUICK_S
            self._until_s[node] += float(self._phases[node].exponential(mean_s))
        # Log-uniform; the mean is the difference of the bounds over the logarithm of their ratio.
        step = math.exp(self._steps.uniform(math.log(LEAST), math.log(MOST)))
        usual = (MOST - LEAST) / math.log(MOST / LEAST)
        return step / usual * (SLOWED if self._slow[node] else 1.0)

    def heartbeat_is_late(self) -> bool:
        """Whether the previous heartbeat of a node is still the latest."""
        return self._on and float(self._news.random()) < LATE_HEARTBEATS

    def locate_is_late(self) -> bool:
        """Whether a call to the directory misses the deadline and finds no blocks."""
        return self._on and float(self._news.random()) < LATE_LOCATES
