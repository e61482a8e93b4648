"""What a node's answers teach about predictions of them: how far off, and by what.

Pure; each NodeRecord has a Correction and tells it when a first token comes. What a node does to a
prompt beside loading and computing (its steps, the network, the front) is seen nowhere else.
"""

from __future__ import annotations

import math

LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
LEAST_OVERHEAD_S, MOST_OVERHEAD_S = 1e-4, 1.0
INITIAL_OVERHEAD_S = 1e-3
_KEPT = 0.85
"""Weight of everything older after one more answer: about seven count."""
_MOST_MISS = 2.0
"""One answer never counts as more than so many times too fast or too slow."""
_TRUSTED_S = 30.0
_FADE = 0.9
"""What was learned is believed for so long, then a tenth of it goes with every heartbeat, so that a
node which is avoided for what it once was is tried again."""
_OVERHEAD_WEIGHT = 0.02 / 0.02**2
_FACTOR_WEIGHT = 0.02 / 0.5**2
"""How strongly the two hold on to where they began: a fiftieth of an answer's weight each, in units
of 20 ms and of one half. Answers of one size can't tell them apart; then a few ms are overhead."""

_SHARED = 4.0
"""Answers that come together, from the same steps, tell about as much as one."""
_USUAL_SPREAD, _USUAL_WEIGHT = 0.3, 4.0
"""How far answers are off that a good correction was made for; as if so many had been seen. A few
that happen to be alike are not exact."""


class Correction:
    """``actual = overhead_s + factor * predicted``, least squares of relative errors that fade.

    Attributes:
        overhead_s: what each answer takes beside the prediction.
        factor: how much slower than predicted the node is.
        doubt: relative standard error of what the two correct; infinite before any answer.
        answers: how many were learned from.
    """

    def __init__(self) -> None:
        self.overhead_s = INITIAL_OVERHEAD_S
        self.factor = 1.0
        self.doubt = math.inf
        self.answers = 0
        self._learned_s = -math.inf
        self._count = 0.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def learn(self, predicted_s: float, actual_s: float, now: float) -> None:
        """Take one answer in."""
        if predicted_s <= 0.0 or actual_s <= 0.0:
            return  # No time passed: nothing was measured.
        expected_s = self.overhead_s + self.factor * predicted_s
        told_s = max(expected_s / _MOST_MISS, min(actual_s, expected_s * _MOST_MISS))
        one, x = 1.0 / told_s, predicted_s / told_s
        self._keep(_KEPT)
        a, b, c, d, e = self._sums
        self._sums = (a + one * one, b + one * x, c + x * x, d + one, e + x)
        self._count += 1.0
        self.answers += 1
        self._learned_s = now
        self._solve()

    def fade(self, now: float) -> None:
        """Forget a little of what no answer confirmed for a while."""
        if self.answers and now - self._learned_s > _TRUSTED_S:
            self._keep(_FADE)
            self._solve()

    def _keep(self, share: float) -> None:
        self._count *= share
        a, b, c, d, e = self._sums
        self._sums = (share * a, share * b, share * c, share * d, share * e)

    def _solve(self) -> None:
        ones, mixed, squares, one, x = self._sums
        ones += _OVERHEAD_WEIGHT
        squares += _FACTOR_WEIGHT
        one += _OVERHEAD_WEIGHT * INITIAL_OVERHEAD_S
        x += _FACTOR_WEIGHT
        overhead_s = (one * squares - x * mixed) / (ones * squares - mixed * mixed)
        self.overhead_s = max(LEAST_OVERHEAD_S, min(overhead_s, MOST_OVERHEAD_S))
        # The best factor for the overhead that was allowed.
        factor = (x - mixed * self.overhead_s) / squares
        self.factor = max(LEAST_FACTOR, min(factor, MOST_FACTOR))
        self.doubt = self._standard_error()

    def _standard_error(self) -> float:
        """Relative error of an answer, over the root of how many that did not share a step."""
        a, b, c, d, e = self._sums
        o, f = self.overhead_s, self.factor
        squares = self._count - 2 * (o * d + f * e) + o * o * a + 2 * o * f * b + f * f * c
        usual = _USUAL_WEIGHT * _USUAL_SPREAD * _USUAL_SPREAD
        variance = (max(0.0, squares) + usual) / (self._count + _USUAL_WEIGHT)
        return math.sqrt(variance * _SHARED / self._count)
