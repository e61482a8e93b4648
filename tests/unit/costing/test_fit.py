"""Costs fitted online: exact on exact samples, quick to see a change, never below zero."""

from __future__ import annotations

import random

import pytest

from tierkv.costing.fit import LineFit, StepCostFit
from tierkv.costing.service_time import Line, StepCost, causal_pairs


def test_latency_and_rate_are_told_apart_by_reads_of_different_sizes() -> None:
    fit = LineFit()
    assert fit.line is None
    for size in (100, 10_000, 1_000):
        fit.add(size, 0.5 + size / 1_000, now=0.0)
    assert fit.line is not None
    assert fit.line.latency_s == pytest.approx(0.5)
    assert fit.line.bytes_per_s == pytest.approx(1_000)


def test_without_different_sizes_all_time_counts_as_rate() -> None:
    fit = LineFit()
    for _ in range(3):
        fit.add(1_000, 2.0, now=0.0)
    assert fit.line == Line(0.0, pytest.approx(500.0))


def test_a_change_is_half_learnt_from_one_load_and_layers_of_a_load_count_as_one() -> None:
    for layers in (1, 4):
        fit = LineFit(reads_per_load=layers)
        fit.add(1_000, 1.0, now=0.0)
        for _ in range(layers):
            fit.add(1_000, 3.0, now=0.0)
        assert fit.line is not None and fit.line.seconds(1_000) == pytest.approx(2.0)
    fit.add(1_000, 2.0, now=0.0, whole=True)
    assert fit.line.seconds(1_000) == pytest.approx(2.0)


def test_after_a_pause_a_new_read_counts_nearly_alone() -> None:
    fit = LineFit()
    fit.add(1_000, 9.0, now=0.0)
    fit.add(1_000, 1.0, now=60.0)
    assert fit.line is not None and fit.line.seconds(1_000) == pytest.approx(1.0, rel=0.02)


def test_one_slow_read_among_usual_ones_is_no_news() -> None:
    fit = LineFit()
    for ended_s in (1.0, 2.0):
        fit.add(1_000, 1.0, now=ended_s)
    fit.add(1_000, 8.0, now=10.0)  # A thread was stopped.
    fit.add(1_000, 8.0, now=10.5)  # The same stop, seen by a second thread.
    fit.add(1_000, 1.0, now=11.5)
    assert fit.line is not None and fit.line.seconds(1_000) == pytest.approx(1.0)


def test_a_path_that_got_slow_is_believed_at_the_second_slow_read() -> None:
    fit = LineFit()
    fit.add(1_000, 1.0, now=1.0)
    fit.add(1_000, 9.0, now=10.0)
    assert fit.line is not None and fit.line.seconds(1_000) == pytest.approx(1.0)
    fit.add(1_000, 9.0, now=19.0)
    assert fit.line.seconds(1_000) > 7.0


def test_a_load_that_was_given_up_is_believed_at_once_with_the_slow_reads_before_it() -> None:
    fit = LineFit()
    fit.add(1_000, 1.0, now=1.0)
    fit.add(1_000, 9.0, now=10.0)
    fit.add(1_000, 9.0, now=11.0, certain=True)
    assert fit.line is not None and fit.line.seconds(1_000) > 6.0


def test_a_path_that_is_fast_again_is_believed_in_half_as_many_reads() -> None:
    fit = LineFit()
    fit.add(1_000, 64.0, now=0.0)
    for _ in range(3):
        fit.add(1_000, 1.0, now=0.0)
    assert fit.line is not None and fit.line.seconds(1_000) < 3.0


def test_nothing_is_learnt_from_nothing_and_latency_is_never_negative() -> None:
    fit = LineFit()
    fit.add(0, 1.0, now=0.0)
    fit.add(10, 0.0, now=0.0)
    assert fit.line is None
    fit.add(100, 0.01, now=0.0)
    fit.add(10_000, 9.0, now=0.0)
    assert fit.line is not None and fit.line.latency_s == 0.0 < fit.line.bytes_per_s


def test_one_step_tells_seconds_per_token() -> None:
    fit = StepCostFit()
    assert fit.cost is None
    fit.add(100, causal_pairs(0, 100), 2.0)
    assert fit.cost == StepCost(pytest.approx(0.02))


def test_steps_of_different_size_and_context_tell_all_three_figures() -> None:
    want = StepCost(per_token_s=1e-3, per_pair_s=1e-6, per_step_s=0.02)
    fit = StepCostFit()
    for start, tokens in ((0, 64), (0, 512), (1_000, 512), (4_000, 256), (2_000, 32)):
        pairs = causal_pairs(start, tokens)
        fit.add(tokens, pairs, want.seconds(tokens, pairs))
    assert fit.cost is not None
    assert fit.cost.per_token_s == pytest.approx(1e-3, rel=0.01)
    assert fit.cost.per_pair_s == pytest.approx(1e-6, rel=0.01)
    assert fit.cost.per_step_s == pytest.approx(0.02, rel=0.01)


def test_noise_makes_no_figure_negative_and_predictions_stay_near() -> None:
    rng, fit = random.Random(5), StepCostFit()
    for _ in range(200):
        tokens, start = rng.randrange(16, 1_024), rng.randrange(0, 4_000)
        pairs = causal_pairs(start, tokens)
        truth = 1e-3 * tokens + 2e-7 * pairs
        fit.add(tokens, pairs, truth * rng.uniform(0.9, 1.1))
        cost = fit.cost
        assert cost is not None
        assert min(cost.per_token_s, cost.per_pair_s, cost.per_step_s) >= 0.0
    pairs = causal_pairs(0, 2_000)
    assert cost.seconds(2_000, pairs) == pytest.approx(2.0 + 2e-7 * pairs, rel=0.1)


def test_pairs_of_a_chunk() -> None:
    assert causal_pairs(0, 3) == 1 + 2 + 3
    assert causal_pairs(10, 2) == 11 + 12


TRUE_COST = StepCost(per_token_s=1e-4, per_pair_s=2e-7, per_step_s=0.004)


def calibrated() -> StepCostFit:
    fit = StepCostFit()
    sizes = (1, 16, 128, 1_024)
    fit.calibrate([(n, causal_pairs(0, n), TRUE_COST.causal_seconds(0, n), 1) for n in sizes])
    return fit


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_steps_that_are_all_alike_scale_what_was_calibrated(slower: float) -> None:
    """A batch's steps: without a prior all of it was cost per step, none per token."""
    rng, fit = random.Random(3), calibrated()
    for _ in range(100):
        tokens, start = rng.randrange(1_000, 1_048), rng.randrange(0, 40)
        seconds = TRUE_COST.causal_seconds(start, tokens) * slower * rng.uniform(0.9, 1.1)
        fit.add(tokens, causal_pairs(start, tokens), seconds)
    cost = fit.cost
    assert cost is not None
    for tokens in (40, 148, 512, 1_024):
        want = slower * TRUE_COST.causal_seconds(0, tokens)
        assert cost.causal_seconds(0, tokens) == pytest.approx(want, rel=0.2)


def test_steps_that_differ_replace_what_was_calibrated() -> None:
    fit, want = calibrated(), StepCost(per_token_s=5e-5, per_pair_s=1e-6, per_step_s=0.03)
    for start, tokens in ((0, 64), (0, 512), (1_000, 512), (4_000, 256), (2_000, 32)) * 4:
        fit.add(tokens, causal_pairs(start, tokens), want.causal_seconds(start, tokens))
    assert fit.cost is not None
    for start, tokens in ((0, 100), (2_000, 300)):
        seconds = fit.cost.causal_seconds(start, tokens)
        assert seconds == pytest.approx(want.causal_seconds(start, tokens), rel=0.15)


def test_short_steps_that_loads_slow_down_do_not_make_tokens_free() -> None:
    fit = calibrated()
    for _ in range(20):
        fit.add(20, causal_pairs(192, 20), 0.012)  # Beside threads that load.
        fit.add(212, causal_pairs(0, 212), 0.010)
    assert fit.cost is not None
    scale = fit.cost.causal_seconds(0, 212) / TRUE_COST.causal_seconds(0, 212)
    assert fit.cost.per_token_s > 0.1 * scale * TRUE_COST.per_token_s


def test_what_was_calibrated_is_believed_before_the_first_step() -> None:
    fit = calibrated()
    assert fit.cost is not None
    assert fit.cost.causal_seconds(100, 50) == pytest.approx(TRUE_COST.causal_seconds(100, 50))


@pytest.mark.parametrize(
    "steps",
    [
        [(1, 1.0, 0.124)],
        [(1, 1.0, 0.088), (8, 36.0, 0.003)],
        [(1, 1.0, 0.002), (8, 36.0, 0.029), (64, 2_080.0, 0.289)],
    ],
)
def test_short_steps_of_a_busy_machine_don_t_foretell_ages(
    steps: list[tuple[int, float, float]],
) -> None:
    """Cost per pair of tokens once said a day for a batch of 200 rows."""
    fit = StepCostFit()
    fit.calibrate(steps)
    assert fit.cost is not None
    longest, _, seconds = steps[-1]
    assert 0.0 < fit.cost.causal_seconds(0, 1_024) <= 1.5 * seconds * 1_024 / longest + 0.2


def test_a_fit_that_is_rescaled_keeps_its_proportions_with_and_without_steps() -> None:
    fit = calibrated()
    fit.rescale(0.5)
    assert fit.cost is not None and fit.scale == 0.5
    assert fit.cost.causal_seconds(100, 50) == pytest.approx(TRUE_COST.causal_seconds(100, 50) / 2)
    for start, tokens in ((0, 64), (0, 512), (1_000, 512), (4_000, 256), (2_000, 32)):
        fit.add(tokens, causal_pairs(start, tokens), TRUE_COST.causal_seconds(start, tokens))
    fitted = fit.cost
    assert fitted is not None
    fit.rescale(3.0)
    assert fit.cost is not None and fit.scale == 1.5
    for start, tokens in ((0, 100), (2_000, 300)):
        seconds = fit.cost.causal_seconds(start, tokens)
        assert seconds == pytest.approx(3 * fitted.causal_seconds(start, tokens), rel=1e-6)


def test_a_batch_of_short_rests_tells_the_cost_per_prompt() -> None:
    """Taken for cost per token, it would make computing a whole prompt look eight times as dear."""
    want = StepCost(per_token_s=5e-5, per_pair_s=1e-7, per_step_s=0.001, per_sequence_s=0.0015)
    fit, rng = StepCostFit(), random.Random(4)
    shapes = ((1, 1), (8, 1), (64, 1), (64, 8), (512, 1), (512, 8))
    fit.calibrate([_step(want, n, prompts) for n, prompts in shapes])
    for _ in range(100):
        prompts = rng.randrange(24, 32)
        tokens, pairs, seconds, _ = _step(want, 20 * prompts, prompts, start=480)
        fit.add(tokens, pairs, 2 * seconds * rng.uniform(0.9, 1.1), prompts)  # Half as fast now.
    assert fit.cost is not None
    assert fit.cost.causal_seconds(0, 500) == pytest.approx(2 * want.causal_seconds(0, 500), 0.2)
    tokens, pairs, seconds, prompts = _step(want, 400, 20, start=100)
    assert fit.cost.seconds(tokens, pairs, sequences=prompts) == pytest.approx(2 * seconds, 0.2)


def _step(
    cost: StepCost, tokens: int, prompts: int, *, start: int = 0
) -> tuple[int, float, float, int]:
    pairs = prompts * causal_pairs(start, tokens // prompts)
    return tokens, pairs, cost.seconds(tokens, pairs, sequences=prompts), prompts
