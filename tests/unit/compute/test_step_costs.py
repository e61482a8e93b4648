"""What a busy machine adds to the first steps is not taken for what they cost."""

from __future__ import annotations

import pytest

from tierkv.compute.engine.step_costs import MeasuredStep, plausible
from tierkv.costing.fit import StepCostFit
from tierkv.costing.service_time import StepCost, causal_pairs

COST = StepCost(per_token_s=5e-5, per_pair_s=2e-8, per_step_s=1e-3, per_sequence_s=5e-4)
SHAPES = ((1, 1), (8, 1), (64, 1), (64, 8), (512, 1), (512, 8))


def steps() -> list[MeasuredStep]:
    found = []
    for tokens, prompts in SHAPES:
        pairs = prompts * causal_pairs(0, tokens // prompts)
        seconds = COST.seconds(tokens, pairs, sequences=prompts)
        found.append((tokens, pairs, seconds, prompts))
    return found


def test_steps_that_agree_stay_as_they_are() -> None:
    assert plausible(steps()) == steps()
    fit = StepCostFit()
    fit.calibrate(plausible(steps()))
    assert fit.cost is not None
    assert fit.cost.causal_seconds(0, 480) == pytest.approx(COST.causal_seconds(0, 480), rel=0.05)


@pytest.mark.parametrize("stalled", range(len(SHAPES)))
def test_a_step_that_was_stopped_for_long_is_not_believed(stalled: int) -> None:
    measured = steps()
    tokens, pairs, _, prompts = measured[stalled]
    measured[stalled] = (tokens, pairs, 2.0, prompts)
    fit = StepCostFit()
    fit.calibrate(plausible(measured))
    assert fit.cost is not None
    right_s = COST.causal_seconds(0, 480)
    assert right_s / 2 < fit.cost.causal_seconds(0, 480) < right_s * 2
