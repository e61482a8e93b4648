"""Measured cost of moving bytes and of computing tokens: online fits, rates, counters per tier.

```
Rate       value += 0.3 * (amount / seconds - value)                     tokens/s, bytes/s
LineFit    min sum of w * (latency + bytes / rate - seconds) ** 2        a sample per read
StepCostFit  min sum of w * (token, pair, step, sequence costs - seconds) ** 2   per pass
           w = fading weight / size ** 2: relative errors, old samples count less and less
```

Pure: samples in, figures of costing/service_time.py out. Loader threads and the engine add samples;
load decisions and heartbeats read the figures. Old samples fade; a change of a path or a machine
shows after a few samples. Both fits are least squares in closed form, without negative costs. Each
attribute has a single writer, or is assigned in a single step under the GIL, so readers need no
lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.costing.service_time import Line, StepCost, causal_pairs

_NEW_SHARE = 0.3
_OVERLAP_SHARE = 0.05
"""Weight of a new read. A load reads once per layer, so a small weight averages over several loads,
not over a few layers."""


class Rate:
    """A moving average of amount per second; 0.0 before the first measurement."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement to the average."""
        if amount <= 0 or seconds <= 0:
            return
        new = amount / seconds
        self.value = new if self.value == 0.0 else self.value + _NEW_SHARE * (new - self.value)


class Overlap:
    """Average number of concurrent reads on a path, over the recent reads.

    Concurrent reads on a path slow each other down. The rate of the path is the rate of a single
    read times this average.
    """

    def __init__(self) -> None:
        self._reading_s = 0.0
        self._busy_s = 0.0
        self._ended_s = float("-inf")

    def add(self, seconds: float, *, ended_s: float) -> None:
        """Add a read; reads of several threads must be added in the order in which they end."""
        busy_s = min(seconds, max(0.0, ended_s - self._ended_s))
        self._reading_s += seconds - _OVERLAP_SHARE * self._reading_s
        self._busy_s += busy_s - _OVERLAP_SHARE * self._busy_s
        self._ended_s = max(self._ended_s, ended_s)

    @property
    def mean(self) -> float:
        """Average number of concurrent reads, at least 1.0."""
        return max(1.0, self._reading_s / self._busy_s) if self._busy_s > 0.0 else 1.0


class TierMeter:
    """Cumulative counters of the reads from one tier.

    Attributes:
        query_tokens: prompt tokens looked up in this tier.
        hit_tokens: prompt tokens loaded from this tier.
        read_bytes: bytes loaded.
        read_time_s: seconds spent on loading the bytes.
        rate: bytes per second.
    """

    def __init__(self) -> None:
        self.query_tokens = 0
        self.hit_tokens = 0
        self.read_bytes = 0
        self.read_time_s = 0.0
        self.rate = Rate()

    def read(self, size_bytes: int, seconds: float) -> None:
        """Count one read."""
        self.read_bytes += size_bytes
        self.read_time_s += seconds
        self.rate.add(size_bytes, seconds)


_KEPT = 0.5
"""Weight that all older samples keep after a new load: the first load after a change has half the
weight."""
_FADE_S = 10.0
"""Time constant by which old samples also fade, so the first sample after a pause counts nearly
alone."""
_HICCUP = 3.0
"""A read slower than this multiple of its prediction waits for a second slow one before it counts.

A thread that the system stopped for a moment says nothing about the path, and one such read would
turn away the next loads.
"""
_SPREAD = 0.01
"""Relative variance of sizes below which a latency can't be told from a rate."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One read as a sample: bytes, duration, its end, and the weight of everything older."""

    size_bytes: float
    seconds: float
    ended_s: float
    kept: float


class LineFit:
    """A Line fitted to reads of different sizes.

    Samples are weighted by 1 / size^2: small reads determine the latency, large reads the rate.

    Attributes:
        measured_at_s: end of the latest read that the fit includes.
    """

    def __init__(self, *, reads_per_load: int = 1) -> None:
        """Make an empty fit.

        Args:
            reads_per_load: equal reads of a load (a read per layer), which together count as a
                sample.
        """
        self.measured_at_s = -math.inf
        self._kept: float = _KEPT ** (1 / reads_per_load)
        self._means = (0.0, 0.0, 0.0, 0.0)
        self._suspects: list[_Read] = []

    def add(
        self,
        size_bytes: float,
        seconds: float,
        *,
        now: float,
        whole: bool = False,
        certain: bool = False,
    ) -> None:
        """Learn from one read.

        A read much slower than predicted counts only together with the next slow read that began
        after the first read ended. A read of usual speed in between drops the slow read.

        Args:
            size_bytes: bytes that the read moved or was expected to move.
            seconds: duration of the read.
            now: end of the read.
            whole: True if the read counts as much as all reads of a load.
            certain: True if the read counts immediately at any duration, because the load was given
                up or because no second read follows soon.
        """
        if size_bytes <= 0 or seconds <= 0:
            return
        read = _Read(size_bytes, seconds, now, _KEPT if whole else self._kept)
        began_after = not self._suspects or now - seconds >= self._suspects[0].ended_s
        if not certain and self._surprising(read):
            self._suspects.append(read)
            if len(self._suspects) > 1 and began_after:
                self._learn_suspects()
            return
        if certain:
            self._learn_suspects()
        elif began_after:
            self._suspects.clear()
        self._learn(read)
        line = self.line
        if line is not None and seconds * _HICCUP < line.seconds(size_bytes):
            self._learn(read)  # No path is fast by chance, so such a read counts twice.

    def _surprising(self, read: _Read) -> bool:
        line = self.line
        if line is None:
            return False
        # The latency may not be known yet, so a small read may take as long as a usual one.
        expected_s = line.seconds(max(read.size_bytes, 1 / self._means[0]))
        age_s = max(0.0, read.ended_s - self.measured_at_s)
        return read.seconds > _HICCUP * expected_s * math.exp(min(age_s / _FADE_S, 30.0))

    def _learn_suspects(self) -> None:
        for suspect in self._suspects:
            self._learn(suspect)
        self._suspects.clear()

    def _learn(self, read: _Read) -> None:
        age_s = max(0.0, read.ended_s - self.measured_at_s)
        kept = read.kept * math.exp(-age_s / _FADE_S)
        x, y = 1 / read.size_bytes, read.seconds / read.size_bytes
        pairs = zip(self._means, (x, y, x * x, x * y), strict=True)
        new_x, new_y, new_xx, new_xy = (old + (1 - kept) * (new - old) for old, new in pairs)
        self._means = (new_x, new_y, new_xx, new_xy)
        self.measured_at_s = max(self.measured_at_s, read.ended_s)

    @property
    def line(self) -> Line | None:
        """The fit; None before the first sample. The latency is 0.0 unless sizes differ."""
        x, y, xx, xy = self._means
        if not y:
            return None
        spread = xx - x * x
        latency_s = (xy - x * y) / spread if spread > _SPREAD * x * x else 0.0
        slope = y - latency_s * x
        if latency_s < 0.0 or slope <= 0.0:
            latency_s, slope = 0.0, y
        return Line(latency_s, 1 / slope)


class StepCostFit:
    """A StepCost fitted to steps of different size and context.

    A single step yields only seconds per token; the other figures emerge as steps differ. Steps of
    full batches are all alike and can't separate the figures. The ``calibrated`` figures then keep
    their proportions, and the measurements only scale all figures together. Samples are weighted by
    1 / tokens^2, so the fit is equally good for short steps.

    Attributes:
        scale: product of all factors that ``rescale`` was given.
    """

    def __init__(self, *, by_seconds: bool = False) -> None:
        """Make an empty fit.

        Args:
            by_seconds: weight samples by 1 / seconds^2 instead, for times that include more than
                the step. A step that was suspended for long then counts little instead of
                dominating the fit.
        """
        self._products = [[0.0] * 5 for _ in range(5)]
        self._by_seconds = by_seconds
        self._prior: StepCost | None = None
        self._cost: StepCost | None = None
        self.scale = 1.0

    def calibrate(self, steps: Sequence[tuple[int, float, float, int]]) -> None:
        """Set the prior cost from a few exact measurements.

        Args:
            steps: tokens, pairs, seconds and prompts of steps chosen to differ; few and exact.
        """
        exact = StepCostFit(by_seconds=True)
        for step in steps:
            exact.add(*step)
        # Every token costs time, even if a step that was suspended for long suggests otherwise.
        longest = max(tokens for tokens, *_ in steps)
        columns = [
            c
            for c in _COLUMNS
            if 0 in c and (1 not in c or longest >= _SHOWS_PAIRS) and len(c) < len(steps)
        ] or [(0,)]
        fits = [fit for some in columns if (fit := exact._solved(some)) is not None]
        self._prior = self._cost = min(fits, key=lambda fit: fit[0])[1]

    def add(self, tokens: int, pairs: float, seconds: float, sequences: int = 1) -> None:
        """Add one step with new tokens of ``sequences`` sequences."""
        if tokens <= 0 or seconds <= 0:
            return
        unit = seconds if self._by_seconds else tokens
        row = (tokens / unit, pairs / unit, 1.0 / unit, (sequences - 1) / unit, seconds / unit)
        for i, a in enumerate(row):
            for j, b in enumerate(row):
                self._products[i][j] = _STEP_KEPT * self._products[i][j] + a * b
        self._cost = None

    def rescale(self, factor: float) -> None:
        """Multiply all figures, because work other than steps shows that computing got faster."""
        for row in self._products[:4]:
            row[4] *= factor
        self._products[4] = [cell * factor for cell in self._products[4]]
        self._products[4][4] *= factor
        if self._prior is not None:
            self._prior = self._prior.times(factor)
        self.scale *= factor
        self._cost = None if self._products[0][0] else self._prior

    @property
    def cost(self) -> StepCost | None:
        """The fit; None before the first step and without a calibration. O(1)."""
        cost = self._cost
        if cost is None and self._products[0][0]:
            cost = self._cost = self._leaning_on(self._prior) if self._prior else self._fitted()
        return cost

    def _leaning_on(self, prior: StepCost) -> StepCost:
        """Fit, but keep the prior's proportions for figures that the samples can't separate.

        Ridge regression (Hoerl and Kennard 1970) towards the prior as scaled by the samples. The
        unit of each figure is the part of the samples that the figure explains.
        """
        matrix = [row[:4] for row in self._products[:4]]
        target = [row[4] for row in self._products[:4]]
        shape = (prior.per_token_s, prior.per_pair_s, prior.per_step_s, prior.per_sequence_s)
        explained = sum(a * b for a, b in zip(shape, target, strict=True))
        square = sum(
            a * b * cell
            for a, row in zip(shape, matrix, strict=True)
            for b, cell in zip(shape, row, strict=True)
        )
        expected = [explained / square * figure for figure in shape]
        seen = [i for i in range(4) if matrix[i][i]]
        least = [
            _LEAST_SHARE * figure if i in seen else figure for i, figure in enumerate(expected)
        ]
        above, free = [0.0] * 4, seen
        while free:
            ridge = [[matrix[i][j] * (1 + _LEANING * (i == j)) for j in free] for i in free]
            pulled = [
                target[i]
                - sum(matrix[i][j] * least[j] for j in seen)
                + _LEANING * matrix[i][i] * (expected[i] - least[i])
                for i in free
            ]
            values = _solve(ridge, pulled) or [expected[i] - least[i] for i in free]
            above = [0.0] * 4
            for i, value in zip(free, values, strict=True):
                above[i] = value
            if min(values) >= 0.0:
                break
            free = [i for i in free if above[i] > 0.0]
        return StepCost(*(low + more for low, more in zip(least, above, strict=True)))

    def _fitted(self) -> StepCost:
        """Fit to the samples alone."""
        fits = [fit for columns in _COLUMNS if (fit := self._solved(columns)) is not None]
        best = min(error for error, _ in fits)
        enough = best + _NOTICEABLE * self._products[4][4]  # Prefer fewer figures.
        return next(cost for error, cost in fits if error <= enough)

    def _solved(self, columns: tuple[int, ...]) -> tuple[float, StepCost] | None:
        """Fit a subset of the figures; None if the system is singular or a figure is negative."""
        matrix = [[self._products[i][j] for j in columns] for i in columns]
        target = [self._products[i][4] for i in columns]
        values = _solve(matrix, target)
        if values is None or min(values) < 0.0:
            return None
        error = self._products[4][4] - sum(v * t for v, t in zip(values, target, strict=True))
        figures = [0.0] * 4
        for column, value in zip(columns, values, strict=True):
            figures[column] = value
        return max(0.0, error), StepCost(*figures)


_COLUMNS: Final = (
    *((0,), (0, 1), (0, 2), (0, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)),
    *((1, 2), (1, 3), (2, 3), (1,), (2,), (3,)),
)
"""Subsets of the figures of StepCost to try, in order of preference."""
_STEP_KEPT = 0.85
_LEANING = 0.02
"""Strength of the prior: equal to samples that differ by a seventh of their size."""
_LEAST_SHARE = 0.25
"""No figure is believed to be below this share of its part in the prior: steps that threads beside
them slowed down differ by more than their tokens, and would make tokens look free."""
_SHOWS_PAIRS = 256
"""Tokens of a step from which the cost of attention's pairs is visible next to the cost of
tokens."""
_NOTICEABLE = 2e-3
"""Share of the squared times that a further figure must explain to be accepted, because a further
figure always explains part of the noise."""


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a small positive semidefinite system; None if the system is singular."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for i in range(size):
        if rows[i][i] <= 1e-9 * matrix[i][i]:
            return None
        for below in range(i + 1, size):
            factor = rows[below][i] / rows[i][i]
            rows[below] = [b - factor * a for a, b in zip(rows[i], rows[below], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (rows[i][size] - known) / rows[i][i]
    return values


class EnginePace:
    """Measured speed of one run of an external engine, for the scheduler's cost.

    Only a request alone in the engine reveals the time of computing; with several requests running,
    a first token also waits for the rest. The time to a first token includes more than computing,
    and occasionally a stall; for a prompt with a cached prefix nearly all of the time is overhead.

    Attributes:
        prefill: seconds per step, token and pair of attention.
        prefill_rate: tokens per second.
        decode_rate: tokens per second of one request.
    """

    def __init__(self) -> None:
        self.prefill = StepCostFit(by_seconds=True)
        self.prefill_rate = Rate()
        self.decode_rate = Rate()

    def first_token(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Add the time to the first token of a request alone in the engine."""
        computed = max(1, prompt_tokens - cached_tokens)
        self.prefill.add(computed, causal_pairs(prompt_tokens - computed, computed), seconds)
        self.prefill_rate.add(computed, seconds)
