"""How far a classifier's answers agree with the model's: an exact bound, and confidence thresholds.

dbfront/statement/cascade.py calls this module. Pure: counts and arrays in, numbers out. The bound
holds for one look at rows without a part in any choice, so thresholds are chosen on other rows than
the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierkv.dbfront.contracts import CallDefaults
from tierkv.sql.calls.ai_call import AiCall, CallForm

Numbers = NDArray[np.float64]
Classes = NDArray[np.int64]

CASCADED: Final = frozenset({"ai_filter", "ai_classify"})
"""Functions whose answer is one of few labels, by canonical name."""

CONFIDENCE: Final = 0.95
"""Probability with which a lower bound holds."""

_UNSEEN: Final = 0.5
"""Disagreements added to those of the rows learned from, which may have none by luck."""

_DEVIATIONS: Final = 1.3
"""Standard deviations of disagreements above the expected ones that a check is prepared for: it is
then passed about nine times in ten (Poisson).
"""

LEAST_ROWS_OF_CLASS: Final = 8
"""Sure rows that a class needs on the rows learned from; a rarer class is left to the model."""

_HALVINGS: Final = 60
NEVER: Final = math.inf
"""Threshold of a class that the classifier never answers."""


def asked_agreement(form: CallForm, defaults: CallDefaults) -> float:
    """Return the agreement that calls of a form ask for; 0.0 without a cascade."""
    if form.function.canonical not in CASCADED:
        return 0.0
    options = AiCall(form.function.canonical, form.constants).options
    return options.over(defaults.options).cascade or 0.0


def lower_bound(agreed: int, checked: int) -> float:
    """Return the lower bound of the share of agreement, one-sided, with probability CONFIDENCE.

    The bound is the smallest share under which ``agreed`` or more agreements are not rarer than
    1 - CONFIDENCE.

    Args:
        agreed: rows with equal answers, at most ``checked``.
        checked: rows compared; 0 gives the bound 0.0.

    Raises:
        ValueError: ``agreed`` is not between 0 and ``checked``.

    Ref: Clopper and Pearson, "The Use of Confidence or Fiducial Limits Illustrated in the Case of
    the Binomial" (Biometrika 26, 1934).

    Cost: about 60 times the number of disagreements.
    """
    if not 0 <= agreed <= checked:
        raise ValueError(f"{agreed} of {checked} rows can't agree")
    if not agreed:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_least(agreed, checked, middle) < 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def _at_least(agreed: int, checked: int, share: float) -> float:
    """Return the probability of ``agreed`` or more agreements among ``checked`` rows."""
    yes, no = math.log(share), math.log1p(-share)
    ways = 0.0
    logs: list[float] = []
    for different in range(checked - agreed + 1):
        if different:
            ways += math.log(checked - different + 1) - math.log(different)
        logs.append(ways + (checked - different) * yes + different * no)
    return math.fsum(map(math.exp, logs))


def least_checked(asked: float) -> int:
    """Return the fewest rows whose agreement, if they all agree, has a bound of at least ``asked``.

    Args:
        asked: share of agreement, above 0.0 and below 1.0.
    """
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(asked) - 1e-9)


def shows(agreed: int, checked: int, asked: float) -> bool:
    """Return whether rows show an agreement of at least ``asked``: if its lower bound is as high.

    Cost: as many steps as there are disagreements.
    """
    return agreed > 0 and _at_least(agreed, checked, asked) <= 1 - CONFIDENCE


def choose_thresholds(
    sure: Numbers,
    predicted: Classes,
    actual: Classes,
    *,
    classes: int,
    asked: float,
    checked: int,
) -> Numbers:
    """Choose for each class the least confidence at which the classifier's answers are used.

    All classes together have a threshold first: the least confidence down to which the check will
    show the agreement asked for, with a few more disagreements than there are here. It is raised
    for a class that agrees less than asked.

    Args:
        sure: [rows], confidence of each row's predicted class, in [0, 1].
        predicted: [rows], predicted classes, in [0, classes).
        actual: [rows], the model's answers; another number for an answer that is no class.
        classes: number of classes.
        asked: share of agreement, in (0, 1).
        checked: rows of the check.

    Returns:
        thresholds: [classes]; NEVER for a class that the classifier must not answer.
    """
    thresholds = np.full(classes, NEVER)
    equal = actual == predicted
    together = _least_confidence(
        sure,
        equal,
        lambda agreed, count: _will_show(
            agreed, count, asked=asked, checked=round(count * checked / len(sure))
        ),
    )
    for one in range(classes):
        rows = (predicted == one) & (sure >= together)
        if rows.sum() >= LEAST_ROWS_OF_CLASS:
            thresholds[one] = _least_confidence(
                sure[rows],
                equal[rows],
                lambda agreed, count: count >= LEAST_ROWS_OF_CLASS and agreed >= asked * count,
            )
    return thresholds


def _will_show(agreed: int, count: int, *, asked: float, checked: int) -> bool:
    """Return whether ``checked`` rows like these will likely show the agreement."""
    expected = checked * (count - agreed + _UNSEEN) / count
    most = math.ceil(expected + _DEVIATIONS * math.sqrt(expected))
    return shows(checked - most, checked, asked)


def _least_confidence(
    sure: Numbers, equal: NDArray[np.bool_], suffices: Callable[[int, int], bool]
) -> float:
    """Return the least confidence at which the rows above suffice; NEVER if there is none."""
    order = np.argsort(-sure, kind="stable")
    agreed = np.cumsum(equal[order]).tolist()
    confidence = sure[order].tolist()
    for at in reversed(range(len(confidence))):
        # A threshold can't separate rows of equal confidence.
        if at + 1 < len(confidence) and confidence[at + 1] == confidence[at]:
            continue
        if suffices(agreed[at], at + 1):
            return float(confidence[at])
    return NEVER
