"""Time until the next use, learned per kind of block, and the value of keeping a block.

A pure estimator fed by policies/learned.py. A wait starts at a use and ends at the next use or is
given up. Blocks of one kind in one request wait together in a cohort. Unfinished waits count for
the age reached so far (Kaplan and Meier's estimator over ages in buckets), so the estimator learns
about blocks without further use as soon as the blocks grow old.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

BUCKETS: Final = 26
"""Ages below 1 s, then to 1.9 s, 3.6 s ... 57 days; older ages count as the last bucket."""

_FIRST_EDGE_S: Final = 1.0
_GROWTH: Final = 1.9
EDGES: Final = (0.0, *(_FIRST_EDGE_S * _GROWTH**i for i in range(BUCKETS - 1)))
_FORGOTTEN_S: Final = EDGES[-1] * _GROWTH
_WIDTHS: Final = tuple(after - before for before, after in pairwise(EDGES))

_PRIOR_WAITS: Final = 100.0
"""Weight of a family's average in the estimate of each of its kinds, and of the average over all
kinds in the estimate of a family, as a number of waits. The blocks of one prompt wait together, so
this is the weight of a few prompts."""

_REFRESH_SHARE: Final = 0.02
_MIN_REFRESH: Final = 8
"""Minimum number of new facts after which a kind's values are computed again."""

_MOST_FACTS: Final = 50_000.0
"""All facts of a kind are halved at this number, so old traffic fades."""


def bucket_of(age_s: float) -> int:
    """Return the bucket of an age."""
    return bisect_right(EDGES, age_s) - 1 if age_s >= _FIRST_EDGE_S else 0


RUN_KINDS: Final = 4
"""Number of run kinds (by length)."""

_GAP_EDGES_S: Final = (4.0, 30.0, 120.0, 600.0)
GAP_KINDS: Final = len(_GAP_EDGES_S) + 2
"""Number of gap kinds. A block's kind is (family * GAP_KINDS + gap kind) * RUN_KINDS + run kind.
Kinds of one family and one run kind differ only in the gap; a kind that has seen little takes what
its family has seen."""


def gap_kind(gap_s: float | None) -> int:
    """Return the kind of the time since the conversation's previous request; None: there is none.

    How soon a conversation went on tells how soon the conversation will go on.
    """
    return 0 if gap_s is None else 1 + bisect_right(_GAP_EDGES_S, gap_s)


class PromptRun:
    """The blocks used by one request, in prompt order; grows until the prompt ends.

    Attributes:
        number: later runs have higher numbers.
        fresh: number of blocks without an earlier use.
        gap: gap kind of the last block with an earlier use.
        tip: last block reached.
        cohort: the cohort of the run's most recent blocks.
    """

    __slots__ = ("cohort", "fresh", "gap", "number", "tip")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fresh = 0
        self.gap = gap_kind(None)
        self.tip: object = None
        self.cohort: WaitCohort | None = None

    @property
    def kind(self) -> int:
        """Run kind: short additions to a long prompt are turns, long additions are often unique."""
        return run_kind(self.fresh)


_RUN_EDGES: Final = (4, 9, 33)


def run_kind(fresh: int) -> int:
    """Return the run kind for a number of new blocks; below RUN_KINDS."""
    return bisect_right(_RUN_EDGES, fresh)


class WaitCohort:
    """Blocks of one kind whose waits started together.

    Attributes:
        kind: kind of the blocks; in the first bucket without the run kind.
        run: the run of the blocks.
        started: start time in seconds.
        waiting: number of watched blocks still waiting.
        bucket: age bucket of the cohort; -1 once unwatched.
    """

    __slots__ = ("bucket", "kind", "run", "started", "waiting")

    def __init__(self, kind: int, run: PromptRun, started: float) -> None:
        self.kind = kind
        self.run = run
        self.started = started
        self.waiting = 0
        self.bucket = 0


@dataclass(slots=True)
class _Kind:
    """Observations about one kind of block, or about a family of kinds.

    Attributes:
        family: the sum over the kinds that differ only in the gap, the prior of a kind with few
            facts; None in a family.
        reached: number of waits with an age in or beyond each bucket.
        used: number of waits ended by a use in each bucket.
        hazards: per bucket except the last, the probability that a wait ends in the bucket once the
            bucket was reached.
        values: per age bucket, uses per second held at the best horizon from there; negative means
            not computed yet.
        facts: total of reached and used ever counted (halved with them).
        due: number of facts at which the values are computed again.
        odds: factor on the average over all kinds, used while the family has few facts.
    """

    family: _Kind | None = None
    odds: float = 1.0
    reached: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    used: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    hazards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    facts: float = 0.0
    due: float = 0.0

    def halve(self) -> None:
        """Halve the weight of everything learned so far."""
        self.reached = [count / 2 for count in self.reached]
        self.used = [count / 2 for count in self.used]
        self.facts /= 2


class Lifetimes:
    """Estimates the value of each kind; kinds are small integers.

    Attributes:
        _kinds: observations by kind.
        _families: observations by family and run kind.
        _odds: prior odds by kind without run kind, if not 1.
        _all: sum over all kinds, the prior of a family with few facts.
        _cohorts: by age bucket, oldest first.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._families: dict[int, _Kind] = {}
        self._odds: dict[int, float] = {}
        self._all = _Kind()
        self._cohorts: tuple[deque[WaitCohort], ...] = tuple(deque() for _ in range(BUCKETS))

    def start(self, kind: int, run: PromptRun, now: float, odds: float = 1.0) -> WaitCohort:
        """Start a wait; return its cohort, to be passed once to ``end_in_use`` or ``give_up``.

        Args:
            kind: kind of the block without run kind; the run kind is added when the run is
                complete.
            run: run of the block.
            now: time of the use.
            odds: prior odds of an unknown kind.
        """
        cohort = run.cohort
        if cohort is None or cohort.kind != kind or cohort.started != now or cohort.bucket:
            cohort = run.cohort = WaitCohort(kind, run, now)
            self._cohorts[0].append(cohort)
            if odds != 1.0 and kind not in self._odds:
                self._odds[kind] = odds
        cohort.waiting += 1
        return cohort

    def end_in_use(self, cohort: WaitCohort) -> None:
        """Count one use of a block of the cohort."""
        bucket = cohort.bucket
        if bucket < 0:
            return
        cohort.waiting -= 1
        if bucket:
            known = self._kind(cohort.kind)
        else:
            known = self._kind(cohort.kind + cohort.run.kind)
            self._reached(known, 0, 1)
        for each in (known, known.family):
            assert each is not None
            each.used[bucket] += 1.0
            each.facts += 1.0
        self._all.used[bucket] += 1.0

    def give_up(self, cohort: WaitCohort) -> None:
        """Stop watching one block of the cohort; the ages already reached stay counted."""
        cohort.waiting -= 1

    def advance(self, now: float) -> None:
        """Advance cohorts to the age buckets of ``now``; amortised O(1) per cohort and bucket."""
        for bucket, cohorts in enumerate(self._cohorts[:-1]):
            until = now - EDGES[bucket + 1]
            while cohorts and cohorts[0].started <= until:
                cohort = cohorts.popleft()
                # No block can join the cohort now. Cutting the reference avoids a cycle.
                cohort.run.cohort = None
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
        """Return uses per second held of a block at an age; 0.0 while nothing is known."""
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
            family = kind // (GAP_KINDS * RUN_KINDS) * RUN_KINDS + kind % RUN_KINDS
            above = self._families.setdefault(family, _Kind(odds=odds))
            known = self._kinds[kind] = _Kind(above, odds)
        return known

    def _reached(self, known: _Kind, bucket: int, count: int) -> None:
        for each in (known, known.family, self._all):
            assert each is not None
            each.reached[bucket] += count
            each.facts += count

    def _refresh(self, known: _Kind) -> None:
        for fading in (known, known.family, self._all):
            assert fading is not None
            if fading.facts > _MOST_FACTS:
                fading.halve()
        known.due = known.facts + max(_MIN_REFRESH, known.facts * _REFRESH_SHARE)
        known.hazards = [self._hazard(known, bucket) for bucket in range(BUCKETS - 1)]
        known.values = [-1.0] * BUCKETS

    def _hazard(self, known: _Kind, bucket: int) -> float:
        """Return the probability that a wait ends in a bucket once the bucket was reached."""
        reached, used = self._all.reached[bucket], self._all.used[bucket]
        usual = min(1.0, known.odds * used / reached) if reached else 0.0
        for each in (known.family, known):
            assert each is not None
            waits = each.reached[bucket] + _PRIOR_WAITS
            usual = min(1.0, (each.used[bucket] + _PRIOR_WAITS * usual) / waits)
        return usual


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
