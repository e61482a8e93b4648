"""How long answers get, by model and by what is asked for; learned from those that were given.

Kept by dbfront/generation/generation.py for forecasts. It forgets when the front ends.
"""

from __future__ import annotations

from tierkv.dbfront.contracts import PreparedCall, TextCall

_REMEMBERED = 100
"""About so many answers count, the newest most."""


class AnswerLengths:
    """Mean tokens of answers, fading."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def learn(self, prepared: PreparedCall, tokens: int) -> None:
        """Take the length of an answer in."""
        key = _key(prepared)
        count = self._counts[key] = min(self._counts.get(key, 0) + 1, _REMEMBERED)
        mean = self._means.get(key, 0.0)
        self._means[key] = mean + (tokens - mean) / count

    def expected(self, prepared: PreparedCall) -> float | None:
        """Say how long an answer will be, at most what is allowed; None while nobody knows."""
        mean = self._means.get(_key(prepared))
        return None if mean is None else min(mean, float(most_tokens(prepared)))


def most_tokens(prepared: PreparedCall) -> int:
    """Return how long an answer may get."""
    if prepared.call.embed:
        return 0
    return 1 if prepared.call.labels else prepared.request.sampling.max_tokens


def _key(prepared: PreparedCall) -> tuple[str, str]:
    return prepared.request.model, _kind(prepared.call)


def _kind(call: TextCall) -> str:
    if call.embed:
        return "embedding"
    if call.labels:
        return "label"
    return "json" if call.json_schema else "text"
