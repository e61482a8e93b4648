"""How often bad bytes are found: a count, and an alarm when it happens too often.

Pure; kept by dmp/node/state.py. One bad slot is an accident, several in an hour are failing memory.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOW_S: Final = 3600.0


class DamageLog:
    """Counts findings.

    Attributes:
        count: all of this life.
    """

    def __init__(self, alert_per_hour: int) -> None:
        self.count = 0
        self._alert_per_hour = alert_per_hour
        self._recent: deque[float] = deque()
        self._quiet_until = float("-inf")

    def note(self, now: float) -> bool:
        """Count one; True when it is time for an alert, which is once an hour at most."""
        self.count += 1
        self._recent.append(now)
        while self._recent[0] <= now - _WINDOW_S:
            self._recent.popleft()
        if len(self._recent) < self._alert_per_hour or now < self._quiet_until:
            return False
        self._quiet_until = now + _WINDOW_S
        return True
