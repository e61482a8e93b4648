"""What real nodes do and predicted ones don't: steps that take longer, slow phases, late news.

A part of simulator/cluster.py; seeded. Without noise each node takes exactly the time that its
router predicted, and a router that believes its predictions too much looks as good as any.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

LEAST, MOST = 0.5, 2.0
"""A prefill takes so many times what it should."""

QUICK_S: Final = 60.0
SLOW_S: Final = 10.0
SLOWED: Final = 2.0
"""Now and then a node is slow for a while: mean seconds of both phases, and how slow."""

LATE_HEARTBEATS: Final = 0.3
"""Share of looks at which a node's last word is still the one before."""

LATE_LOCATES: Final = 0.02
"""Share of questions to the directory that miss their time."""


class Noise:
    """What is left to chance in one run; ``on`` False: nothing is."""

    def __init__(self, *, on: bool, nodes: int, seed: int) -> None:
        self._on = on
        self._steps, self._news, *self._phases = np.random.default_rng(seed).spawn(2 + nodes)
        self._slow = [False] * nodes
        self._until_s = [float(phase.exponential(QUICK_S)) for phase in self._phases]

    def factor(self, node: int, now: float) -> float:
        """How many times its time a prefill takes that begins now; 1.0 in quick phases' mean."""
        if not self._on:
            return 1.0
        while now >= self._until_s[node]:
            self._slow[node] = not self._slow[node]
            mean_s = SLOW_S if self._slow[node] else QUICK_S
            self._until_s[node] += float(self._phases[node].exponential(mean_s))
        # Log-uniform; its mean is that of its ends, over the logarithm of their ratio.
        step = math.exp(self._steps.uniform(math.log(LEAST), math.log(MOST)))
        usual = (MOST - LEAST) / math.log(MOST / LEAST)
        return step / usual * (SLOWED if self._slow[node] else 1.0)

    def heartbeat_is_late(self) -> bool:
        """Whether a node's word about its load is still the one before."""
        return self._on and float(self._news.random()) < LATE_HEARTBEATS

    def locate_is_late(self) -> bool:
        """Whether a question to the directory misses its time, so that nothing is found."""
        return self._on and float(self._news.random()) < LATE_LOCATES
