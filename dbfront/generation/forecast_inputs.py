"""The two learned inputs of a forecast for EXPLAIN (AI_ESTIMATE), kept until the front ends.

dbfront/generation/generation.py creates both: the lengths of answers, and the front's own work per
call. The work per call is the CPU time of the front's thread over a burst of calls, without
waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest, kind_of
from tierkv.dbfront.contracts import PreparedCall

ASSUMED_S: Final = 0.001
"""Initial value, used until the first measurement."""
_LEAST_CALLS: Final = 8
_MOST_CALLS: Final = 64
"""A burst ends after this many calls. A burst of fewer than _LEAST_CALLS calls is not measured."""
_PAUSE_S: Final = 0.1
"""Idle time after which a new burst begins, so work between two bursts is not counted."""
_NEW_SHARE: Final = 0.3


class FrontPace:
    """Measures the front's work per call; used only in the front's thread.

    Attributes:
        call_s: CPU seconds per call.
    """

    def __init__(
        self,
        *,
        worked_s: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an idle measurement.

        Args:
            worked_s: returns the CPU seconds of this thread so far.
            now: returns the time.
        """
        self.call_s = ASSUMED_S
        self._worked_s = worked_s
        self._now = now
        self._began_s = 0.0
        self._busy_at_s = -_PAUSE_S
        self._ended = 0

    def working(self, *, others: bool) -> None:
        """Record work on a call; ``others`` is True if other calls are in progress."""
        if not others and self._now() - self._busy_at_s >= _PAUSE_S:
            self._begin()
        self._busy_at_s = self._now()

    def ended(self, *, others: bool) -> None:
        """Record the end of a call; ``others`` is True if other calls are in progress."""
        self._ended += 1
        self._busy_at_s = self._now()
        if self._ended >= _MOST_CALLS or (not others and self._ended >= _LEAST_CALLS):
            call_s = (self._worked_s() - self._began_s) / self._ended
            self.call_s += _NEW_SHARE * (call_s - self.call_s)
            self._begin()

    def _begin(self) -> None:
        self._began_s, self._ended = self._worked_s(), 0


_REMEMBERED = 100
"""Window of the fading mean, in answers."""


class AnswerLengths:
    """Decaying mean of answer tokens by model and kind; a reducer of requests."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def take(self, request: ModelRequest) -> None:
        """Update the mean of this kind of request with the length of a complete answer."""
        if (
            request.cached
            or request.usage is None
            or request.end not in (CallEnd.STOP, CallEnd.LENGTH)
        ):
            return
        key = request.model, kind_of(request.prepared.call)
        count = self._counts[key] = min(self._counts.get(key, 0) + 1, _REMEMBERED)
        mean = self._means.get(key, 0.0)
        self._means[key] = mean + (request.usage.completion_tokens - mean) / count

    def expected(self, prepared: PreparedCall) -> float | None:
        """Return the expected length in tokens, at most the limit; None before the first answer."""
        mean = self._means.get((prepared.request.model, kind_of(prepared.call)))
        return None if mean is None else min(mean, float(most_tokens(prepared)))


def most_tokens(prepared: PreparedCall) -> int:
    """Return the maximum length of an answer in tokens."""
    if prepared.call.embed:
        return 0
    return 1 if prepared.call.labels else prepared.request.sampling.max_tokens
