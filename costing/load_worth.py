"""Whether loading blocks is faster than computing in an external engine that shows only durations.

```
token_s = median((step - small step) / tokens)      of the last five steps of a prompt
load_s  = median(load * max(1, tokens / loaded))    of the last five loads
loads when load_s + small step < token_s * tokens   costing/service_time.py, ``spared_s``
```

Pure: tokens and seconds in, a decision out. Without measurements the decision is to load. Loads
that do not pay are retried occasionally, because the load of the pool and of the engine changes.
The figures are medians, because any single step or load in an external engine may be delayed.
integrations/vllm/connector_scheduler.py reports the begin and end of steps and loads, in the
scheduler's thread, and reads the decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Final

from tierkv.costing.service_time import StepCost

SMALL_STEP: Final = 8
"""A step with at most this many tokens measures the fixed cost of a step."""

LARGE_STEP: Final = 64
"""A step with at least this many tokens measures the cost of a prompt's token."""

PROBE_EVERY: Final = 16
"""Every decision with this number to compute is overridden, to measure a load."""
_KEPT: Final = 5
"""Number of measurements in a median; the median follows a change after three measurements."""


class LoadCost:
    """Predicted seconds of a load, from the most recent loads."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, tokens: int, seconds: float) -> None:
        """Add the duration of one load."""
        self._last.append((tokens, seconds))

    def seconds(self, tokens: int) -> float | None:
        """Predict the seconds of a load; None before the first load.

        The prediction errs on the high side: a smaller load takes as long as a measured load, a
        larger load takes longer in proportion. A single long load, often the first, affects the
        prediction only briefly.
        """
        if not self._last:
            return None
        return median_low([s * max(1.0, tokens / t) for t, s in self._last])


class LoadWorth:
    """The decision between loading and computing; used by a single thread.

    Attributes:
        load: seconds of loads, without the wait for steps of further requests.
        _ask_s: seconds that requests waited for the last answers about the pool's blocks.
        _step_s: seconds of the last steps that computed nearly nothing.
        _token_s: seconds that each token of a prompt added to the last large steps.
        _declined: decisions of ``pays_to_ask`` to compute, including probes; never reset.
        _probing: True after a decision to probe, until a load begins, the pool has no blocks, or
            the next refusal.
    """

    def __init__(self) -> None:
        self.load = LoadCost()
        self._ask_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._token_s: deque[float] = deque(maxlen=_KEPT)
        self._declined = 0
        self._probing = False

    def computed(self, tokens: int, seconds: float) -> None:
        """Add the duration of a step that loaded nothing."""
        if tokens <= SMALL_STEP:
            self._step_s.append(seconds)
        elif tokens >= LARGE_STEP:
            self._token_s.append(max(seconds - self._small_step_s(), 0.0) / tokens)

    def asked(self, seconds: float) -> None:
        """Add the seconds that a request waited for the answer about the pool's blocks."""
        self._ask_s.append(seconds)

    def pays_to_ask(self, tokens: int) -> bool:
        """Return whether to ask the pool for up to ``tokens`` tokens; sometimes True as a probe."""
        ask_s = median_low(self._ask_s) if self._ask_s else 0.0
        load_s = self.load.seconds(tokens)
        # Before the first load: a read costs at least one more trip to the pool.
        cost_s = ask_s + (ask_s if load_s is None else load_s)
        if not self._token_s or self._saves(tokens, cost_s):
            return True
        self._declined += 1
        self._probing = self._declined % PROBE_EVERY == 0
        return self._probing

    def pays(self, tokens: int) -> bool:
        """Return whether to load ``tokens`` tokens."""
        load_s = self.load.seconds(tokens)
        if self._probing or load_s is None or not self._token_s:
            return True
        return self._saves(tokens, load_s)

    def begun(self) -> None:
        """Record the begin of a load, which ends a probe."""
        self._probing = False

    def found_nothing(self) -> None:
        """Record that the pool has no blocks for a request; a probe without a load ends, too."""
        self._probing = False

    def _saves(self, tokens: int, cost_s: float) -> bool:
        # The engine learns of the end of a load after a step, and only then computes the rest.
        cost_s += self._small_step_s()
        return StepCost(median_low(self._token_s)).spared_s(cost_s, start=0, tokens=tokens) > 0.0

    def _small_step_s(self) -> float:
        return median_low(self._step_s) if self._step_s else 0.0


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
