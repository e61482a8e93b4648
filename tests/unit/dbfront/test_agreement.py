"""The bound of an agreement is exact; thresholds are the least confidence that agrees enough."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.calls.agreement import (
    LEAST_ROWS_OF_CLASS,
    NEVER,
    choose_thresholds,
    least_checked,
    lower_bound,
    shows,
)


def test_bounds_of_few_rows() -> None:
    assert lower_bound(0, 0) == lower_bound(0, 10) == 0.0
    assert lower_bound(1, 1) == pytest.approx(0.05)
    assert lower_bound(10, 10) == pytest.approx(0.05 ** (1 / 10))
    assert lower_bound(1, 2) == pytest.approx(1 - math.sqrt(0.95))
    with pytest.raises(ValueError, match="can't agree"):
        lower_bound(3, 2)


@given(st.integers(1, 120), st.data())
def test_the_bound_is_where_the_result_has_a_probability_of_one_in_twenty(
    checked: int, data: st.DataObject
) -> None:
    agreed = data.draw(st.integers(1, checked))
    bound = lower_bound(agreed, checked)
    share = Fraction(bound)
    at_least = sum(
        math.comb(checked, n) * share**n * (1 - share) ** (checked - n)
        for n in range(agreed, checked + 1)
    )
    assert float(at_least) == pytest.approx(0.05, abs=1e-9)
    assert bound < agreed / checked
    assert bound > lower_bound(agreed - 1, checked)
    assert bound < lower_bound(agreed, checked - 1) if agreed < checked else bound < 1


@pytest.mark.parametrize(
    ("asked", "rows"), [(0.6, 6), (0.8, 14), (0.9, 29), (0.95, 59), (0.99, 299)]
)
def test_the_fewest_rows_that_can_show_an_agreement(asked: float, rows: int) -> None:
    assert least_checked(asked) == rows
    assert lower_bound(rows, rows) >= asked > lower_bound(rows - 1, rows - 1)


@given(st.integers(0, 100), st.integers(0, 100), st.sampled_from([0.6, 0.9, 0.95]))
def test_rows_show_what_their_bound_reaches(one: int, other: int, asked: float) -> None:
    agreed, checked = min(one, other), max(one, other)
    assert shows(agreed, checked, asked) == (lower_bound(agreed, checked) >= asked)


def thresholds(rows: list[tuple[float, int, int]], *, classes: int, asked: float) -> list[float]:
    """Choose thresholds for rows of confidence, predicted and actual class, for as many checked."""
    sure, predicted, actual = (np.array(column) for column in zip(*rows, strict=True))
    found = choose_thresholds(
        sure, predicted, actual, classes=classes, asked=asked, checked=len(rows)
    )
    return [float(one) for one in found]


def test_the_threshold_is_the_least_confidence_that_will_do() -> None:
    agreeing = [(0.9, 0, 0)] * 100 + [(0.8, 0, 0)] * 10
    assert thresholds(agreeing, classes=2, asked=0.9) == [0.8, NEVER]
    assert thresholds([*agreeing, *[(0.7, 0, 1)] * 20], classes=2, asked=0.9) == [0.8, NEVER]
    assert thresholds([*agreeing, *[(0.8, 0, 1)] * 30], classes=2, asked=0.9) == [0.9, NEVER]


def test_a_class_that_agrees_less_needs_more_confidence() -> None:
    rows = [(0.8, 0, 0)] * 300 + [(0.9, 1, 1)] * 20 + [(0.8, 1, 0)] * 4
    assert thresholds(rows, classes=2, asked=0.9) == [0.8, 0.9]


def test_a_class_of_few_rows_is_left_to_the_model() -> None:
    rows = [(0.9, 0, 0)] * 100 + [(0.9, 1, 1)] * (LEAST_ROWS_OF_CLASS - 1)
    assert thresholds(rows, classes=2, asked=0.9) == [0.9, NEVER]


def test_too_few_rows_for_the_check_have_no_threshold() -> None:
    rows = [(0.9, 0, 0)] * (least_checked(0.9) - 1)
    assert thresholds(rows, classes=1, asked=0.9) == [NEVER]


@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 2), st.integers(-1, 2)),
        min_size=1,
        max_size=200,
    ),
    st.sampled_from([0.55, 0.8]),
)
def test_rows_above_a_threshold_agree_as_asked(
    rows: list[tuple[int, int, int]], asked: float
) -> None:
    found = thresholds([(one / 10, *others) for one, *others in rows], classes=3, asked=asked)
    above = [(one, other) for sure, one, other in rows if sure / 10 >= found[one]]
    for number in range(3):
        mine = [one == other for one, other in above if one == number]
        assert not mine or (len(mine) >= LEAST_ROWS_OF_CLASS and np.mean(mine) >= asked)
