"""Buckets against a plain account of what was taken and when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.limits.buckets import Buckets, Charge, Taken

EPSILON = 1e-6


@dataclass
class Account:
    """What a bucket has, filled step by step instead of by one moment."""

    amount: float
    at: float = 0.0

    def fill(self, charge: Charge, now: float) -> None:
        self.amount = min(charge.burst, self.amount + (now - self.at) * charge.per_s)
        self.at = now


STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 10.0),  # pause before
        st.floats(0.1, 20.0),  # amount
        st.sampled_from([0.0, 0.0, 1.0, 100.0]),  # patience
        st.booleans(),  # give it back
    ),
    max_size=60,
)


@given(per_s=st.floats(0.01, 50.0), burst=st.floats(1.0, 30.0), steps=STEPS)
def test_a_bucket_is_an_account_that_fills(
    per_s: float, burst: float, steps: list[tuple[float, float, float, bool]]
) -> None:
    buckets, account, now = Buckets(), Account(burst), 0.0
    for pause_s, amount, patience_s, back in steps:
        now += pause_s
        charge = Charge("b", amount, per_s, burst)
        account.fill(charge, now)
        lacking = min(amount, burst) - account.amount
        wait_s = max(0.0, lacking / per_s)
        taken = buckets.take([charge], patience_s, now)
        assert abs(taken.wait_s - wait_s) < EPSILON * (1.0 + wait_s)
        if abs(wait_s - patience_s) > EPSILON:
            assert (taken.refused == -1) == (wait_s <= patience_s)
        if taken.refused == -1:
            account.amount -= amount
            if back:
                buckets.give_back([charge])
                account.amount = min(burst, account.amount + amount)
        assert abs(buckets.left(charge, now) - account.amount) < EPSILON * (1.0 + burst + amount)


@given(steps=STEPS)
def test_no_window_admits_more_than_a_burst_and_the_rate(
    steps: list[tuple[float, float, float, bool]],
) -> None:
    """Those who do not wait, and take no more than a burst at once, never exceed the limit."""
    buckets, now = Buckets(), 0.0
    admitted: list[tuple[float, float]] = []
    for pause_s, amount, _, _ in steps:
        now += pause_s
        amount = min(amount, 5.0)
        if buckets.take([Charge("b", amount, 2.0, 5.0)], 0.0, now) == Taken():
            admitted.append((now, amount))
    for first, (since, _) in enumerate(admitted):
        total = 0.0
        for at, amount in admitted[first:]:
            total += amount
            assert total <= 5.0 + 2.0 * (at - since) + EPSILON


def test_full_buckets_are_forgotten() -> None:
    buckets = Buckets()
    for number in range(5_000):
        buckets.take([Charge(f"b{number}", 1, 1.0, 1.0)], 0.0, 2.0 * number)
    assert len(buckets.moments()) < 1_100
