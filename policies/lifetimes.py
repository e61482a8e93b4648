"""How long blocks of each kind go without a use, learned as they live, and what keeping one pays.

A pure estimator that policies/learned.py feeds: a wait starts at a use and ends at the next one, or
is given up; blocks of one kind that one request used wait together, in a cohort. Waits that are not
over count for as long as they have lasted (Kaplan and Meier's estimator over ages in buckets), so
what is never used again is learned as soon as it gets old.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

BUCKETS: Final = 26
"""Ages below 1 s, then to 1.9 s, 3.6 s ... 57 days; older ones count as the last."""

_FIRST_EDGE_S: Final = 1.0
_GROWTH: Final = 1.9
EDGES: Final = (0.0, *(_FIRST_EDGE_S * _GROWTH**i for i in range(BUCKETS - 1)))
_FORGOTTEN_S: Final = EDGES[-1] * _GROWTH
_WIDTHS: Final = tuple(after - before for before, after in pairwise(EDGES))

_PRIOR_WAITS: Final = 20.0
"""How many waits' weight the average over all kinds has in the estimate of each."""

_REFRESH_SHARE: Final = 0.02
_MIN_REFRESH: Final = 8
"""A kind's values are computed again after so many new facts: a share of what it knew, at least."""

_MOST_FACTS: Final = 50_000.0
"""Facts of a kind before all are halved: what was learned fades, and traffic may change."""


def bucket_of(age_s: float) -> int:
    """Return the bucket of an age."""
    return bisect_right(EDGES, age_s) - 1 if age_s >= _FIRST_EDGE_S else 0


RUN_KINDS: Final = 4
"""Kinds of runs by length; a block's kind is a multiple of this plus its run's."""


class Run:
    """What one request used, and how much of that was new; it grows until the prompt ends.

    Attributes:
        number: of the run; later ones have higher numbers.
        fresh: blocks that nobody had used before.
        tip: the block it has reached.
        cohort: of the last ones that began to wait.
    """

    __slots__ = ("cohort", "fresh", "number", "tip")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fresh = 0
        self.tip: object = None
        self.cohort: Cohort | None = None

    @property
    def kind(self) -> int:
        """A short addition to a long prompt is another turn; a long one often stays alone."""
        return run_kind(self.fresh)


_RUN_EDGES: Final = (4, 9, 33)


def run_kind(fresh: int) -> int:
    """Return the kind of a run with so many new blocks, below RUN_KINDS."""
    return bisect_right(_RUN_EDGES, fresh)


class Cohort:
    """Blocks of one kind that began to wait for their next use together.

    Attributes:
        kind: of the blocks; while they are in the first bucket, without that of their run.
        run: that they were part of.
        started: in seconds.
        waiting: how many still wait and are watched.
        bucket: the age they have reached; -1 when nobody looks any more.
    """

    __slots__ = ("bucket", "kind", "run", "started", "waiting")

    def __init__(self, kind: int, run: Run, started: float) -> None:
        self.kind = kind
        self.run = run
        self.started = started
        self.waiting = 0
        self.bucket = 0


@dataclass(slots=True)
class _Kind:
    """What is known about one kind of block.

    Attributes:
        reached: waits that reached each bucket.
        used: of those, how many ended in a use in that bucket.
        hazards: per bucket but the last, the chance of a use in it of those that reach it.
        values: per bucket of age, uses per second held, at the best horizon from there; negative:
            not computed yet.
        facts: reached and used ever counted (halved with them).
        due: the number of facts at which the values are computed again.
        odds: factor on what all kinds together say, while this one knows little.
    """

    odds: float = 1.0
    reached: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    used: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    hazards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    facts: float = 0.0
    due: float = 0.0

    def halve(self) -> None:
        """Let what was learned so far count half."""
        self.reached = [count / 2 for count in self.reached]
        self.used = [count / 2 for count in self.used]
        self.facts /= 2


class Lifetimes:
    """Learns per kind. Kinds are small integers.

    Attributes:
        _kinds: by number.
        _odds: by number without the run's, where they are not even.
        _all: the sum of all kinds, which says what is not known yet about one.
        _cohorts: by bucket of their age, oldest first.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._odds: dict[int, float] = {}
        self._all = _Kind()
        self._cohorts: tuple[deque[Cohort], ...] = tuple(deque() for _ in range(BUCKETS))

    def start(self, kind: int, run: Run, now: float, odds: float = 1.0) -> Cohort:
        """Begin a wait; the answer goes to ``end_in_use`` or ``give_up``, once.

        Args:
            kind: of the block without that of its run, which is added when that is complete.
            run: that the block is part of.
            now: of the use.
            odds: on what is usual, of kinds that are not known yet.
        """
        cohort = run.cohort
        if cohort is None or cohort.kind != kind or cohort.started != now or cohort.bucket:
            cohort = run.cohort = Cohort(kind, run, now)
            self._cohorts[0].append(cohort)
            if odds != 1.0 and kind not in self._odds:
                self._odds[kind] = odds
        cohort.waiting += 1
        return cohort

    def end_in_use(self, cohort: Cohort) -> None:
        """Note that one block of a cohort was used."""
        bucket = cohort.bucket
        if bucket < 0:
            return
        cohort.waiting -= 1
        if bucket:
            known = self._kind(cohort.kind)
        else:
            known = self._kind(cohort.kind + cohort.run.kind)
            self._reached(known, 0, 1)
        known.used[bucket] += 1.0
        known.facts += 1.0
        self._all.used[bucket] += 1.0

    def give_up(self, cohort: Cohort) -> None:
        """Stop watching one block of a cohort; it counts for the ages it has reached."""
        cohort.waiting -= 1

    def advance(self, now: float) -> None:
        """Let those who wait grow older; amortised O(1) per cohort and bucket."""
        for bucket, cohorts in enumerate(self._cohorts[:-1]):
            until = now - EDGES[bucket + 1]
            while cohorts and cohorts[0].started <= until:
                cohort = cohorts.popleft()
                cohort.run.cohort = None  # Nobody can join it now; no ring is left to collect.
                if not cohort.waiting:
                    cohort.bucket = -1
                    continue
                if not bucket:
                    cohort.kind += cohort.run.kind
                    self._reached(self._kind(cohort.kind), 0, cohort.waiting)
                cohort.bucket = bucket + 1
                self._reached(self._kind(cohort.kind), bucket + 1, cohort.waiting)
                self._cohorts[bucket + 1].append(cohort)
        while self._cohorts[-1] and self._cohorts[-1][0].started <= now - _FORGOTTEN_S:
            self._cohorts[-1].popleft().bucket = -1

    def value(self, kind: int, age_s: float) -> float:
        """Return uses per second held of a block of that age; 0.0 while nothing is known at all."""
        known = self._kinds.get(kind) or self._kind(kind)
        if known.facts >= known.due:
            self._refresh(known)
        bucket = bucket_of(age_s)
        value = known.values[bucket]
        if value < 0.0:
            value = known.values[bucket] = _value(known.hazards, bucket)
        return value

    def _kind(self, kind: int) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            odds = self._odds.get(kind - kind % RUN_KINDS, 1.0)
            known = self._kinds[kind] = _Kind(odds)
        return known

    def _reached(self, known: _Kind, bucket: int, count: int) -> None:
        known.reached[bucket] += count
        known.facts += count
        self._all.reached[bucket] += count
        self._all.facts += count

    def _refresh(self, known: _Kind) -> None:
        for fading in (known, self._all):
            if fading.facts > _MOST_FACTS:
                fading.halve()
        known.due = known.facts + max(_MIN_REFRESH, known.facts * _REFRESH_SHARE)
        known.hazards = [self._hazard(known, bucket) for bucket in range(BUCKETS - 1)]
        known.values = [-1.0] * BUCKETS

    def _hazard(self, known: _Kind, bucket: int) -> float:
        """Return the chance that a block which reached a bucket is used in it."""
        reached, used = self._all.reached[bucket], self._all.used[bucket]
        usual = min(1.0, known.odds * used / reached) if reached else 0.0
        waits = known.reached[bucket] + _PRIOR_WAITS
        return min(1.0, (known.used[bucket] + _PRIOR_WAITS * usual) / waits)


def _value(hazards: list[float], age: int) -> float:
    """Return the best over horizons of P(used by then) / E[time held], from a bucket of age on."""
    alive, used, held, best = 1.0, 0.0, 0.0, 0.0
    for hazard, width in zip(hazards[age:], _WIDTHS[age:], strict=True):
        ends = alive * hazard
        used += ends
        held += (alive - ends / 2) * width
        alive -= ends
        if used > best * held:
            best = used / held
    return best
