"""Load or recompute: the question every node asks before it computes a prompt.

Answered by scheduler/choosing/service.py, by which the scheduler routes, with the simulated node's
own figures: one function for both, as in production. Called by simulator/cluster.py.
"""

from __future__ import annotations

import numpy as np

from tierkv.kvcore.layout import BlockLayout
from tierkv.scheduler.choosing.service import Waits, serve
from tierkv.scheduler.cost import Rates
from tierkv.scheduler.nodes.node_table import figures_of
from tierkv.simulator.nodes.serving_model import ServingModel
from tierkv.simulator.options import Gate

AT_ONCE = 1e18
"""Bytes per second of paths that are not there, and so never used."""


class LoadGate:
    """Decides how many blocks a node loads.

    Attributes:
        gate: what the decision knows of the pool's queue.
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
        rates = Rates(
            prefill_tokens_per_s=1.0 / model.per_token_s,
            l2_bytes_per_s=AT_ONCE,
            l3_bytes_per_s=pool_bytes_per_s or AT_ONCE,
            l4_bytes_per_s=AT_ONCE,
            l3_latency_s=latency_s / model.layers,
            step_s=model.fixed_s,
            pair_s=model.per_pair_s,
        )
        self._figures = figures_of(rates)

    def blocks_to_load(
        self, tokens: int, *, local: int, pool: int, queue_s: float, busy_s: float
    ) -> int:
        """Say how many blocks beyond the local ones are worth loading.

        Args:
            tokens: of the prompt.
            local: blocks in the node's own cache.
            pool: blocks in the pool, from the beginning of the chain.
            queue_s: seconds until the transfer begins.
            busy_s: seconds until the node can compute the prompt.
        """
        if pool <= local or self.gate is Gate.OFF:
            return max(0, pool - local)
        seen_s = 0.0 if self.gate is Gate.BLIND else queue_s
        waits = Waits(np.array([busy_s]), np.array([[0.0], [seen_s], [0.0]]))
        reach = np.array([[local], [local], [pool], [pool]])
        best = serve(tokens, reach, self._figures, self._layout, waits)
        return max(0, int(best.depth[0]) - local)
