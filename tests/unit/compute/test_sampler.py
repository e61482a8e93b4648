"""Choosing tokens: greedy, nucleus, seeds, and logits that are not numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from tests.fix_model import make_request
from tierkv.compute.batching.sampler import Draw, Sampler, request_seed

LOGITS = torch.tensor([[0.1, 2.0, 1.9, -3.0]])


def draws(count: int, temperature: float, top_p: float = 1.0) -> Counter:
    sampler = Sampler()
    return Counter(
        sampler.sample(LOGITS, [Draw(temperature, top_p, seed=11, index=i)])[0]
        for i in range(count)
    )


def test_greedy_takes_the_largest_and_ignores_the_seed() -> None:
    assert draws(20, 0.0) == {1: 20}


def test_sampling_follows_the_distribution() -> None:
    got = draws(2_000, 1.0)
    want = torch.softmax(LOGITS[0], -1) * 2_000
    for token in range(4):
        assert abs(got[token] - float(want[token])) < 100  # More than four standard deviations.


def test_top_p_cuts_the_tail_and_never_everything() -> None:
    assert set(draws(300, 1.0, top_p=0.8)) == {1, 2}
    assert set(draws(50, 1.0, top_p=0.01)) == {1}


def test_a_draw_depends_on_seed_and_index_not_on_batch_mates() -> None:
    alone = [Sampler().sample(LOGITS, [Draw(1.0, 1.0, 5, i)])[0] for i in range(30)]
    both = Sampler()
    mixed = [
        both.sample(LOGITS.repeat(2, 1), [Draw(1.5, 0.9, 77, 3 * i), Draw(1.0, 1.0, 5, i)])[1]
        for i in range(30)
    ]
    assert alone == mixed
    assert alone != [Sampler().sample(LOGITS, [Draw(1.0, 1.0, 6, i)])[0] for i in range(30)]


def test_logits_that_are_not_finite_give_none_for_that_row_only() -> None:
    rows = LOGITS.repeat(3, 1)
    rows[0, 2], rows[2, 0] = float("nan"), float("inf")
    plan = [Draw(0.0, 1.0, 0, 0), Draw(0.0, 1.0, 0, 0), Draw(1.0, 1.0, 0, 0)]
    assert Sampler().sample(rows, plan) == [None, 1, None]


def test_what_is_not_allowed_is_never_chosen() -> None:
    allowed = np.array([True, False, False, True])
    rows = LOGITS.repeat(3, 1)
    for index in range(300):
        held = Draw(1.0, 1.0, 3, index, allowed)
        greedy, drawn, free = Sampler().sample(
            rows, [Draw(0.0, 1.0, 3, index, allowed), held, Draw(0.0, 1.0, 3, index)]
        )
        assert greedy == 0 and drawn in (0, 3) and free == 1
    assert torch.equal(rows, LOGITS.repeat(3, 1))


def test_rounding_never_lets_the_impossible_in() -> None:
    """With one token left all others have no chance, and stand behind it in every order."""
    logits = torch.full((1, 4), -200.0)
    logits[0, 2] = 0.0
    got = {Sampler().sample(logits, [Draw(1.0, 1.0, 1, i)])[0] for i in range(2_000)}
    assert got == {2}


def test_requests_without_a_seed_draw_differently() -> None:
    one, two = make_request([1]), make_request([1])
    assert request_seed(one) != request_seed(two)
    assert request_seed(one) == request_seed(one)
    assert request_seed(make_request([1], sampling={"seed": 9})) == 9
