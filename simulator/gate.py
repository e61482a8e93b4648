"""Load or recompute: the decision of every node before it computes a prompt.

The decision uses costing/node_service.py, the scheduler's own routing function, with the figures of
the simulated node: one function for both, as in production. Called by simulator/cluster.py.
"""

from __future__ import annotations

from tierkv.costing.node_cost import CachedPrefix, Rates
from tierkv.costing.node_service import lone_speeds, serve_one
from tierkv.costing.service_time import Line
from tierkv.kvcore.layout import BlockLayout
from tierkv.simulator.nodes.serving_model import ServingModel
from tierkv.simulator.options import Gate

AT_ONCE = 1e18
"""Bytes per second of paths that do not exist and are never used."""


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
