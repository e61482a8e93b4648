"""Time as an argument: pure cores receive ``now``, shells own a Clock.

Tests and the simulator use ManualClock, so no test sleeps to make time pass.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time.

    1. ``now`` is monotonic, in seconds, with an arbitrary origin; leases and waits use it.
    2. ``wall`` is seconds since the Unix epoch; only people and logs read it.
    """

    def now(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()  # noqa: TID251 - the one place that may ask


class ManualClock:
    """A clock that moves only when told to.

    Attributes:
        seconds: the value of ``now``; never goes backwards.
    """

    def __init__(self, seconds: float = 0.0, *, epoch: float = 1_700_000_000.0) -> None:
        self.seconds = seconds
        self._epoch = epoch

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self._epoch + self.seconds

    def advance(self, seconds: float) -> None:
        """Move time forward.

        Raises:
            ValueError: the step is negative.
        """
        if seconds < 0:
            raise ValueError("time only goes forward")
        self.seconds += seconds
