"""A small classifier over vectors of texts: multinomial logistic regression with a ridge penalty.

dbfront/statement/cascade.py fits the classifier to answers of a model. Pure, on numpy alone, and
without chance: equal rows in equal order give equal classifiers. Dimensions are standardised, so
the penalty treats them alike. The strength of the penalty is chosen by cross-validation; the same
folds give each learned row a prediction by a classifier that did not see the row.

With fewer rows than dimensions, the best weights lie in the space spanned by the rows. Rows are
then rotated into this space first, which changes no prediction and saves most of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.dbfront.calls.agreement import Classes, Numbers

_FOLDS: Final = 5
_PENALTIES: Final = (0.3, 0.03, 0.003)
"""Factors of the squared weights, against the mean loss of a row; the strongest comes first."""

_STEPS: Final = 200
_SMALL: Final = 1e-5
"""The descent ends at a gradient with no larger component."""

_MEMORY: Final = 8
_SUFFICIENT: Final = 1e-4
"""Share of the expected decrease that a step must reach (Armijo)."""

_HALVINGS: Final = 30


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted classes of rows.

    Attributes:
        classes: [rows] int64.
        sure: [rows] float64, probability of the class.
    """

    classes: Classes
    sure: Numbers


@dataclass(frozen=True, slots=True)
class RowClassifier:
    """Probabilities of the classes of a vector.

    Attributes:
        mean: [dimensions], subtracted from each vector.
        scale: [dimensions], a vector's dimensions are multiplied by this.
        weights: [dimensions, classes].
        offsets: [classes].
    """

    mean: Numbers
    scale: Numbers
    weights: Numbers
    offsets: Numbers

    def predict(self, vectors: Numbers) -> Prediction:
        """Return the most likely class of each vector; ties go to the first class.

        Args:
            vectors: [rows, dimensions].
        """
        chances = _softmax((vectors - self.mean) * self.scale @ self.weights + self.offsets)
        classes = chances.argmax(axis=1)
        return Prediction(classes, chances[np.arange(len(classes)), classes])


@dataclass(frozen=True, slots=True)
class FittedRows:
    """A classifier, and what the folds predicted for the rows it learned from.

    Attributes:
        classifier: fitted to all rows.
        unseen: prediction of each row by a classifier that was fitted without the row.
    """

    classifier: RowClassifier
    unseen: Prediction


def fit_classifier(vectors: Numbers, actual: Classes, classes: int) -> FittedRows:
    """Fit a classifier.

    Args:
        vectors: [rows, dimensions], at least one row of each class.
        actual: [rows], classes in [0, classes); -1 for a row that is only predicted.
        classes: number of classes, at least 2.

    Cost: 16 descents over [rows, min(rows, dimensions)] numbers; about a second for 1,000 rows.
    """
    mean = vectors.mean(axis=0)
    spread = vectors.std(axis=0)
    scale = np.where(spread > 0.0, 1.0 / np.where(spread > 0.0, spread, 1.0), 0.0)
    rows = (vectors - mean) * scale
    rotation: Numbers | None = None
    if len(rows) < rows.shape[1]:
        rotation = np.linalg.svd(rows, full_matrices=False)[2].T
        rows = rows @ rotation
    folds = np.empty(len(rows), np.int64)
    folds[np.argsort(actual, kind="stable")] = np.arange(len(rows)) % _FOLDS  # Classes spread out.
    best: tuple[float, float, Numbers] | None = None
    for penalty in _PENALTIES:
        chances = _unseen(rows, actual, folds, classes, penalty)
        loss = _loss(chances, actual)
        if best is None or loss < best[0]:
            best = (loss, penalty, chances)
    assert best is not None
    _, penalty, chances = best
    known = actual >= 0
    weights = _fit(rows[known], actual[known], classes, penalty)
    slopes = weights[1:] if rotation is None else rotation @ weights[1:]
    predicted = chances.argmax(axis=1)
    unseen = Prediction(predicted, chances[np.arange(len(rows)), predicted])
    return FittedRows(RowClassifier(mean, scale, slopes, weights[0]), unseen)


def _unseen(
    rows: Numbers, actual: Classes, folds: Classes, classes: int, penalty: float
) -> Numbers:
    """Return [rows, classes] probabilities, each fold's by a classifier of the other folds."""
    chances = np.empty((len(rows), classes))
    for fold in range(_FOLDS):
        others = (folds != fold) & (actual >= 0)
        weights = _fit(rows[others], actual[others], classes, penalty)
        chances[folds == fold] = _softmax(rows[folds == fold] @ weights[1:] + weights[0])
    return chances


def _loss(chances: Numbers, actual: Classes) -> float:
    known = np.flatnonzero(actual >= 0)
    return float(-np.log(np.maximum(chances[known, actual[known]], 1e-12)).mean())


def _softmax(scores: Numbers) -> Numbers:
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: Numbers = raised / raised.sum(axis=1, keepdims=True)
    return chances


def _fit(rows: Numbers, actual: Classes, classes: int, penalty: float) -> Numbers:
    """Return [1 + dimensions, classes] weights, the offsets first; offsets are not penalised."""
    count, width = rows.shape
    ones = np.concatenate([np.ones((count, 1)), rows], axis=1)
    wanted = np.zeros((count, classes))
    wanted[np.arange(count), actual] = 1.0
    penalties = np.full((width + 1, 1), penalty)
    penalties[0] = 0.0

    def loss_and_slope(flat: Numbers) -> tuple[float, Numbers]:
        weights = flat.reshape(width + 1, classes)
        chances = _softmax(ones @ weights)
        loss = -np.log(np.maximum((chances * wanted).sum(axis=1), 1e-300)).mean()
        loss += 0.5 * float((penalties * weights**2).sum())
        slope = ones.T @ (chances - wanted) / count + penalties * weights
        return float(loss), slope.ravel()

    flat = descend(loss_and_slope, np.zeros((width + 1) * classes))
    return flat.reshape(width + 1, classes)


def descend(function: Callable[[Numbers], tuple[float, Numbers]], start: Numbers) -> Numbers:
    """Return the minimum of a smooth convex function, by L-BFGS with halved steps.

    Args:
        function: returns the value and the gradient at a point.
        start: first point; unchanged.

    Ref: Nocedal and Wright, "Numerical Optimization" (2nd edition), algorithms 7.4 and 7.5.
    """
    point = start
    value, slope = function(point)
    moves: list[tuple[Numbers, Numbers, float]] = []
    for _ in range(_STEPS):
        if np.abs(slope).max() <= _SMALL:
            break
        direction = _direction(slope, moves)
        fall = float(slope @ direction)
        if fall >= 0.0:  # Rounding has spoilt the curvature.
            moves, direction, fall = [], -slope, -float(slope @ slope)
        step = 1.0 if moves else min(1.0, 1.0 / float(np.abs(slope).sum()))
        for _ in range(_HALVINGS):
            there = point + step * direction
            new_value, new_slope = function(there)
            if new_value <= value + _SUFFICIENT * step * fall:
                break
            step /= 2
        else:
            break
        moved, changed = there - point, new_slope - slope
        curvature = float(moved @ changed)
        if curvature > 0.0:
            moves = [*moves[1 - _MEMORY :], (moved, changed, curvature)]
        point, value, slope = there, new_value, new_slope
    return point


def _direction(slope: Numbers, moves: list[tuple[Numbers, Numbers, float]]) -> Numbers:
    """Return the direction of the next step from the latest moves."""
    direction = -slope
    shares: list[float] = []
    for moved, changed, curvature in reversed(moves):
        share = float(moved @ direction) / curvature
        shares.append(share)
        direction = direction - share * changed
    if moves:
        _, changed, curvature = moves[-1]
        direction = direction * (curvature / float(changed @ changed))
    for (moved, changed, curvature), share in zip(moves, reversed(shares), strict=True):
        direction = direction + (share - float(changed @ direction) / curvature) * moved
    return direction
