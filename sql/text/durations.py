"""Times as SQL writes them: '1 hour', '2 days 03:00:00', '90 s'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_UNITS_S: Final[Mapping[str, float]] = {
    "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0,
}  # fmt: skip
_PART: Final = re.compile(
    r"(\d+(?:\.\d+)?)\s*(s|sec|secs|seconds?|m|min|mins|minutes?|h|hours?|d|days?|w|weeks?)\b"
    r"|(\d+):(\d\d):(\d\d(?:\.\d+)?)",
    re.IGNORECASE,
)


def seconds_of(text: str) -> float | None:
    """Return the seconds of a time; None for text that is none. Months and years are none."""
    seconds, at = 0.0, 0
    stripped = text.strip()
    while at < len(stripped):
        match = _PART.match(stripped, at)
        if match is None:
            return None
        if match[1]:
            seconds += float(match[1]) * _UNITS_S[match[2][0].lower()]
        else:
            seconds += int(match[3]) * 3600 + int(match[4]) * 60 + float(match[5])
        at = match.end()
        while at < len(stripped) and stripped[at].isspace():
            at += 1
    return seconds if stripped else None
