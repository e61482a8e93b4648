"""Times to the first token: a plan, corrected for what stands beside the prompt."""

from __future__ import annotations

from random import Random

import pytest

from tierkv.costing.correction import Beside, FirstTokenFit

ALONE = Beside()


def test_before_any_first_token_the_plan_is_the_prediction() -> None:
    assert FirstTokenFit().predict_s(0.3, Beside(3, 4)) == 0.3


@pytest.mark.parametrize("unit_s", [1e-4, 1e-2, 10.0])
def test_an_overhead_and_a_share_per_neighbour_are_learned_in_any_unit(unit_s: float) -> None:
    rng = Random(1)

    def actual_s(planned_s: float, beside: Beside) -> float:
        return planned_s + unit_s * (1.0 + 0.5 * beside.before + 0.25 * beside.after)

    def case() -> tuple[float, Beside]:
        return unit_s * rng.uniform(0.2, 1.0), Beside(rng.randrange(8), rng.randrange(8))

    fit = FirstTokenFit()
    for _ in range(200):
        planned_s, beside = case()
        fit.learn(planned_s, beside, actual_s(planned_s, beside))
    for planned_s, beside in (case() for _ in range(50)):
        predicted_s = fit.predict_s(planned_s, beside)
        assert predicted_s == pytest.approx(actual_s(planned_s, beside), rel=0.1)


def test_a_change_shows_after_some_first_tokens() -> None:
    fit = FirstTokenFit()
    for actual_s in (*[0.5] * 300, *[0.1] * 100):
        fit.learn(0.1, ALONE, actual_s)
    assert fit.predict_s(0.1, ALONE) == pytest.approx(0.1, rel=0.2)


def test_one_absurd_time_moves_a_prediction_little() -> None:
    fit = FirstTokenFit()
    for _ in range(30):
        fit.learn(0.1, ALONE, 0.2)
    fit.learn(0.1, ALONE, 60.0)
    assert fit.predict_s(0.1, ALONE) == pytest.approx(0.2, rel=0.1)


def test_a_prediction_is_never_below_half_of_the_plan() -> None:
    fit = FirstTokenFit()
    for _ in range(100):
        fit.learn(0.5, ALONE, 0.01)
    assert fit.predict_s(0.5, ALONE) == 0.25
