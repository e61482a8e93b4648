"""Whether loading blocks beats computing them in an engine of others, which shows only durations.

```
token_s = median((step - small step) / tokens)      of the last five steps of a prompt
load_s  = median(load * max(1, tokens / loaded))    of the last five loads
loads when load_s + small step < token_s * tokens   costing/service_time.py, ``spared_s``
```

Pure: tokens and seconds in, a decision out. What was not measured yet is loaded; what does not pay
is tried again now and then, since a pool, an engine and their load change. Medians, since one step
or load in such an engine may be held up by anything. integrations/vllm/connector_worth.py tells it
when steps and loads begin and end; integrations/vllm/connector_scheduler.py asks.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final

from tierkv.costing.service_time import StepCost

SMALL_STEP: Final = 8
"""Tokens of a step that tells what any step costs."""

LARGE_STEP: Final = 64
"""Tokens of a step that tells what a token of a prompt costs."""

PROBE_EVERY: Final = 16
"""One decision in so many that computing pays is not followed, to measure a load."""
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
        load: what loads took, without waiting for steps of others.
        _ask_s: how long the last answers about what the pool has were waited for.
        _step_s: what the last steps took that computed nearly nothing.
        _token_s: what a token of a prompt added to the last large ones.
        _declined: decisions to compute since the last one to load.
    """

    def __init__(self) -> None:
        self.load = LoadCost()
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

    def asked(self, seconds: float) -> None:
        """Take note of how long a request waited to hear what the pool has of it."""
        self._ask_s.append(seconds)

    def pays_to_ask(self, tokens: int) -> bool:
        """Whether to ask the pool for so many tokens at most; a probe now and then."""
        ask_s = median_low(self._ask_s) if self._ask_s else 0.0
        load_s = self.load.seconds(tokens)
        # As long as nothing was loaded: reading is one more trip to the pool, at least.
        cost_s = ask_s + (ask_s if load_s is None else load_s)
        if not self._token_s or self._saves(tokens, cost_s):
            return True
        self._declined += 1
        self._probing = self._declined % PROBE_EVERY == 0
        return self._probing

    def pays(self, tokens: int) -> bool:
        """Whether to load so many tokens."""
        load_s = self.load.seconds(tokens)
        if self._probing or load_s is None or not self._token_s:
            return True
        return self._saves(tokens, load_s)

    def begun(self) -> None:
        """Take note of a load, which ends a probe."""
        self._probing = False

    def _saves(self, tokens: int, cost_s: float) -> bool:
        # The engine hears of a load's end after a step, and only then begins the rest.
        cost_s += self._small_step_s()
        return StepCost(median_low(self._token_s)).spared_s(cost_s, start=0, tokens=tokens) > 0.0

    def _small_step_s(self) -> float:
        return median_low(self._step_s) if self._step_s else 0.0
