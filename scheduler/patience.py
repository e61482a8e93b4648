"""How long to wait for the directory: not longer than usual, and not at all when it just failed.

Pure; used by scheduler/directory_client.py. After a failure nobody asks for a while; then one
question at a time finds out whether it is back, so that a hanging server delays few requests.
"""

from __future__ import annotations

from collections import deque
from statistics import median

ANSWERS_REMEMBERED = 64
ANSWERS_NEEDED = 8
USUAL_TIMES = 8.0
"""An answer that takes so many times the median is not worth waiting for: routing without hits
costs less than it looks, since the node finds blocks for itself."""

MIN_TIMEOUT_S = 0.02
"""A busy front may look at its sockets this late."""

FIRST_BACKOFF_SHARE = 0.125


class Patience:
    """What is known of the directory's pace.

    Attributes:
        failures: questions that failed in a row.
    """

    def __init__(self, *, longest_s: float, backoff_s: float) -> None:
        """Start with no experience.

        Args:
            longest_s: longest wait for an answer.
            backoff_s: longest time without a question after failures.
        """
        self.failures = 0
        self._longest_s = longest_s
        self._backoff_s = backoff_s
        self._took_s: deque[float] = deque(maxlen=ANSWERS_REMEMBERED)
        self._off_until_s = 0.0
        self._probing = False

    def may_ask(self, now: float) -> bool:
        """Whether a question is worth it now."""
        return not self.failures or (now >= self._off_until_s and not self._probing)

    def timeout_s(self) -> float:
        """How long the next answer may take; twice as long for each failure before."""
        if len(self._took_s) < ANSWERS_NEEDED:
            return self._longest_s
        usual_s = max(MIN_TIMEOUT_S, USUAL_TIMES * median(self._took_s))
        return float(min(self._longest_s, usual_s * 2.0 ** min(self.failures, 16)))

    def ask(self) -> None:
        """Note that somebody asks."""
        self._probing = self.failures > 0

    def answered(self, took_s: float | None = None) -> None:
        """Note an answer, and how long it took where that was an ordinary locate."""
        self.failures, self._probing = 0, False
        if took_s is not None:
            self._took_s.append(took_s)

    def failed(self, now: float) -> None:
        """Note that no answer came; questions that fail together count once."""
        self._probing = False
        if now < self._off_until_s:
            return
        self.failures += 1
        share = min(1.0, FIRST_BACKOFF_SHARE * 2.0 ** min(self.failures - 1, 16))
        self._off_until_s = now + share * self._backoff_s

    def gave_up(self) -> None:
        """Note that the asker went away before anything was known."""
        self._probing = False
