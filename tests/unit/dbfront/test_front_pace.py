"""The front's work per call is what its thread worked while calls were under way, and no more."""

from __future__ import annotations

import pytest

from tierkv.dbfront.generation.forecast_inputs import ASSUMED_S, FrontPace


class Thread:
    """A thread's processor time, and the time."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        self.now_s = 50.0
        self.pace = FrontPace(worked_s=lambda: self.worked_s, now=lambda: self.now_s)

    def works(self, seconds: float) -> None:
        self.worked_s += seconds
        self.now_s += seconds

    def answers(self, calls: int, seconds_each: float) -> None:
        """Prepare and answer some calls at once."""
        for call in range(calls):
            self.pace.working(others=call > 0)
            self.works(seconds_each / 2)
        for left in reversed(range(calls)):
            self.works(seconds_each / 2)
            self.pace.ended(others=left > 0)


def test_a_statement_of_many_calls_tells_what_a_call_takes() -> None:
    thread = Thread()
    assert thread.pace.call_s == ASSUMED_S
    for _ in range(20):
        thread.answers(40, 0.004)
    assert thread.pace.call_s == pytest.approx(0.004, rel=0.1)


def test_what_is_done_between_statements_does_not_count() -> None:
    thread = Thread()
    for _ in range(20):
        thread.answers(40, 0.004)
        thread.works(5.0)
    assert thread.pace.call_s == pytest.approx(0.004, rel=0.1)


def test_a_few_calls_tell_nothing() -> None:
    thread = Thread()
    for _ in range(9):
        thread.answers(1, 0.5)
        thread.works(1.0)
    assert thread.pace.call_s == ASSUMED_S
