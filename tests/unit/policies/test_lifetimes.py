"""What waits teach: exact small cases of the estimator."""

from __future__ import annotations

import pytest

from tierkv.policies.lifetimes import (
    BUCKETS,
    EDGES,
    GAP_KINDS,
    RUN_KINDS,
    Lifetimes,
    PromptRun,
    bucket_of,
    gap_kind,
    run_kind,
)

KIND = 8  # A multiple of RUN_KINDS; a run without new blocks adds nothing.
OTHER_FAMILY = KIND + GAP_KINDS * RUN_KINDS


def learned(ended: int, open_for_s: float = 0.0, open_waits: int = 0) -> Lifetimes:
    """Waits of 10 seconds that ended in a use, and others that are still open."""
    lifetimes = Lifetimes()
    waits = [lifetimes.start(KIND, PromptRun(1), 0.0) for _ in range(ended + open_waits)]
    lifetimes.advance(10.0)
    for wait in waits[:ended]:
        lifetimes.end_in_use(wait)
    lifetimes.advance(open_for_s)
    return lifetimes


def test_ages_fall_into_growing_buckets() -> None:
    assert [bucket_of(age) for age in (0.0, 0.99, 1.0, 1.89, 1.91, 1e12)] == [0, 0, 1, 1, 2, 25]
    assert all(bucket_of(edge) == number for number, edge in enumerate(EDGES))


def test_nothing_is_worth_anything_before_something_was_learned() -> None:
    assert [Lifetimes().value(KIND, edge) for edge in EDGES] == [0.0] * BUCKETS


def test_what_is_used_within_seconds_is_worth_its_rate() -> None:
    value = learned(ended=400).value(KIND, 0.0)
    assert value == pytest.approx(1 / 10, rel=0.25), "one use in about ten seconds"


def test_an_open_wait_counts_for_as_long_as_it_lasts() -> None:
    aged = learned(ended=100, open_waits=300, open_for_s=3600.0)
    assert aged.value(KIND, 600.0) < aged.value(KIND, 0.0) / 10, (
        "who did not come within minutes never did"
    )


def test_a_wait_that_was_given_up_counts_for_its_time_only() -> None:
    lifetimes = Lifetimes()
    waits = [lifetimes.start(KIND, PromptRun(1), 0.0) for _ in range(200)]
    lifetimes.advance(2.0)
    for wait in waits[:100]:
        lifetimes.give_up(wait)
    lifetimes.advance(10.0)
    for wait in waits[100:]:
        lifetimes.end_in_use(wait)
    assert lifetimes.value(KIND, 5.0) > 0.1, "all that were seen so long were used"


def test_an_unknown_kind_takes_the_average_and_its_odds() -> None:
    lifetimes = learned(ended=300, open_waits=300, open_for_s=3600.0)
    lifetimes.start(OTHER_FAMILY, PromptRun(1), 3600.0, odds=0.1)
    lifetimes.advance(3602.0)
    assert 0.0 < lifetimes.value(OTHER_FAMILY, 0.0) < lifetimes.value(KIND, 0.0) / 2


def test_a_kind_takes_its_familys_experience_until_it_has_its_own() -> None:
    lifetimes = learned(ended=600)
    for _ in range(600):  # Another family, which is never used again, pulls the average down.
        lifetimes.start(OTHER_FAMILY, PromptRun(1), 10.0)
    lifetimes.advance(4000.0)
    sibling = KIND + RUN_KINDS
    assert lifetimes.value(sibling, 0.0) > 5 * lifetimes.value(OTHER_FAMILY, 0.0)
    for _ in range(2000):
        lifetimes.start(sibling, PromptRun(1), 4000.0)
    lifetimes.advance(8000.0)
    assert lifetimes.value(sibling, 0.0) < lifetimes.value(KIND, 0.0) / 3


def test_gaps_have_kinds() -> None:
    assert [gap_kind(gap) for gap in (None, 0.0, 3.9, 4.0, 100.0, 599.0, 1e9)] == [
        0, 1, 1, 2, 3, 4, GAP_KINDS - 1,
    ]  # fmt: skip


def test_the_kind_is_settled_when_the_run_is_complete() -> None:
    lifetimes, run = Lifetimes(), PromptRun(1)
    wait = lifetimes.start(KIND, run, 0.0)
    run.fresh = 100
    lifetimes.advance(1.5)
    run.fresh = 0
    assert wait.kind == KIND + run_kind(100) == KIND + 3


def test_blocks_of_one_run_and_kind_wait_together() -> None:
    lifetimes, run = Lifetimes(), PromptRun(1)
    first, second = (lifetimes.start(KIND, run, 0.0) for _ in range(2))
    assert first is second and first.waiting == 2
    assert lifetimes.start(KIND + 4, run, 0.0) is not first
    assert lifetimes.start(KIND, PromptRun(2), 0.0) is not first
    assert lifetimes.start(KIND, run, 0.5) is not first


def test_nobody_looks_after_the_last_bucket() -> None:
    lifetimes = Lifetimes()
    wait = lifetimes.start(KIND, PromptRun(1), 0.0)
    for age in (*EDGES, 1e9):
        lifetimes.advance(age)
    assert wait.bucket == -1 and not any(lifetimes._cohorts)
    lifetimes.end_in_use(wait)
    assert lifetimes.value(KIND, 0.0) == 0.0, "nobody was seen to use it in time"
