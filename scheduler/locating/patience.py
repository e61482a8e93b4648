"""When the directory is worth asking: not for a while after it failed, then one question at a time.

Pure; used by scheduler/locating/directory_client.py. So a hanging server delays few requests.
"""

from __future__ import annotations

FIRST_BACKOFF_SHARE = 0.125


class Patience:
    """How often the directory failed, and when to try again.

    Attributes:
        failures: questions that failed in a row.
    """

    def __init__(self, *, backoff_s: float) -> None:
        """Start with no experience; ``backoff_s`` is the longest time without a question."""
        self.failures = 0
        self._backoff_s = backoff_s
        self._off_until_s = 0.0
        self._probing = False

    def may_ask(self, now: float) -> bool:
        """Whether a question is worth it now."""
        return not self.failures or (now >= self._off_until_s and not self._probing)

    def ask(self) -> None:
        """Note that somebody asks."""
        self._probing = self.failures > 0

    def answered(self) -> None:
        """Note an answer."""
        self.failures, self._probing = 0, False

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
