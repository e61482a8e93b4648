"""Rates measured online: bytes per second per tier, tokens per second of prefill and decode.

Fed by loader threads and the engine, read for load decisions and heartbeats. A rate is a moving
average; single writers or the GIL keep each assignment whole.
"""

from __future__ import annotations

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
