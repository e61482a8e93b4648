"""Guesses from what a sequence repeats, against a search for it; and the pace of guessing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.compute.engine.drafts import NgramIndex, Pace, verified


def naive(tokens: list[int], most: int) -> tuple[int, ...]:
    """Look for the latest earlier run of three, else two, equal tokens; copy on from there."""
    for size in (3, 2):
        last = tokens[-size:]
        for after in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[after - size : after] == last:
                copy = list(tokens)
                for at in range(most):
                    copy.append(copy[after + at])
                return tuple(copy[len(tokens) :])
    return ()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=20),
)
def test_guesses_equal_those_of_a_search(tokens, steps) -> None:
    index, length = NgramIndex(), 0
    room = np.zeros(len(tokens) + 5, dtype=np.int64)
    room[: len(tokens)] = tokens
    for grown, most in steps:
        length = min(len(tokens), length + grown)
        assert index.guess(room, length, most) == naive(tokens[:length], most)


def test_the_latest_and_longest_run_counts() -> None:
    tokens = np.array([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert NgramIndex().guess(tokens, 11, 4) == (7, 9, 2, 3)
    tokens[8] = 5
    assert NgramIndex().guess(tokens, 11, 2) == (8, 5)
    tokens[9] = 5
    assert NgramIndex().guess(tokens, 11, 2) == ()


def test_what_repeats_repeats_again() -> None:
    assert NgramIndex().guess(np.array([4, 5, 6, 4, 5, 6]), 6, 8) == (4, 5, 6, 4, 5, 6, 4, 5)


def test_ids_of_any_size_give_some_guess_and_no_error() -> None:
    big = (1 << 40) + 3
    assert NgramIndex().guess(np.array([big, big, 7, big, big]), 5, 1) == (7,)


CHOICES = st.one_of(st.integers(0, 2), st.none())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    guess=st.lists(st.integers(0, 2), max_size=5),
    chosen=st.lists(CHOICES, min_size=6, max_size=6),
)
def test_verified_tokens_are_those_of_one_by_one(guess, chosen) -> None:
    want: list[int] = []
    for at, token in enumerate(chosen[: len(guess) + 1]):
        if token is None:
            break
        want.append(token)
        if at < len(guess) and guess[at] != token:
            break
    assert verified(guess, chosen[: len(guess) + 1]) == tuple(want)


def test_nothing_chosen_gives_nothing() -> None:
    assert verified((), []) == () and verified((1,), [None, 2]) == ()


def test_right_guesses_make_it_bolder() -> None:
    pace = Pace(8)
    assert pace.next_guess(0.1) == 4
    pace.checked(4, 4)
    assert pace.next_guess(0.1) == 8
    pace.checked(8, 8)
    assert pace.next_guess(0.9) == 8
    pace.checked(8, 3)
    assert pace.next_guess(0.1) == 3


def test_wrong_guesses_become_rare() -> None:
    pace, guesses = Pace(8), []
    for step in range(2_000):
        if guess := pace.next_guess(0.1):
            guesses.append(step)
            pace.checked(guess, 0)
        else:
            pace.passed(1)
    gaps = np.diff(guesses)
    assert len(guesses) < 16 and gaps[0] == 17 and gaps[-1] == 257
    assert pace.guess == 2


def test_one_right_guess_after_many_wrong_ones_is_enough_to_go_on() -> None:
    pace = Pace(8)
    for _ in range(4):
        pace.checked(2, 0)
        pace.passed(1 << 10)
    guess = pace.next_guess(0.1)
    pace.checked(guess, guess)
    pace.checked(pace.next_guess(0.1), 0)
    assert pace.pause == 16


def test_beside_many_others_only_sure_guesses_are_made() -> None:
    pace = Pace(8)
    assert pace.next_guess(0.9) == 0 and pace.pause == 0
    assert (pace.next_guess(0.1), pace.next_guess(0.4)) == (4, 2), "short, to try"
    pace.checked(4, 4)
    pace.checked(8, 8)
    assert pace.next_guess(0.9) == 8
    pace.checked(8, 1)
    assert pace.next_guess(0.6) == 0 and pace.pause == 16
    pace.passed(16)
    assert pace.next_guess(0.6) > 0
