"""Replies that several engines share: OpenAI's JSON (models, choices, usage), and pages of metrics.

Pure; called by the doors of the engines. Content of an unexpected form raises a RemoteProtocolError
with the engine's name. Pages in Prometheus' text format come from many versions, so unreadable
lines are skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tierkv.integrations.remote.door import Counts
from tierkv.kvcore.errors import RemoteProtocolError, UnknownModelError
from tierkv.kvcore.request import HitTokens

_MOST_ID: Final = 1 << 31


def listed_model(reply: dict[str, Any], served: str, where: str) -> dict[str, Any]:
    """Return the model's entry in ``GET /v1/models``: the named model, or the first.

    Raises:
        UnknownModelError: the named model is missing, or the list is empty.
    """
    listed = reply.get("data")
    if not isinstance(listed, list) or not all(isinstance(m, dict) and "id" in m for m in listed):
        raise RemoteProtocolError(f"{where}: GET /v1/models did not return a list of models")
    found = next((model for model in listed if served in ("", model["id"])), None)
    if found is None:
        names = ", ".join(str(model["id"]) for model in listed) or "none"
        raise UnknownModelError(
            f"{where} serves no model {served!r}" if served else f"{where} serves no model",
            hint=f"The engine serves {names}; select one with engine.served_model.",
        )
    return dict(found)


def only_choice(event: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Return the first choice of a reply or event; None without choices (usage alone)."""
    choices = event.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise RemoteProtocolError(f"{where}: choices are not a list of objects")
    return dict(choices[0])


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Return the tokens of a piece of an answer; null means no tokens."""
    ids = value if value is not None else []
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < _MOST_ID for t in ids):
        raise RemoteProtocolError(f"{where}: token ids are not a list of numbers")
    return tuple(ids)


def counts_of(event: dict[str, Any]) -> Counts | None:
    """Return the token counts of an event's ``usage``; None without ``usage``."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Counts(
        whole(usage.get("prompt_tokens")),
        whole(usage.get("completion_tokens")),
        HitTokens(l1=whole(cached)),
    )


def whole(value: Any) -> int:
    """Return a count; 0 if the value is not a positive integer."""
    return value if isinstance(value, int) and value > 0 else 0


_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: labels and value."""

    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The samples of a page, by name."""

    def __init__(self, text: str) -> None:
        """Parse a page; O(length of the page)."""
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            found = _LINE.match(line)
            if found is None:
                continue
            name, labels, value = found.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                sample = Sample(dict(_LABEL.findall(labels or "")), number)
                self._samples.setdefault(name, []).append(sample)

    def total(self, name: str) -> float:
        """Return the sum of a metric over all labels (ranks, models); 0.0 for an unknown metric."""
        return math.fsum(sample.value for sample in self._samples.get(name, ()))

    def most(self, name: str) -> float:
        """Return the largest value of a metric; 0.0 for an unknown metric."""
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a metric's first sample; empty for an unknown metric."""
        samples = self._samples.get(name)
        return samples[0].labels if samples else {}
