"""Rates measured online: bytes per second per tier, tokens per second of prefill and decode.

Fed by loader threads and the engine, read for load decisions and heartbeats. A rate is a moving
average; single writers or the GIL keep each assignment whole.
"""

from __future__ import annotations

_NEW_SHARE = 0.3


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
