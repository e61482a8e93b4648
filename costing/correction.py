"""Corrections of each node's predicted times, learned from answers and shrunk by uncertainty.

```
actual = overhead_s + factor * predicted        least squares of relative errors, per node;
                                                old answers fade, two weak priors: 1 ms and 1.0
doubt  = relative error of an answer / sqrt(answers that did not share a step)

believed = typical * (own / typical) ** share   for each figure of each node in a group
share    = 1 - min(1, 2 * doubt / |log(own_s / typical_s)|) ** 2
```

Only answers show the time that a node's steps, the network and the front add to a prompt. In a
batch, about seven answers decide about a node, and several of the answers share a step. A node with
unlucky answers would get no more calls, so its correction would never be revised. Therefore the
correction of each node is drawn towards the typical node in proportion to the node's doubt
(positive-part shrinkage, James and Stein 1961). All times are seconds. Pure; used by
scheduler/nodes/node_record.py, which learns, and wherever costs are compared.

A compute node corrects its own plans, and also learns what stands beside a prompt:

```
first token = factor * planned + unit * (overhead + sum of share[i] * beside[i])

unit        the first time that was measured
beside      counts of ``Beside``
```

A plan counts the costs of loads and steps. It knows neither the step in progress, which has to end
first, nor the threads of other loads, which share the processor. Both grow with what stands beside
the prompt. The coefficients come from recursive least squares of relative errors with fading
weight. The first coefficients believe the plan, and a prior holds them there, so a few first
tokens correct mostly the overhead. Used by compute/tiers/load_log.py.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.costing.service_time import StepCost

Column = NDArray[np.float64]
"""One number per node."""

UNLIKE_OTHERS = 8.0
"""Largest believed speed ratio between a node and the typical node. Without this bound, a node that
was suspended during its first step would never get the work that disproves the measurement."""

COMPARED_TOKENS = 512
"""Length of the prompt by which the speeds of nodes are compared."""

LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
LEAST_OVERHEAD_S, MOST_OVERHEAD_S = 1e-4, 1.0
INITIAL_OVERHEAD_S = 1e-3
_KEPT = 0.85
"""Weight that all older answers keep after a new answer; about seven answers count."""
_MOST_MISS = 2.0
"""An answer counts as at most this many times slower or faster than expected."""
_TRUSTED_S = 30.0
_FADE = 0.9
"""A correction without a new answer stays valid for ``_TRUSTED_S``. Then each heartbeat removes a
tenth of the weight of the old answers, so a node that was avoided for past slowness is tried
again."""
_OVERHEAD_WEIGHT = 0.02 / 0.02**2
_FACTOR_WEIGHT = 0.02 / 0.5**2
"""Weights of the two priors: each counts 0.02 of an answer, with the overhead in units of 20 ms and
the factor in units of 0.5. Answers of equal size can't separate overhead from factor; then the
priors attribute a few ms to the overhead."""

_SHARED = 4.0
"""Number of answers that tell about as much as a single independent answer, because answers that
arrive together come from the same steps."""
_USUAL_SPREAD, _USUAL_WEIGHT = 0.3, 4.0
"""Prior for the relative error of answers after a good correction, and the number of answers that
the prior counts as. A few answers that agree by chance do not make the correction exact."""


class Correction:
    """``actual = overhead_s + factor * predicted``, least squares of relative errors that fade.

    Attributes:
        overhead_s: seconds that each answer takes in addition to the scaled prediction.
        factor: actual time over predicted time.
        doubt: relative standard error of a corrected prediction; infinite before the first answer.
        answers: number of answers learned from.
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
        """Learn from the predicted and the actual time of one answer."""
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
        """Reduce the weight of old answers by a tenth if no new answer came for ``_TRUSTED_S``."""
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
        # The best factor for the clamped overhead.
        factor = (x - mixed * self.overhead_s) / squares
        self.factor = max(LEAST_FACTOR, min(factor, MOST_FACTOR))
        self.doubt = self._standard_error()

    def _standard_error(self) -> float:
        """Return the relative error of an answer over the root of the independent answers."""
        a, b, c, d, e = self._sums
        o, f = self.overhead_s, self.factor
        squares = self._count - 2 * (o * d + f * e) + o * o * a + 2 * o * f * b + f * f * c
        usual = _USUAL_WEIGHT * _USUAL_SPREAD * _USUAL_SPREAD
        variance = (max(0.0, squares) + usual) / (self._count + _USUAL_WEIGHT)
        return math.sqrt(variance * _SHARED / self._count)


class Learned(Protocol):
    """The learned overhead and factor of one node, or columns for several nodes."""

    @property
    def overhead_s(self) -> Any: ...
    @property
    def factor(self) -> Any: ...


def corrected_s(learned: Learned, predicted_s: Any) -> Any:
    """Return the corrected time of a prediction."""
    return learned.overhead_s + learned.factor * predicted_s


class Corrections(NamedTuple):
    """Columns of Correction, for several nodes."""

    overhead_s: Column
    factor: Column
    doubt: Column


_ALIKE = 1.25

DOUBTED = 2.0
"""A difference of fewer standard errors than this counts as no difference."""


def typical(values: NDArray[Any]) -> Any:
    """Return the middle value of each row, as a column that broadcasts over nodes; O(n log n)."""
    ordered = np.sort(values, axis=-1)
    return ordered[..., values.shape[-1] // 2, None]


def credible(learned: Corrections, predicted_s: Column) -> Corrections:
    """Draw the corrections of several nodes towards the typical node, in proportion to doubt.

    Args:
        learned: corrections of the nodes; ``doubt`` is the relative standard error of a corrected
            prediction, infinite for a node without answers.
        predicted_s: the predicted time at each node.
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
    """Return the speed of each node over the typical node's, as learned from answers.

    A difference within a factor of 1.25 counts as 1.0. A node's own measurement at start says
    little on a machine where several nodes start at the same time.
    """
    known = np.isfinite(learned.doubt)
    if not known.any():
        return np.ones(known.shape)
    own_s: Any = cost.causal_seconds(0, COMPARED_TOKENS)
    seconds = corrected_s(credible(learned, own_s), own_s)
    speed = np.clip(typical(seconds[known]) / seconds, 1.0 / UNLIKE_OTHERS, UNLIKE_OTHERS)
    alike: Column = np.where(known & (np.abs(np.log(speed)) > np.log(_ALIKE)), speed, 1.0)
    return alike


class Beside(NamedTuple):
    """Prompts that share forward passes with a prompt.

    Attributes:
        before: prompts computed before it.
        after: prompts that come after it, but soon enough to share its forward pass.
    """

    before: int = 0
    after: int = 0


_TOKENS_KEPT: Final = 0.98
"""Weight that older first tokens keep after a new one: about fifty count."""
_NOISE: Final = 0.3
"""Standard deviation of a first token's relative error."""
_DOUBT: Final = np.array([1.0, 1.0, *([0.3] * len(Beside()))])
"""Standard deviation of the coefficients before any first token: factor, overhead, shares."""
_AT_LEAST: Final = 0.5
"""A prediction is never below this share of the plan."""
_START: Final = np.array([1.0, *([0.0] * (1 + len(Beside())))])
_START_COVARIANCE: Final = np.diag(_DOUBT**2)


class FirstTokenFit:
    """Predicts and learns times to the first token. One thread."""

    def __init__(self) -> None:
        self._unit_s = 0.0
        self._coefficients: NDArray[np.float64] = _START
        self._covariance: NDArray[np.float64] = _START_COVARIANCE

    def predict_s(self, planned_s: float, beside: Beside) -> float:
        """Return the seconds to the first token of a prompt with such a plan."""
        fitted_s = float(self._coefficients @ self._terms(planned_s, beside))
        return max(_AT_LEAST * planned_s, fitted_s)

    def learn(self, planned_s: float, beside: Beside, actual_s: float) -> None:
        """Learn from a first token: the plan, the counts at the decision, and the time it took."""
        self._unit_s = self._unit_s or actual_s
        terms = self._terms(planned_s, beside)
        fitted_s = float(self._coefficients @ terms)
        scale = 1.0 / max(actual_s, fitted_s)
        terms = terms * scale
        error = max(-1.0, (actual_s - fitted_s) * scale)  # at most 1.0
        spread = self._covariance @ terms
        gain = spread / (_NOISE**2 + float(terms @ spread))
        self._coefficients = self._coefficients + gain * error
        self._covariance = _faded(self._covariance - np.outer(gain, spread))

    def _terms(self, planned_s: float, beside: Beside) -> NDArray[np.float64]:
        unit_s = self._unit_s
        return np.array([planned_s, unit_s, *(unit_s * count for count in beside)])


def _faded(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Forget a little, but know each coefficient at least as well as before any first token."""
    grown = covariance / _TOKENS_KEPT
    least = np.minimum(1.0, _DOUBT / np.sqrt(np.diag(grown)))
    bounded: NDArray[np.float64] = grown * np.outer(least, least)
    return bounded
