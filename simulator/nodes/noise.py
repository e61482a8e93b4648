"""Deviations of real nodes from predictions: longer steps, slow phases, late news.

A part of simulator/cluster.py; seeded. Without noise each node takes exactly the time predicted by
the router, and a router with too much trust in predictions looks as good as any.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

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
