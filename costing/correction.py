"""Learned from answers: how far a node's predictions are off, and how far that is believed.

```
actual = overhead_s + factor * predicted        least squares of relative errors, one node each;
                                                old answers fade, two weak priors: 1 ms and 1.0
doubt  = relative error of an answer / sqrt(answers that did not share a step)

believed = typical * (own / typical) ** share   in a group of nodes, each figure
share    = 1 - min(1, 2 * doubt / |log(own_s / typical_s)|) ** 2
```

What a node's steps, the network and the front add to a prompt shows nowhere else. In a batch a node
is judged by about seven answers that shared a few steps, and an unlucky node would get no more
calls and could not be judged again. So what was learned is drawn towards the typical node by its
own doubt (positive-part shrinkage, James and Stein 1961). Seconds throughout; pure; used by
scheduler/nodes/node_record.py, which learns, and where costs are weighed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.service_time import StepCost

Column = NDArray[np.float64]
"""One number per node."""

UNLIKE_OTHERS = 8.0
"""A node is not believed to differ by more: one that was stopped in its first step would never get
the work that proves it wrong."""

COMPARED_TOKENS = 512
"""Of the prompt by which nodes are compared."""

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
        expected_s = corrected_s(self, predicted_s)
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


class Learned(Protocol):
    """What answers taught of one node, or of some: columns."""

    @property
    def overhead_s(self) -> Any: ...
    @property
    def factor(self) -> Any: ...


def corrected_s(learned: Learned, predicted_s: Any) -> Any:
    """Return what a prediction turns out to be."""
    return learned.overhead_s + learned.factor * predicted_s


class Corrections(NamedTuple):
    """Figures of Correction, of some nodes."""

    overhead_s: Column
    factor: Column
    doubt: Column


_ALIKE = 1.25

DOUBTED = 2.0
"""A difference of less than so many standard errors is none."""


def typical(values: NDArray[Any]) -> Any:
    """Return the middle value of each row, as a column that goes with any node's; O(n log n)."""
    ordered = np.sort(values, axis=-1)
    return ordered[..., values.shape[-1] // 2, None]


def credible(learned: Corrections, predicted_s: Column) -> Corrections:
    """Draw the corrections of some nodes towards the typical one, as far as they are doubted.

    Args:
        learned: of the nodes; ``doubt`` is the relative standard error of a corrected prediction,
            infinite where no answer was measured.
        predicted_s: what is to be corrected, at each of them.
    """
    factor, overhead_s = learned.factor, learned.overhead_s
    known = np.isfinite(learned.doubt)
    if factor.size == 1 or not known.any():
        return learned
    usual = Corrections(typical(overhead_s[known]), typical(factor[known]), learned.doubt)
    apart = np.log(corrected_s(learned, predicted_s) / corrected_s(usual, predicted_s))
    noise = DOUBTED * np.where(known, learned.doubt, np.inf)
    share = 1.0 - np.minimum(noise / np.maximum(np.abs(apart), 1e-9), 1.0) ** 2
    return learned._replace(
        factor=usual.factor * (factor / usual.factor) ** share,
        overhead_s=usual.overhead_s * (overhead_s / usual.overhead_s) ** share,
    )


def speeds(cost: StepCost, learned: Corrections) -> Column:
    """How fast some nodes are beside the typical one, as their answers tell; a fifth is nothing.

    What a node measured when it started says little on a machine where others started, too.
    """
    known = np.isfinite(learned.doubt)
    if not known.any():
        return np.ones(known.shape)
    own_s: Any = cost.causal_seconds(0, COMPARED_TOKENS)
    seconds = corrected_s(credible(learned, own_s), own_s)
    speed = np.clip(typical(seconds[known]) / seconds, 1.0 / UNLIKE_OTHERS, UNLIKE_OTHERS)
    alike: Column = np.where(known & (np.abs(np.log(speed)) > np.log(_ALIKE)), speed, 1.0)
    return alike
