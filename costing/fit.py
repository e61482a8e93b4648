"""What moving bytes and computing tokens costs, measured online: fits, rates and counters per tier.

```
Rate       value += 0.3 * (amount / seconds - value)                     tokens/s, bytes/s
LineFit    min sum of w * (latency + bytes / rate - seconds) ** 2        one read each
StepCostFit  min sum of w * (token, pair, step, sequence costs - seconds) ** 2   one pass each
           w = fading weight / size ** 2: relative errors, old samples count less and less
```

Pure: samples in, figures of costing/service_time.py out. Loader threads and the engine feed it;
load decisions and heartbeats read it. Old samples fade, so that a change of a path or a machine
shows after a few; both fits are least squares in closed form, with no cost below zero. Each
attribute has one writer, or a single assignment under the GIL, so readers need no lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.costing.service_time import Line, StepCost, causal_pairs

_NEW_SHARE = 0.3
_OVERLAP_SHARE = 0.05
"""Reads come one per layer: some loads, not some layers, are to be averaged over."""


class Rate:
    """A moving average of amount per second; 0.0 until known."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def add(self, amount: float, seconds: float) -> None:
        """Take one measurement in."""
        if amount <= 0 or seconds <= 0:
            return
        new = amount / seconds
        self.value = new if self.value == 0.0 else self.value + _NEW_SHARE * (new - self.value)


class Overlap:
    """How many reads of a path go on at a time, on average over the last ones.

    Reads that share a path slow each other down; times this number, the rate that one of them sees
    is the rate of the path.
    """

    def __init__(self) -> None:
        self._reading_s = 0.0
        self._busy_s = 0.0
        self._ended_s = float("-inf")

    def add(self, seconds: float, *, ended_s: float) -> None:
        """Take in a read; those of several threads come in the order in which they end."""
        busy_s = min(seconds, max(0.0, ended_s - self._ended_s))
        self._reading_s += seconds - _OVERLAP_SHARE * self._reading_s
        self._busy_s += busy_s - _OVERLAP_SHARE * self._busy_s
        self._ended_s = max(self._ended_s, ended_s)

    @property
    def mean(self) -> float:
        """Reads at a time, at least one."""
        return max(1.0, self._reading_s / self._busy_s) if self._busy_s > 0.0 else 1.0


class TierMeter:
    """What readers saw of one tier, cumulative.

    Attributes:
        query_tokens: prompt tokens looked for in this tier.
        hit_tokens: prompt tokens that came from it.
        read_bytes: bytes loaded.
        read_time_s: seconds spent loading them.
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
"""Weight of everything older after one more load: a change is half learnt from its first one."""
_FADE_S = 10.0
"""Old samples fade with time too, so that after a pause a new one counts nearly alone."""
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

    Samples are weighted by 1 / size^2: small reads tell the latency, large ones the rate.

    Attributes:
        measured_at_s: when the last sample was taken in.
    """

    def __init__(self, *, reads_per_load: int = 1) -> None:
        """Make an empty fit.

        Args:
            reads_per_load: equal reads that come together (one per layer) and tell as much as one.
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

        A read that is much slower than predicted counts only together with the next slow read that
        began after the first one ended. A read of usual speed in between drops the slow one.

        Args:
            size_bytes: what the read moved, or was to move.
            seconds: its duration.
            now: when it ended.
            whole: True if the read counts as much as all reads of a load.
            certain: True if the read counts at once however slow it was, because its load was
                given up or because no second read follows soon.
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
        """The fit; None before the first sample. Without different sizes there is no latency."""
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

    One step alone tells seconds per token; what the other figures are shows as steps differ. Steps
    of full batches are all alike, and tell none of them: what was ``calibrated`` then stays in
    proportion, and only as a whole follows what is measured. Samples are weighted by
    1 / tokens^2, so that the fit is as good for short steps.

    Attributes:
        scale: product of all factors that ``rescale`` was given.
    """

    def __init__(self, *, by_seconds: bool = False) -> None:
        """Make an empty fit.

        Args:
            by_seconds: weight samples by 1 / seconds^2 instead, for times that hold more than the
                step: one that was stopped for long then counts little, not above all others.
        """
        self._products = [[0.0] * 5 for _ in range(5)]
        self._by_seconds = by_seconds
        self._prior: StepCost | None = None
        self._cost: StepCost | None = None
        self.scale = 1.0

    def calibrate(self, steps: Sequence[tuple[int, float, float, int]]) -> None:
        """Take in what to believe at first.

        Args:
            steps: tokens, pairs, seconds and prompts of steps chosen to differ; few and exact.
        """
        exact = StepCostFit(by_seconds=True)
        for step in steps:
            exact.add(*step)
        # No model computes a token for nothing, whatever a step that was stopped for long says.
        longest = max(tokens for tokens, *_ in steps)
        columns = [
            c
            for c in _COLUMNS
            if 0 in c and (1 not in c or longest >= _SHOWS_PAIRS) and len(c) < len(steps)
        ] or [(0,)]
        fits = [fit for some in columns if (fit := exact._solved(some)) is not None]
        self._prior = self._cost = min(fits, key=lambda fit: fit[0])[1]

    def add(self, tokens: int, pairs: float, seconds: float, sequences: int = 1) -> None:
        """Take one step in, with new tokens of so many sequences."""
        if tokens <= 0 or seconds <= 0:
            return
        unit = seconds if self._by_seconds else tokens
        row = (tokens / unit, pairs / unit, 1.0 / unit, (sequences - 1) / unit, seconds / unit)
        for i, a in enumerate(row):
            for j, b in enumerate(row):
                self._products[i][j] = _STEP_KEPT * self._products[i][j] + a * b
        self._cost = None

    def rescale(self, factor: float) -> None:
        """Multiply all figures, because other work than steps shows that computing got faster."""
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
        """The fit; None before the first step. O(1)."""
        cost = self._cost
        if cost is None and self._products[0][0]:
            cost = self._cost = self._leaning_on(self._prior) if self._prior else self._fitted()
        return cost

    def _leaning_on(self, prior: StepCost) -> StepCost:
        """Fit, but where samples can't tell figures apart keep them in the prior's proportion.

        Ridge regression (Hoerl and Kennard 1970) towards the prior as the samples scale it, with
        each figure in units of what it explains.
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
        figures, free = expected, seen
        while free:
            ridge = [[matrix[i][j] * (1 + _LEANING * (i == j)) for j in free] for i in free]
            pulled = [target[i] + _LEANING * matrix[i][i] * expected[i] for i in free]
            values = _solve(ridge, pulled) or [expected[i] for i in free]
            figures = [0.0 if i in seen else expected[i] for i in range(4)]
            for i, value in zip(free, values, strict=True):
                figures[i] = value
            if min(values) >= 0.0:
                break
            free = [i for i in free if figures[i] > 0.0]
        return StepCost(*figures)

    def _fitted(self) -> StepCost:
        """Fit to the samples alone."""
        fits = [fit for columns in _COLUMNS if (fit := self._solved(columns)) is not None]
        best = min(error for error, _ in fits)
        enough = best + _NOTICEABLE * self._products[4][4]  # Fewer figures, if they say as much.
        return next(cost for error, cost in fits if error <= enough)

    def _solved(self, columns: tuple[int, ...]) -> tuple[float, StepCost] | None:
        """Fit with some figures only; None when they can't be told apart or one is negative."""
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
"""Figures of StepCost tried together, plain ones first; the best without a negative one wins."""
_STEP_KEPT = 0.85
_LEANING = 0.02
"""Pull of the prior: as strong as samples that differ by a seventh of their size."""
_SHOWS_PAIRS = 256
"""Tokens of a step in which attention's pairs cost enough to be seen beside its tokens."""
_NOTICEABLE = 2e-3
"""Share of the squares that another figure must explain to be believed: noise explains some."""


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a positive semidefinite system of a few unknowns; None when it is singular."""
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
    """How fast an engine of others is, by one life of it, for the scheduler's cost.

    Only requests that had the engine to themselves say what computing takes; when several run, a
    first token also waits for others. A time to a first token holds more than computing, and now
    and then a stall: of a prompt whose prefix is cached that is nearly all.

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
        """Take in the time to a first token of a request that ran alone."""
        computed = max(1, prompt_tokens - cached_tokens)
        self.prefill.add(computed, causal_pairs(prompt_tokens - computed, computed), seconds)
        self.prefill_rate.add(computed, seconds)
