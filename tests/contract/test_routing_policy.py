"""What every router of the simulator does, numbered as in simulator/routing/contract.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.simulator.test_cluster import CONSTANTS, LOAD, options
from tierkv.simulator.cluster import Cluster
from tierkv.simulator.nodes.job import SimulatedRequest
from tierkv.simulator.options import RouterName
from tierkv.simulator.routing.contract import (
    JobPlacement,
    JobRefusal,
    LoadAheadOrder,
    Order,
    RoutingPolicy,
    Wake,
)

NODES = 3
OPTIONS = options(nodes=NODES, local_gb=3.0, pool_gb=12.0, pool_gbps=2.0)


class Recorder:
    """Keeps the orders of a router, and wakes the router in vain after each arrival."""

    def __init__(self, router: RoutingPolicy) -> None:
        self._router = router
        self.orders: list[tuple[float, Order]] = []
        self.placed_late: list[LoadAheadOrder] = []

    def _note(self, orders: Sequence[Order], now: float) -> Sequence[Order]:
        for order in orders:
            if isinstance(order, LoadAheadOrder) and self._ends_of(order.job):
                self.placed_late.append(order)
            self.orders.append((now, order))
        return orders

    def _ends_of(self, job: SimulatedRequest) -> int:
        return sum(one.job is job for one in self.ends)

    @property
    def ends(self) -> list[JobPlacement | JobRefusal]:
        return [one for _, one in self.orders if isinstance(one, JobPlacement | JobRefusal)]

    @property
    def told(self) -> list[tuple[object, ...]]:
        """The orders as plain values."""
        return [
            (now, type(one), getattr(one, "node", None), job.prompt.number if job else None)
            for now, one in self.orders
            for job in [getattr(one, "job", None)]
        ]

    def arrived(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return (*self._note(self._router.arrived(job, now), now), Wake(now, "nothing"))

    def first_token(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return self._note(self._router.first_token(job, now), now)

    def finished(self, job: SimulatedRequest, now: float) -> Sequence[Order]:
        return self._note(self._router.finished(job, now), now)

    def woken(self, wake: Wake, now: float) -> Sequence[Order]:
        return self._note(self._router.woken(wake, now), now)

    def loaded_ahead(self, order: LoadAheadOrder, now: float) -> Sequence[Order]:
        return self._note(self._router.loaded_ahead(order, now), now)


def run(router: RouterName, **changes: object) -> Recorder:
    cluster = Cluster(LOAD, replace(OPTIONS, router=router, **changes), CONSTANTS)
    recorder = cluster._router = Recorder(cluster._router)
    ledger = cluster.run()
    assert ledger.requests == len(LOAD.prompts)
    return recorder


@pytest.fixture(params=list(RouterName), scope="module")
def router(request: pytest.FixtureRequest) -> RouterName:
    return request.param


@pytest.fixture(scope="module")
def recorder(router: RouterName) -> Recorder:
    return run(router)


def test_1_each_job_is_placed_or_refused_once(recorder: Recorder) -> None:
    numbers = [end.job.prompt.number for end in recorder.ends]
    assert sorted(numbers) == [prompt.number for prompt in LOAD.prompts]


def test_2_a_placement_names_a_node_of_the_cluster(recorder: Recorder) -> None:
    nodes = {end.node for end in recorder.ends if isinstance(end, JobPlacement)}
    assert nodes == set(range(NODES))


def test_3_blocks_are_loaded_ahead_only_for_jobs_that_wait(
    router: RouterName, recorder: Recorder
) -> None:
    ahead = [one for _, one in recorder.orders if isinstance(one, LoadAheadOrder)]
    assert bool(ahead) is (router is RouterName.TIERKV)
    assert not recorder.placed_late
    assert all(0 < order.blocks <= len(order.job.chain) for order in ahead)
    assert all(order.node in range(NODES) for order in ahead)


def test_4_equal_seeds_give_equal_orders(router: RouterName) -> None:
    first, again = (run(router, seed=1, closed_loop=True).told for _ in range(2))
    assert first == again
    if router is RouterName.RANDOM:
        assert run(router, seed=2, closed_loop=True).told != first
