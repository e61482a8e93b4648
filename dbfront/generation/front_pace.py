"""How long the front itself works on a call: prompts, routing, answers, all in one thread.

EXPLAIN (AI_ESTIMATE) adds it to what nodes take. It is the thread's processor time over a burst of
calls, so what is done beside calls while they run is in it, and waiting is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

ASSUMED_S: Final = 0.001
"""Until measured."""
_LEAST_CALLS: Final = 8
_MOST_CALLS: Final = 64
"""Fewer calls tell little; after so many, what they told is taken in."""
_PAUSE_S: Final = 0.1
"""After a pause a new burst begins: what was done meanwhile was not for calls."""
_NEW_SHARE: Final = 0.3


class FrontPace:
    """Measures the front's work per call; used in its thread only.

    Attributes:
        call_s: processor seconds per call.
    """

    def __init__(
        self,
        *,
        worked_s: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure nothing yet.

        Args:
            worked_s: processor seconds of this thread so far.
            now: the time.
        """
        self.call_s = ASSUMED_S
        self._worked_s = worked_s
        self._now = now
        self._began_s = 0.0
        self._busy_at_s = -_PAUSE_S
        self._ended = 0

    def working(self, *, others: bool) -> None:
        """Note that a call is being worked on; ``others``: other calls are under way."""
        if not others and self._now() - self._busy_at_s >= _PAUSE_S:
            self._begin()
        self._busy_at_s = self._now()

    def ended(self, *, others: bool) -> None:
        """Note that a call has ended; ``others``: other calls are under way."""
        self._ended += 1
        self._busy_at_s = self._now()
        if self._ended >= _MOST_CALLS or (not others and self._ended >= _LEAST_CALLS):
            call_s = (self._worked_s() - self._began_s) / self._ended
            self.call_s += _NEW_SHARE * (call_s - self.call_s)
            self._begin()

    def _begin(self) -> None:
        self._began_s, self._ended = self._worked_s(), 0
