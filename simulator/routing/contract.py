"""Who gets a request: the contract of routers, and the four plain ones.

A router sees a request arrive, and what became of those it placed. Formulas that others published
are in simulator/routing/published.py, our own core is driven in simulator/routing/tierkv.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random  # noqa: TID251 - seeded: a simulation's chance is its seed
from typing import Protocol

from tierkv.simulator.nodes.job import Job, Lookup
from tierkv.simulator.nodes.node import SimNode
from tierkv.simulator.nodes.noise import Noise
from tierkv.simulator.nodes.pool import SimPool
from tierkv.simulator.nodes.serving_model import Constants, ServingModel
from tierkv.simulator.options import ClusterOptions


@dataclass(frozen=True, slots=True)
class Placement:
    """Send a job to a node."""

    job: Job
    node: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Call ``woken`` at that time."""

    at_s: float
    token: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Do not serve a job at all."""

    job: Job


@dataclass(frozen=True, slots=True)
class LoadAhead:
    """Have a node load the first ``blocks`` of a job that waits; then call ``loaded_ahead``."""

    job: Job
    node: int
    blocks: int


Order = Placement | Wake | Refusal | LoadAhead


class ClusterView(Protocol):
    """What routers may look at."""

    options: ClusterOptions
    constants: Constants
    model: ServingModel
    nodes: list[SimNode]
    noise: Noise
    pool: SimPool

    def look_up(self, job: Job) -> Lookup: ...


class Router(Protocol):
    """Places each job exactly once, when it arrives or later."""

    def arrived(self, job: Job, now: float) -> Sequence[Order]: ...

    def first_token(self, job: Job, now: float) -> Sequence[Order]: ...

    def finished(self, job: Job, now: float) -> Sequence[Order]: ...

    def woken(self, wake: Wake, now: float) -> Sequence[Order]: ...

    def loaded_ahead(self, order: LoadAhead, now: float) -> Sequence[Order]: ...


class InstantRouter:
    """A router that decides at once and remembers nothing of jobs it placed."""

    def __init__(self, cluster: ClusterView) -> None:
        self.cluster = cluster

    def choose(self, job: Job, now: float) -> int:
        """Return the node's number."""
        raise NotImplementedError

    def arrived(self, job: Job, now: float) -> Sequence[Order]:
        return (Placement(job, self.choose(job, now)),)

    def first_token(self, job: Job, now: float) -> Sequence[Order]:
        return ()

    def finished(self, job: Job, now: float) -> Sequence[Order]:
        return ()

    def woken(self, wake: Wake, now: float) -> Sequence[Order]:
        return ()

    def loaded_ahead(self, order: LoadAhead, now: float) -> Sequence[Order]:
        return ()


class RandomRouter(InstantRouter):
    """Any node, equally likely."""

    def __init__(self, cluster: ClusterView) -> None:
        super().__init__(cluster)
        self._random = Random(cluster.options.seed)

    def choose(self, job: Job, now: float) -> int:
        return self._random.randrange(len(self.cluster.nodes))


class RoundRobinRouter(InstantRouter):
    """One after the other."""

    def __init__(self, cluster: ClusterView) -> None:
        super().__init__(cluster)
        self._next = 0

    def choose(self, job: Job, now: float) -> int:
        node = self._next
        self._next = (node + 1) % len(self.cluster.nodes)
        return node


class LeastWorkRouter(InstantRouter):
    """The node with the fewest seconds of prefill before it; caches are not looked at."""

    def choose(self, job: Job, now: float) -> int:
        return min(self.cluster.nodes, key=lambda node: (node.work_s(now), node.outstanding)).index


class StickyRouter(LeastWorkRouter):
    """The node that had the conversation before; a new one goes where the least work is."""

    def __init__(self, cluster: ClusterView) -> None:
        super().__init__(cluster)
        self._homes: dict[int, int] = {}

    def choose(self, job: Job, now: float) -> int:
        conversation = job.prompt.conversation
        if conversation not in self._homes:
            self._homes[conversation] = super().choose(job, now)
        return self._homes[conversation]
