"""What a node's answers teach about predictions of them: how far off, and by what.

Pure; each NodeRecord has a Correction and tells it when a first token comes. What a node does to a
prompt beside loading and computing (its steps, the network, the front) is seen nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
LEAST_OVERHEAD_S, MOST_OVERHEAD_S = 1e-4, 1.0
_INITIAL_OVERHEAD_S = 1e-3
_STEP = 0.25
"""Share of an error that is learned from one answer: four make 70 % of a change."""
_MOST_MISS = math.log(4.0)
"""One answer never counts as more than four times too fast or too slow."""
_TRUSTED_S = 30.0
_FADE = 0.9
"""What was learned is believed for so long, then a tenth of it goes with every heartbeat, so that a
node which is avoided for what it once was is tried again."""


@dataclass(slots=True)
class Correction:
    """``actual = overhead_s + factor * predicted``, learned online.

    Attributes:
        overhead_s: what each answer takes beside the prediction.
        factor: how much slower than predicted the node is.
        learned_s: when the last answer came.
    """

    overhead_s: float = _INITIAL_OVERHEAD_S
    factor: float = 1.0
    learned_s: float = -math.inf

    def learn(self, predicted_s: float, actual_s: float, now: float) -> None:
        """Take one answer in: the two figures share the error as they share the prediction."""
        if predicted_s <= 0.0 or actual_s <= 0.0:
            return  # No time passed: nothing was measured.
        expected_s = self.overhead_s + self.factor * predicted_s
        miss = math.log(actual_s / expected_s)
        step = _STEP * max(-_MOST_MISS, min(miss, _MOST_MISS))
        share = self.overhead_s / expected_s
        overhead_s = self.overhead_s * math.exp(step * share)
        factor = self.factor * math.exp(step * (1.0 - share))
        self.overhead_s = max(LEAST_OVERHEAD_S, min(overhead_s, MOST_OVERHEAD_S))
        self.factor = max(LEAST_FACTOR, min(factor, MOST_FACTOR))
        self.learned_s = now

    def fade(self, now: float) -> None:
        """Forget a little of what no answer confirmed for a while."""
        if now - self.learned_s > _TRUSTED_S:
            self.factor = self.factor**_FADE
            self.overhead_s += (1.0 - _FADE) * (_INITIAL_OVERHEAD_S - self.overhead_s)
