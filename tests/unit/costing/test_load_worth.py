"""Loads that take longer than computing are left alone, and tried again now and then."""

from __future__ import annotations

import pytest

from tierkv.costing.load_worth import LoadCost, LoadWorth, TimedWorth

TOKENS = 1_024


def measured(*, load_s: float, step_s: float, token_s: float) -> LoadWorth:
    worth = LoadWorth()
    worth.computed(1, step_s)
    worth.computed(TOKENS, step_s + token_s * TOKENS)
    worth.load.add(TOKENS, load_s)
    return worth


def test_what_was_not_measured_is_loaded() -> None:
    worth = LoadWorth()
    assert worth.pays(TOKENS)
    worth.computed(TOKENS, 0.001)
    assert worth.pays(TOKENS)
    assert worth.pays_to_ask(TOKENS)


def test_the_faster_way_is_taken() -> None:
    assert measured(load_s=0.010, step_s=0.002, token_s=1e-3).pays(TOKENS)
    assert not measured(load_s=0.010, step_s=0.002, token_s=1e-6).pays(TOKENS)


def test_what_every_step_costs_is_no_reason_to_load() -> None:
    worth = measured(load_s=0.010, step_s=0.050, token_s=1e-6)
    assert not worth.pays(TOKENS)


def test_one_in_sixteen_is_tried_again() -> None:
    worth = measured(load_s=0.010, step_s=0.002, token_s=1e-6)
    asked = []
    for _ in range(64):
        asked.append(worth.pays_to_ask(TOKENS))
        if asked[-1]:
            assert worth.pays(TOKENS), "the load itself is part of the probe"
            worth.begun()
    assert asked.count(True) == 4


def test_a_probe_that_finds_nothing_ends() -> None:
    worth = measured(load_s=0.010, step_s=0.002, token_s=1e-6)
    while not worth.pays_to_ask(TOKENS):
        assert not worth.pays(TOKENS)
    assert worth.pays(TOKENS)
    worth.found_nothing()
    assert not worth.pays(TOKENS), "no load is made for a probe that is over"
    asked = [worth.pays_to_ask(TOKENS) for _ in range(16)]
    assert asked.count(True) == 1


def test_a_pool_that_became_fast_is_used_again() -> None:
    worth = measured(load_s=5.0, step_s=0.002, token_s=1e-4)
    assert not worth.pays(TOKENS)
    for _ in range(16):
        worth.load.add(TOKENS, 0.002)
    assert worth.pays(TOKENS)


def test_one_long_load_is_not_believed_for_long() -> None:
    worth = measured(load_s=5.0, step_s=0.002, token_s=1e-4)
    worth.load.add(TOKENS, 0.002)
    assert worth.pays(TOKENS)


def test_asking_is_part_of_what_a_load_costs() -> None:
    worth = measured(load_s=0.010, step_s=0.002, token_s=2e-5)
    assert worth.pays_to_ask(TOKENS)
    worth.asked(0.010)
    assert not worth.pays_to_ask(TOKENS)
    assert worth.pays(TOKENS), "what was asked already costs nothing more"


def test_before_the_first_load_a_slow_answer_tells_what_loading_costs_at_least() -> None:
    worth = LoadWorth()
    worth.computed(TOKENS, 0.010)
    worth.asked(0.004)
    assert worth.pays_to_ask(TOKENS)
    assert not worth.pays_to_ask(TOKENS // 2)
    asked = [worth.pays_to_ask(TOKENS // 2) for _ in range(64)]
    assert asked.count(True) == 4, "prompts that nobody has are not asked for because of a probe"


def test_loads_of_other_sizes_are_predicted_rather_too_long() -> None:
    cost = LoadCost()
    assert cost.seconds(1) is None
    for _ in range(3):
        cost.add(1_024, 0.008)
    assert cost.seconds(128) == pytest.approx(0.008)
    assert cost.seconds(2_048) == pytest.approx(0.016)


def timed() -> tuple[TimedWorth, list[float]]:
    clock = [100.0]
    return TimedWorth(lambda: clock[0]), clock


def test_a_step_lasts_from_its_plan_or_the_end_of_the_one_before() -> None:
    timer, clock = timed()
    first, second = timer.step_begins(TOKENS), timer.step_begins(TOKENS)
    clock[0] += 1.0
    timer.step_ended(first)
    clock[0] += 1.0
    timer.step_ended(second)
    timer.load_ended(TOKENS, 1.1, whole=True)
    assert not timer.worth.pays(TOKENS), "each step took one second, not two"


def test_steps_that_teach_nothing_have_no_number() -> None:
    timer, _ = timed()
    numbers = [timer.step_begins(1) for _ in range(32)]
    assert sum(map(bool, numbers)) == 2
    assert timer.step_begins(0) == 0
    timer.step_ended(0)
    timer.step_ended(999)


def test_a_load_that_failed_at_once_is_no_fast_load() -> None:
    timer, _ = timed()
    timer.load_ended(TOKENS, 0.0, whole=True)
    timer.load_ended(TOKENS, None, whole=True)
    timer.load_ended(TOKENS, 0.001, whole=False)
    assert timer.worth.load.seconds(TOKENS) is None
    timer.load_ended(TOKENS, 5.0, whole=False)
    assert timer.worth.load.seconds(TOKENS) == 5.0


def test_a_load_costs_a_step_more() -> None:
    assert measured(load_s=0.010, step_s=0.001, token_s=2e-5).pays(TOKENS)
    assert not measured(load_s=0.010, step_s=0.011, token_s=2e-5).pays(TOKENS)


def test_steps_that_are_never_heard_of_are_forgotten() -> None:
    timer, _ = timed()
    for _ in range(1_000):
        timer.step_begins(TOKENS)
    assert len(timer._steps) <= 64
