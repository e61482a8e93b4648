"""The walk to the likeliest label against scoring every token of every label."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.dbfront.generation.labels import LabelWalk, Question, needs_end

ENDS = (7, 8)
SPELLINGS = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple),
    min_size=1,
    max_size=12,
    unique=True,
)


class Model:
    """Chances of nine tokens behind every prefix, the same whenever they are asked for."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self._seed, self._sharpness = seed, sharpness
        self.asked: list[Question] = []

    def logs(self, prefix: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{self._seed} {prefix}")
        weights = [draw.random() ** self._sharpness + 1e-12 for _ in range(9)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def run(self, walk: LabelWalk) -> LabelWalk:
        while (question := walk.question) is not None:
            self.asked.append(question)
            logs = self.logs(question.prefix)
            walk.answer([logs[token] for token in question.token_ids])
        return walk


def brute(model: Model, spellings: list[tuple[int, ...]]) -> list[float]:
    """Score every label's full sequence, each step among the ways that labels go on there."""
    paths = [(*spelling, "end") for spelling in spellings]
    chances = []
    for path in paths:
        chance = 1.0
        for depth in range(len(path)):
            prefix = path[:depth]
            ways = {other[depth] for other in paths if other[:depth] == prefix}
            logs = model.logs(prefix)
            weight = {
                way: sum(math.exp(logs[end]) for end in ENDS)
                if way == "end"
                else math.exp(logs[way])
                for way in ways
            }
            chance *= weight[path[depth]] / sum(weight.values())
        chances.append(chance)
    return chances


@given(SPELLINGS, st.integers(0, 1000), st.sampled_from([0.5, 2.0, 8.0]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_best_label_is_the_one_that_scoring_all_of_them_finds(
    spellings: list[tuple[int, ...]], seed: int, sharpness: float
) -> None:
    model = Model(seed, sharpness)
    walk = model.run(LabelWalk(spellings, ENDS))
    want = brute(model, spellings)
    assert math.isclose(math.fsum(walk.chances), 1.0, rel_tol=1e-9)
    assert math.isclose(want[walk.best], max(want), rel_tol=1e-9)
    assert math.isclose(walk.chances[walk.best], max(want), rel_tol=1e-9)
    assert max(walk.chances) == walk.chances[walk.best]
    # What was not asked lies behind forks; labels behind one fork have its chance in common.
    for chance, exact in zip(walk.chances, want, strict=True):
        assert chance <= max(want) * (1 + 1e-9)
        assert exact <= max(want) * (1 + 1e-9)


@given(SPELLINGS, st.integers(0, 1000))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_each_fork_is_asked_at_most_once_and_only_where_labels_part(
    spellings: list[tuple[int, ...]], seed: int
) -> None:
    model = Model(seed, 0.5)
    model.run(LabelWalk(spellings, ENDS))
    prefixes = [question.prefix for question in model.asked]
    assert len(set(prefixes)) == len(prefixes) < len(spellings)
    for question in model.asked:
        ways = {s[len(question.prefix) :][:1] for s in spellings if _begins(s, question.prefix)}
        assert len(ways) > 1
        assert set(question.token_ids) == {way[0] for way in ways if way} | (
            set(ENDS) if () in ways else set()
        )


def _begins(spelling: tuple[int, ...], prefix: tuple[int, ...]) -> bool:
    return spelling[: len(prefix)] == prefix


@given(SPELLINGS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_an_end_is_needed_only_where_a_label_begins_another(
    spellings: list[tuple[int, ...]],
) -> None:
    begun = any(a != b and _begins(b, a) for a in spellings for b in spellings)
    assert needs_end(spellings) == begun
    if not begun:
        Model(1, 2.0).run(LabelWalk(spellings))


def test_labels_with_different_first_tokens_take_one_question() -> None:
    walk = LabelWalk([(1, 5), (2,), (3, 1, 1)])
    assert walk.question == Question((), (1, 2, 3))
    walk.answer([math.log(0.1), math.log(0.3), math.log(0.1)])
    assert walk.question is None and walk.best == 1
    assert walk.chances == pytest.approx((0.2, 0.6, 0.2))


def test_what_cannot_win_is_not_asked_and_shares_evenly() -> None:
    walk = LabelWalk([(1, 5), (1, 6), (2,)])
    walk.answer([math.log(0.2), math.log(0.8)])
    assert walk.question is None and walk.best == 2
    assert walk.chances == pytest.approx((0.1, 0.1, 0.8))


def test_a_shared_beginning_is_not_asked() -> None:
    walk = LabelWalk([(1, 2, 3), (1, 2, 4)])
    assert walk.question == Question((1, 2), (3, 4))


def test_one_label_needs_no_question() -> None:
    walk = LabelWalk([(1, 2, 3)])
    assert (walk.question, walk.best, walk.chances) == (None, 0, (1.0,))


def test_of_equal_labels_the_first_wins() -> None:
    walk = LabelWalk([(3,), (1,), (2,)])
    walk.answer([-5.0, -5.0, -5.0])
    assert walk.best == 0


def test_a_thousand_labels_that_begin_each_other() -> None:
    walk = LabelWalk([(1,) * length for length in range(1, 1_025)], ENDS)
    while walk.question is not None:
        walk.answer([-1.0] * len(walk.question.token_ids))
    assert math.isclose(math.fsum(walk.chances), 1.0)
