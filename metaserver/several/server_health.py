"""Whether a meta server is in use, and how long its answers may take. Pure.

Called by metaserver/several/several.py with ``now``. An answer that is overdue costs a caller the
time-out learned from earlier answers; then the server is out of use until a look at it succeeds.
"""

from __future__ import annotations

from typing import Final

FIRST_TIMEOUT_S: Final = 0.25
"""Time-out until enough answers were seen."""

LEAST_TIMEOUT_S: Final = 0.05
MOST_TIMEOUT_S: Final = 0.5
_WEIGHT: Final = 0.1
_DEVIATIONS: Final = 6.0
_ENOUGH: Final = 10
_FIRST_LOOK_S: Final = 0.1
_LAST_LOOK_S: Final = 1.0


class ServerHealth:
    """One server as one client sees it.

    Attributes:
        usable: answered last, or was never asked.
        owes_inventory: missed events of the nodes that report through this client.
        look_s: pause before the next look at a server out of use.
    """

    def __init__(self) -> None:
        self.usable = True
        self.owes_inventory = False
        self.look_s = _FIRST_LOOK_S
        self._answers = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def timeout_s(self) -> float:
        """Return after how long a further answer counts as overdue."""
        if self._answers < _ENOUGH:
            return FIRST_TIMEOUT_S
        late_s = self._mean_s + _DEVIATIONS * self._deviation_s
        return min(max(late_s, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)

    def answered(self, seconds: float) -> None:
        """Learn from an answer."""
        weight = max(_WEIGHT, 1 / (self._answers + 1))
        self._answers += 1
        self._deviation_s += weight * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += weight * (seconds - self._mean_s)

    def lost(self) -> None:
        """Take the server out of use."""
        self.usable = False

    def looked(self, *, well: bool) -> None:
        """Note a look at a server out of use."""
        self.usable = well
        self.look_s = _FIRST_LOOK_S if well else min(2 * self.look_s, _LAST_LOOK_S)
