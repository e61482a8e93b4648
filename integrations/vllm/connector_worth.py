"""Measures steps and loads of the engine for the decision whether loading pays.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread; costing/load_worth.py
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierkv.costing.load_worth import LARGE_STEP, PROBE_EVERY, SMALL_STEP, LoadWorth

_MOST_OPEN: Final = 64
_LONG_S: Final = 0.1


class TimedWorth:
    """A LoadWorth fed with begin and end times; used by one thread.

    Attributes:
        worth: the decision.
        _steps: running steps with an expected report: begin time and tokens.
        _number: number of the last step.
        _heard_at: time of the last reported end; the next step was not computed earlier.
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
            The step's number for the report of its end; 0 if the step is not measured, as most
            small steps.
        """
        self._number += 1
        small = tokens <= SMALL_STEP and self._number % PROBE_EVERY == 0
        if not tokens or not (small or tokens >= LARGE_STEP):
            return 0
        if len(self._steps) >= _MOST_OPEN:  # The reports never came.
            self._steps.clear()
        self._steps[self._number] = (self._now(), tokens)
        return self._number

    def step_ended(self, number: int) -> None:
        """Record a step's end; 0 for a step without a number."""
        now, since = self._now(), self._heard_at
        self._heard_at = now
        if number in self._steps:
            began, tokens = self._steps.pop(number)
            self.worth.computed(tokens, now - max(began, since))

    def load_ended(self, tokens: int, seconds: float | None, *, whole: bool) -> None:
        """Record a load's end. A quick failure says nothing about the speed of loads."""
        if not tokens or not seconds:
            return
        if whole or seconds > max(self.worth.load.seconds(tokens) or 0.0, _LONG_S):
            self.worth.load.add(tokens, seconds)
