"""Whether loading blocks is faster than computing them, learnt from what both took.

Called by integrations/vllm/connector_scheduler.py in the scheduler's thread. Pure: tokens and
seconds in, a decision out. What was not measured yet is loaded; what does not pay is tried again
now and then, since a pool, an engine and their load change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Final

SMALL_STEP: Final = 8
"""Tokens of a step that tells what any step costs."""

LARGE_STEP: Final = 64
"""Tokens of a step that tells what a token of a prompt costs."""

_MOST_OPEN: Final = 64
_LONG_S: Final = 0.1
_PROBE_EVERY: Final = 16
_KEPT: Final = 5
"""Measurements that count; the median of so few follows a change after three."""


class LoadCost:
    """Seconds of a load, by what the last ones took."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, tokens: int, seconds: float) -> None:
        """Take one load in."""
        self._last.append((tokens, seconds))

    def seconds(self, tokens: int) -> float | None:
        """Predict a load; None before the first one.

        Rather too much than too little: smaller loads are as long as those seen, larger ones longer
        in proportion. One load that was long, as the first one may be, is not believed for long.
        """
        if not self._last:
            return None
        return median_low([s * max(1.0, tokens / t) for t, s in self._last])


class LoadWorth:
    """The decision; used by one thread.

    Attributes:
        _load: what loads took.
        _ask_s: how long the last answers about what the pool has were waited for.
        _step_s: what the last steps took that computed nearly nothing.
        _token_s: what a token of a prompt added to the last large ones.
        _declined: decisions to compute since the last one to load.
    """

    def __init__(self) -> None:
        self._load = LoadCost()
        self._ask_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._token_s: deque[float] = deque(maxlen=_KEPT)
        self._declined = 0
        self._probing = False

    def computed(self, tokens: int, seconds: float) -> None:
        """Take a step in that loaded nothing."""
        if tokens <= SMALL_STEP:
            self._step_s.append(seconds)
        elif tokens >= LARGE_STEP:
            self._token_s.append(max(seconds - self._small_step_s(), 0.0) / tokens)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Take a load in: what reading took, without waiting for steps of others."""
        self._load.add(tokens, seconds)

    def asked(self, seconds: float) -> None:
        """Take note of how long a request waited to hear what the pool has of it."""
        self._ask_s.append(seconds)

    def pays_to_ask(self, tokens: int) -> bool:
        """Whether to ask the pool for so many tokens at most; a probe now and then."""
        ask_s = median_low(self._ask_s) if self._ask_s else 0.0
        load_s = self._load.seconds(tokens)
        # As long as nothing was loaded: reading is one more trip to the pool, at least.
        cost_s = ask_s + (ask_s if load_s is None else load_s)
        if not self._token_s or self._saves(tokens, cost_s):
            return True
        self._declined += 1
        self._probing = self._declined % _PROBE_EVERY == 0
        return self._probing

    def pays(self, tokens: int) -> bool:
        """Whether to load so many tokens."""
        load_s = self._load.seconds(tokens)
        if self._probing or load_s is None or not self._token_s:
            return True
        return self._saves(tokens, load_s)

    def load_seconds(self, tokens: int) -> float | None:
        """Predict a load; None: nothing is known."""
        return self._load.seconds(tokens)

    def begun(self) -> None:
        """Take note of a load, which ends a probe."""
        self._probing = False

    def _saves(self, tokens: int, cost_s: float) -> bool:
        # The engine hears of a load's end after a step, and only then begins the rest.
        return cost_s + self._small_step_s() < median_low(self._token_s) * tokens

    def _small_step_s(self) -> float:
        return median_low(self._step_s) if self._step_s else 0.0


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
        small = tokens <= SMALL_STEP and self._number % _PROBE_EVERY == 0
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
        if whole or seconds > max(self.worth.load_seconds(tokens) or 0.0, _LONG_S):
            self.worth.loaded(tokens, seconds)
