"""How long blocks of each kind go without a use, learned as they live, and what keeping one pays.

A pure estimator that policies/learned.py feeds: trials start at a use and end at the next one, or
are given up. Gaps that are not over yet count for as long as they have lasted (Kaplan and Meier's
estimator over ages in buckets), so what was never used again is learned as soon as it gets old.
"""

from __future__ import annotations

import math
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
_WIDTHS: Final = tuple(after - before for before, after in pairwise(EDGES))

MAX_TRIALS: Final = 1 << 16
"""Trials that run at once; more would not make the estimate better, only slower."""

_PRIOR_TRIALS: Final = 20.0
"""How many trials' weight the average over all kinds has in the estimate of each."""

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
    """

    __slots__ = ("fresh", "number", "tip")

    def __init__(self, number: int) -> None:
        self.number = number
        self.fresh = 0
        self.tip: object = None

    @property
    def kind(self) -> int:
        """A short addition to a long prompt is another turn; a long one often stays alone."""
        return run_kind(self.fresh)


_RUN_EDGES: Final = (4, 9, 33)


def run_kind(fresh: int) -> int:
    """Return the kind of a run with so many new blocks, below RUN_KINDS."""
    return bisect_right(_RUN_EDGES, fresh)


class Trial:
    """One wait for the next use of a block.

    Attributes:
        kind: of the block when it started; while it is in its first bucket, without the run's.
        run: that the block was part of.
        started: in seconds.
        bucket: the age it has reached; -1 when it is over.
    """

    __slots__ = ("bucket", "kind", "run", "started")

    def __init__(self, kind: int, run: Run, started: float) -> None:
        self.kind = kind
        self.run = run
        self.started = started
        self.bucket = 0


@dataclass(slots=True)
class _Kind:
    """What is known about one kind of block.

    Attributes:
        reached: trials that reached each bucket.
        used: of those, how many ended in a use in that bucket.
        values: per bucket of age, uses per second held, at the best horizon from there.
        facts: reached and used ever counted (halved with them).
        due: the number of facts at which the values are computed again.
        odds: factor on what all kinds together say, while this one knows little.
    """

    odds: float = 1.0
    reached: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    used: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    values: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    facts: float = 0.0
    due: float = 1.0


class Lifetimes:
    """Learns per kind. Kinds are small integers.

    Attributes:
        _kinds: by number.
        _odds: by number without the run's, where they are not even.
        _all: the sum of all kinds, which says what is not known yet about one.
        _waiting: running trials by bucket, oldest first, with some that are over.
        _running: how many entries those queues have.
        _next_due: when the first of them changes its bucket, at the earliest.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._odds: dict[int, float] = {}
        self._all = _Kind()
        self._waiting: tuple[deque[Trial], ...] = tuple(deque() for _ in range(BUCKETS))
        self._running = 0

    def start(self, kind: int, run: Run, now: float, odds: float = 1.0) -> Trial | None:
        """Start a trial; None when too many are running.

        Args:
            kind: of the block without that of its run, which is added when that is complete.
            run: that the block is part of.
            now: of the use.
            odds: on what is usual, of kinds that are not known yet.
        """
        if self._running >= MAX_TRIALS:
            return None
        if odds != 1.0 and kind not in self._odds:
            self._odds[kind] = odds
        trial = Trial(kind, run, now)
        self._waiting[0].append(trial)
        self._running += 1
        return trial

    def end_in_use(self, trial: Trial) -> None:
        """Note that the block was used; a trial that is over changes nothing."""
        bucket = trial.bucket
        if bucket < 0:
            return
        known = self._kind(trial.kind) if bucket else self._settled(trial)
        trial.bucket = -1
        known.used[bucket] += 1.0
        known.facts += 1.0
        self._all.used[bucket] += 1.0

    def give_up(self, trial: Trial) -> None:
        """Stop watching a block; it counts for the ages it has reached."""
        trial.bucket = -1

    def advance(self, now: float) -> None:
        """Let running trials grow older; amortised O(1) per trial and bucket."""
        for bucket, waiting in enumerate(self._waiting):
            last = bucket == BUCKETS - 1
            until = math.inf if last else now - EDGES[bucket + 1]
            while waiting and (waiting[0].bucket != bucket or waiting[0].started <= until):
                trial = waiting.popleft()
                if trial.bucket != bucket:
                    self._running -= 1
                elif last:
                    trial.bucket = -1
                    self._running -= 1
                else:
                    known = self._kind(trial.kind) if bucket else self._settled(trial)
                    trial.bucket = bucket + 1
                    self._reached(known, bucket + 1)
                    self._waiting[bucket + 1].append(trial)

    def values(self, kind: int) -> list[float]:
        """Return uses per second held, by bucket of age; zeros while nothing is known at all."""
        known = self._kind(kind)
        if known.facts >= known.due:
            self._refresh(known)
        return known.values

    def _kind(self, kind: int) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            odds = self._odds.get(kind - kind % RUN_KINDS, 1.0)
            known = self._kinds[kind] = _Kind(odds)
        return known

    def _settled(self, trial: Trial) -> _Kind:
        """Fix the kind of a trial whose run is complete, and count it from the start."""
        trial.kind += trial.run.kind
        known = self._kind(trial.kind)
        self._reached(known, 0)
        return known

    def _reached(self, known: _Kind, bucket: int) -> None:
        known.reached[bucket] += 1.0
        known.facts += 1.0
        self._all.reached[bucket] += 1.0

    def _refresh(self, known: _Kind) -> None:
        if known.facts > _MOST_FACTS:
            known.reached = [count / 2 for count in known.reached]
            known.used = [count / 2 for count in known.used]
            known.facts /= 2
        known.due = known.facts + max(_MIN_REFRESH, known.facts * _REFRESH_SHARE)
        known.values = _values([self._hazard(known, bucket) for bucket in range(BUCKETS)])

    def _hazard(self, known: _Kind, bucket: int) -> float:
        """Return the chance that a block which reached a bucket is used in it."""
        reached, used = self._all.reached[bucket], self._all.used[bucket]
        usual = min(1.0, known.odds * used / reached) if reached else 0.0
        trials = known.reached[bucket] + _PRIOR_TRIALS
        return min(1.0, (known.used[bucket] + _PRIOR_TRIALS * usual) / trials)


def _values(hazards: list[float]) -> list[float]:
    """Return, per bucket of age, the best over horizons of P(used by then) / E[time held]."""
    values = [0.0] * BUCKETS
    for age in range(BUCKETS - 1):
        alive, used, held, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(age, BUCKETS - 1):
            ends = alive * hazards[bucket]
            used += ends
            held += (alive - ends / 2) * _WIDTHS[bucket]
            alive -= ends
            best = max(best, used / held)
        values[age] = best
    return values
