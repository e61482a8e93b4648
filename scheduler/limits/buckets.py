"""Buckets of requests and tokens: pure arithmetic with ``now`` as an argument, and the contract of
the meters that keep buckets for a front or for several.

A bucket is one number: the moment when it will be full again. Taking an amount moves the moment
``amount / per_s`` later; a taker waits until the moment lies at most ``burst / per_s`` ahead. Ref:
the generic cell rate algorithm in its virtual-scheduling form, ITU-T I.371, annex A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.scheduler.limits.place_leases import PlaceLeases


@dataclass(frozen=True, slots=True)
class Charge:
    """An amount to take from a bucket.

    Attributes:
        bucket: name of the bucket.
        amount: requests or tokens.
        per_s: rate at which the bucket fills; more than 0.
        burst: what a full bucket has; a larger amount is taken from a full bucket, into debt.
    """

    bucket: str
    amount: float
    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of taking.

    Attributes:
        wait_s: when what was taken may be used; if refused, when to try again.
        refused: number of the charge with too long a wait; -1: all are taken.
    """

    wait_s: float = 0.0
    refused: int = -1


def full_at(full_s: float, charge: Charge, now: float) -> tuple[float, float]:
    """Return when a bucket will be full after a charge, and how long the taker waits.

    Args:
        full_s: when the bucket would be full without the charge.
        charge: the charge.
        now: current time.
    """
    full_s = max(full_s, now)
    needed = min(charge.amount, charge.burst) - charge.burst
    return full_s + charge.amount / charge.per_s, max(0.0, full_s + needed / charge.per_s - now)


class Buckets:
    """All buckets of one process, by name. A bucket that is full is forgotten."""

    def __init__(self) -> None:
        self._full_s: dict[str, float] = {}
        self._forget_at = 1_024

    def take(self, charges: Sequence[Charge], patience_s: float, now: float) -> Taken:
        """Take all charges, or no charge if the longest wait exceeds ``patience_s``.

        Each bucket is named at most once.
        """
        after = [full_at(self._full_s.get(each.bucket, now), each, now) for each in charges]
        wait_s = max((wait_s for _, wait_s in after), default=0.0)
        if wait_s > patience_s:
            return Taken(wait_s, max(range(len(after)), key=lambda at: after[at][1]))
        for charge, (full_s, _) in zip(charges, after, strict=True):
            self._full_s[charge.bucket] = full_s
        if len(self._full_s) > self._forget_at:
            self._full_s = {name: full_s for name, full_s in self._full_s.items() if full_s > now}
            self._forget_at = max(1_024, 2 * len(self._full_s))
        return Taken(wait_s)

    def give_back(self, charges: Sequence[Charge]) -> None:
        """Put unused amounts back."""
        for charge in charges:
            if charge.bucket in self._full_s:
                self._full_s[charge.bucket] -= charge.amount / charge.per_s

    def left(self, charge: Charge, now: float) -> float:
        """Return what a bucket has now; negative in debt. The charge's amount does not matter."""
        ahead_s = max(0.0, self._full_s.get(charge.bucket, now) - now)
        return charge.burst - ahead_s * charge.per_s

    def moments(self) -> dict[str, float]:
        """Return when each bucket will be full, to be kept in a file."""
        return dict(self._full_s)

    def restore(self, moments: dict[str, float]) -> None:
        """Continue from kept moments."""
        self._full_s = dict(moments)


class LimitMeter(Protocol):
    """Takes from buckets. Used from one event loop.

    1. ``take`` takes all charges or none: none if the longest wait exceeds
       ``patience_s``. It sleeps for nobody: the caller waits.
    2. ``give_back`` puts back unused amounts; a failure is only logged.
    3. ``left`` returns what each charge's bucket has now, negative in debt.
    4. ``take`` and ``left`` raise SharedStateLostError without an answer; whether anything was
       taken is then unknown.
    5. ``places`` counts calls in flight over all fronts; None: each process counts its own.
    """

    places: PlaceLeases | None

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken: ...

    async def give_back(self, charges: Sequence[Charge]) -> None: ...

    async def left(self, charges: Sequence[Charge]) -> list[float]: ...

    async def close(self) -> None: ...
