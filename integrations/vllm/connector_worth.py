"""Times steps and loads of the engine for the decision whether loading pays.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread; the decision is
costing/load_worth.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.costing.load_worth import LARGE_STEP, PROBE_EVERY, SMALL_STEP, LoadWorth

_MOST_OPEN: Final = 64
_LONG_S: Final = 0.1


class TimedWorth:
    """A LoadWorth that is told when things begin and end; used by one thread.

    Attributes:
        worth: the decision.
        _steps: steps under way whose end is heard of: when they began, and their tokens.
        _number: of the last step.
        _heard_at: when a step was last heard of; the next one was not computed before.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.worth = LoadWorth()
        self._now = now
        self._steps: dict[int, tuple[float, int]] = {}
        self._number = 0
        self._heard_at = 0.0

    def step_begins(self, tokens: int) -> int:
        """Begin a step.

        Returns:
            Its number, to be heard again; 0 where it would teach nothing, as of most small ones.
        """
        self._number += 1
        small = tokens <= SMALL_STEP and self._number % PROBE_EVERY == 0
        if not tokens or not (small or tokens >= LARGE_STEP):
            return 0
        if len(self._steps) >= _MOST_OPEN:  # They were never heard of.
            self._steps.clear()
        self._steps[self._number] = (self._now(), tokens)
        return self._number

    def step_ended(self, number: int) -> None:
        """Hear of a step's end; 0: of one without a number."""
        now, since = self._now(), self._heard_at
        self._heard_at = now
        if number in self._steps:
            began, tokens = self._steps.pop(number)
            self.worth.computed(tokens, now - max(began, since))

    def load_ended(self, tokens: int, seconds: float | None, *, whole: bool) -> None:
        """Hear of a load's end; what failed at once says nothing of what loading takes."""
        if not tokens or not seconds:
            return
        if whole or seconds > max(self.worth.load.seconds(tokens) or 0.0, _LONG_S):
            self.worth.load.add(tokens, seconds)
