"""The contract of routers, the four plain routers, and two published routers.

A router receives the arrival of each request and the progress of placed requests.
simulator/cluster.py makes routers by name; simulator/routing/tierkv.py drives our own core.
The published routers keep their formulas and defaults; they see an up-to-date directory and exact
queue lengths, so only the choice of the node differs from ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random  # noqa: TID251 - seeded: a simulation's chance is its seed
from typing import Protocol

from tierkv.simulator.nodes.job import Lookup, SimulatedRequest
from tierkv.simulator.nodes.node import Noise, SimNode
from tierkv.simulator.nodes.prefix_cache import SimPool
from tierkv.simulator.nodes.serving_model import Constants, ServingModel
from tierkv.simulator.options import ClusterOptions


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """Send a job to a node."""

    job: SimulatedRequest
    node: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Call ``woken`` at the given time."""

    at_s: float
    token: str = ""


@dataclass(frozen=True, slots=True)
class JobRefusal:
    """Refuse to serve a job."""

    job: SimulatedRequest


@dataclass(frozen=True, slots=True)
class LoadAheadOrder:
    """Make a node load the first ``blocks`` of a waiting job; then call ``loaded_ahead``."""

    job: SimulatedRequest
    node: int
    blocks: int


Order = JobPlacement | Wake | JobRefusal | LoadAheadOrder


class RouterView(Protocol):
    """The part of the cluster that routers may read."""

    options: ClusterOptions
    constants: Constants
    model: ServingModel
    nodes: list[SimNode]
    noise: Noise
    pool: SimPool

    def look_up(self, job: SimulatedRequest) -> Lookup: ...


class RoutingPolicy(Protocol):
    """Places jobs; each method returns orders for the cluster.

    1. Each job is placed or refused exactly once, when it arrives or later.
    2. A placement names a node of the cluster.
    3. ``woken`` may be called for a Wake that nothing waits for any more. A LoadAheadOrder names a
       job without a placement, and at most the blocks of its chain.
    4. Equal calls give equal orders: chance comes from the seed of the options.
    """

    def arrived(self, job: SimulatedRequest, now: float) -> Sequence[Order]: ...

    def first_token(self, job: SimulatedRequest, now: float) -> Sequence[Order]: ...

    def finished(self, job: SimulatedRequest, now: float) -> Sequence[Order]: ...

    def woken(self, wake: Wake, now: float) -> Sequence[Order]: ...

    def loaded_ahead(self, order: LoadAheadOrder, now: float) -> Sequence[Order]: ...


class InstantRouter:
    """A router that decides at once and keeps no state of placed jobs."""

    def __init__(self, cluster: RouterView) -> None:
        self.cluster = cluster

    def choose(self, job: SimulatedRequest, now: float) -> int:
        """Return the node's number."""
        raise NotImplementedError

    def arrived(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return (JobPlacement(job, self.choose(job, now)),)

    def first_token(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return ()

    def finished(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return ()

    def woken(self, wake: Wake, now: float) -> Sequence[Order]:
        return ()

    def loaded_ahead(self, order: LoadAheadOrder, now: float) -> Sequence[Order]:
        return ()


class RandomRouter(InstantRouter):
    """Chooses any node with equal probability."""

    def __init__(self, cluster: RouterView) -> None:
        super().__init__(cluster)
        self._random = Random(cluster.options.seed)

    def choose(self, job: SimulatedRequest, now: float) -> int:
        return self._random.randrange(len(self.cluster.nodes))


class RoundRobinRouter(InstantRouter):
    """Chooses the nodes in turn."""

    def __init__(self, cluster: RouterView) -> None:
        super().__init__(cluster)
        self._next = 0

    def choose(self, job: SimulatedRequest, now: float) -> int:
        node = self._next
        self._next = (node + 1) % len(self.cluster.nodes)
        return node


class LeastWorkRouter(InstantRouter):
    """Chooses the node with the fewest queued seconds of prefill; ignores caches."""

    def choose(self, job: SimulatedRequest, now: float) -> int:
        return min(self.cluster.nodes, key=lambda node: (node.work_s(now), node.outstanding)).index


class StickyRouter(LeastWorkRouter):
    """Chooses the conversation's previous node; a new conversation goes to the least work."""

    def __init__(self, cluster: RouterView) -> None:
        super().__init__(cluster)
        self._homes: dict[int, int] = {}

    def choose(self, job: SimulatedRequest, now: float) -> int:
        conversation = job.prompt.conversation
        if conversation not in self._homes:
            self._homes[conversation] = super().choose(job, now)
        return self._homes[conversation]


class DynamoRouter(InstantRouter):
    """NVIDIA Dynamo's KV router, in blocks.

    ``cost = max(0, (active_prefill_tokens + tokens) / block - credit) + decode_blocks`` where the
    credit is 1.0 per block in the node's cache, and m per further block in the pool, if there is
    one. The least cost wins, with a random choice among equal costs.

    Ref: ai-dynamo/dynamo, KV router selector, defaults of 1.6.1 (weight 1, temperature 0).
    """

    def __init__(self, cluster: RouterView) -> None:
        super().__init__(cluster)
        self._random = Random(cluster.options.seed)

    def choose(self, job: SimulatedRequest, now: float) -> int:
        found = self.cluster.look_up(job)
        block_tokens = self.cluster.options.block_tokens
        shared = self.cluster.constants.routers.dynamo_shared_credit
        blocks = len(job.prompt.blocks) + 1
        costs = []
        for node, local in zip(self.cluster.nodes, found.local, strict=True):
            raw = (node.queued_tokens + job.prompt.input_tokens) / block_tokens
            credit = local + shared * max(0, found.pool - local)
            costs.append(max(0.0, raw - credit) + node.active_blocks + blocks)
        least = min(costs)
        return self._random.choice([i for i, cost in enumerate(costs) if cost == least])


class ConductorRouter(InstantRouter):
    """Mooncake's conductor: the least time to the first token, moving a prefix where the move pays.

    The queue is the node's seconds of work; the transfer time follows from the pool's rate. The
    algorithm replicates blocks from another instance; here the blocks come from the pool, which
    receives every computed block. Rejection by SLO is left out: every router serves every request.

    Ref: Mooncake (FAST '25), Algorithm 1.
    """

    def choose(self, job: SimulatedRequest, now: float) -> int:
        found = self.cluster.look_up(job)
        threshold = self.cluster.constants.routers.conductor_threshold
        best, best_s = 0, float("inf")
        for node, local in zip(self.cluster.nodes, found.local, strict=True):
            reused, transfer_s = local, 0.0
            if found.pool > threshold * local:
                reused, transfer_s = (
                    found.pool,
                    self.cluster.pool.nominal_load_s(found.pool - local),
                )
            tokens = reused * self.cluster.options.block_tokens
            prefill_s = self.cluster.model.prefill_s(tokens, job.prompt.input_tokens - tokens)
            ttft_s = node.work_s(now) + transfer_s + prefill_s
            if ttft_s < best_s:
                best, best_s = node.index, ttft_s
        return best
