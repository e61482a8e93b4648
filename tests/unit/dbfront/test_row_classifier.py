"""The classifier finds what separates rows, gives the same result each time, and admits doubt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.dbfront.calls.agreement import Classes, Numbers
from tierkv.dbfront.calls.row_classifier import descend, fit_classifier


def rows(
    seed: int, count: int, width: int, classes: int, *, apart: float
) -> tuple[Numbers, Classes]:
    """Return rows around one centre per class, ``apart`` standard deviations from the middle."""
    draw = np.random.default_rng(seed)
    centres = apart * draw.standard_normal((classes, width)) / np.sqrt(width)
    actual = np.arange(count) % classes
    return centres[actual] + draw.standard_normal((count, width)) / np.sqrt(width), actual


@pytest.mark.parametrize("width", [4, 32, 300])
@pytest.mark.parametrize("classes", [2, 5])
def test_classes_that_stand_apart_are_told_apart(width: int, classes: int) -> None:
    vectors, actual = rows(1, 400, width, classes, apart=8)
    fitted = fit_classifier(vectors[:200], actual[:200], classes)
    assert (fitted.unseen.classes == actual[:200]).mean() > 0.97
    predicted = fitted.classifier.predict(vectors[200:])
    assert (predicted.classes == actual[200:]).mean() > 0.97
    assert predicted.sure.mean() > 0.9


def test_answers_without_reason_are_guesses_and_known_to_be() -> None:
    vectors, _ = rows(2, 400, 16, 2, apart=0)
    actual = np.random.default_rng(3).integers(0, 2, 400)
    fitted = fit_classifier(vectors, actual, 2)
    assert fitted.unseen.sure.mean() < 0.65


def test_rows_without_a_class_are_only_predicted() -> None:
    vectors, actual = rows(4, 100, 8, 2, apart=8)
    some = np.where(np.arange(100) < 20, -1, actual)
    fitted = fit_classifier(vectors, some, 2)
    assert (fitted.unseen.classes == actual).mean() > 0.95
    known = fit_classifier(vectors[20:], actual[20:], 2)
    again = known.classifier.predict(vectors[:20])
    assert (again.classes == actual[:20]).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 4), st.integers(1, 60))
def test_it_depends_on_the_rows_alone_and_not_on_their_scale(
    seed: int, classes: int, width: int
) -> None:
    vectors, actual = rows(seed, 40, width, classes, apart=3)
    one, other = (fit_classifier(vectors, actual, classes) for _ in range(2))
    assert np.array_equal(one.unseen.sure, other.unseen.sure)
    assert np.array_equal(one.classifier.weights, other.classifier.weights)
    scaled = fit_classifier(4 * vectors + 8, actual, classes)
    assert scaled.unseen.sure == pytest.approx(one.unseen.sure, abs=1e-3)


def test_a_dimension_without_differences_says_nothing() -> None:
    vectors, actual = rows(5, 60, 6, 3, apart=6)
    wider = np.concatenate([vectors, np.full((60, 90), 7.0)], axis=1)
    one, other = fit_classifier(vectors, actual, 3), fit_classifier(wider, actual, 3)
    assert other.unseen.sure == pytest.approx(one.unseen.sure, abs=1e-3)
    assert not other.classifier.weights[6:].any()


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_the_descent_ends_at_the_minimum(seed: int, width: int) -> None:
    draw = np.random.default_rng(seed)
    factor = draw.standard_normal((width, width))
    matrix = factor @ factor.T + np.eye(width)
    wanted = draw.standard_normal(width)

    def function(point: Numbers) -> tuple[float, Numbers]:
        slope = matrix @ (point - wanted)
        return float((point - wanted) @ slope / 2), slope

    start = np.zeros(width)
    assert descend(function, start) == pytest.approx(wanted, abs=1e-3)
    assert not start.any()
