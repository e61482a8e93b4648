"""Routers by name; called by a new cluster."""

from __future__ import annotations

from typing import Final

from tierkv.simulator.options import RouterName
from tierkv.simulator.routing.contract import (
    ConductorRouter,
    DynamoRouter,
    InstantRouter,
    LeastWorkRouter,
    RandomRouter,
    RoundRobinRouter,
    RouterView,
    RoutingPolicy,
    StickyRouter,
)
from tierkv.simulator.routing.tierkv import TierKvRouter

_INSTANT: Final[dict[RouterName, type[InstantRouter]]] = {
    RouterName.RANDOM: RandomRouter,
    RouterName.ROUND_ROBIN: RoundRobinRouter,
    RouterName.LEAST_WORK: LeastWorkRouter,
    RouterName.STICKY: StickyRouter,
    RouterName.DYNAMO: DynamoRouter,
    RouterName.CONDUCTOR: ConductorRouter,
}


def make_router(cluster: RouterView, *, requests: int) -> RoutingPolicy:
    """Return the router of the cluster's options.

    Args:
        cluster: the cluster for the router to read.
        requests: number of requests in the whole trace.
    """
    name = cluster.options.router
    if name is RouterName.TIERKV:
        return TierKvRouter(cluster, requests=requests)
    return _INSTANT[name](cluster)
