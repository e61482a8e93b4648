"""When a prompt's first token comes: a plan's seconds, corrected for what stands beside the prompt.

```
first token = factor * planned + unit * (overhead + sum of share[i] * beside[i])

unit        the first time that was measured
beside      counts of ``Beside``
```

A plan counts the costs of loads and steps. It knows neither the step in progress, which has to end
first, nor the threads of other loads, which share the processor. Both grow with what stands beside
the prompt, so the coefficients are learned from the first tokens that came: recursive least squares
of relative errors with fading weight. The coefficients begin at those that believe the plan, and
are held there by a prior, so that a few answers correct mostly the overhead.

Pure. Used by compute/tiers/load_log.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Beside(NamedTuple):
    """Prompts that share forward passes with a prompt.

    Attributes:
        before: prompts computed before it.
        after: prompts that come after it, but soon enough to share its forward pass.
    """

    before: int = 0
    after: int = 0


_KEPT: Final = 0.98
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
    grown = covariance / _KEPT
    least = np.minimum(1.0, _DOUBT / np.sqrt(np.diag(grown)))
    bounded: NDArray[np.float64] = grown * np.outer(least, least)
    return bounded
