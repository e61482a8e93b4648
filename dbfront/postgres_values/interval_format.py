"""Intervals: months, days and microseconds apart, as PostgreSQL and DuckDB keep them.

Python's timedelta has no months, so the session lets DuckDB write intervals as text
(catalog/intervals.py); the encoders read that text, or a timedelta where there is one.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import Any, Final

from tierkv.kvcore.errors import SqlError

_PARTS: Final = re.compile(r"(-?\d+) (year|month|day)s?")
_CLOCK: Final = re.compile(r"(-?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?$")
_MONTHS: Final = {"year": 12, "month": 1}


@dataclass(frozen=True, slots=True)
class IntervalParts:
    """An interval; parts may have different signs."""

    months: int
    days: int
    micros: int

    @property
    def text(self) -> str:
        """PostgreSQL's spelling, IntervalStyle postgres: ``1 year 2 mons -3 days +04:05:06``."""
        years = abs(self.months) // 12 * (-1 if self.months < 0 else 1)
        words: list[str] = []
        before = False
        for value, unit in ((years, "year"), (self.months - 12 * years, "mon"), (self.days, "day")):
            if value:
                plus = "+" if before and value > 0 else ""
                words.append(f"{plus}{value} {unit}{'' if value == 1 else 's'}")
                before = value < 0
        if self.micros or not words:
            sign = "-" if self.micros < 0 else "+" if before else ""
            seconds, fraction = divmod(abs(self.micros), 1_000_000)
            clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            words.append(sign + clock + (f".{fraction:06d}".rstrip("0") if fraction else ""))
        return " ".join(words)


def interval_parts(value: Any) -> IntervalParts:
    """Read DuckDB's text of an interval, or a timedelta.

    Raises:
        SqlError: 22007, neither.
    """
    if isinstance(value, dt.timedelta):
        micros, days = value.seconds * 1_000_000 + value.microseconds, value.days
        if days < 0 and micros:
            days, micros = days + 1, micros - 86_400_000_000
        return IntervalParts(0, days, micros)
    text = str(value).strip()
    clock = _CLOCK.search(text)
    rest = text[: clock.start()] if clock else text
    if _PARTS.sub("", rest).strip():
        raise SqlError(f"can't read interval {text!r}", sqlstate="22007")
    months = days = 0
    for count, unit in _PARTS.findall(rest):
        months += int(count) * _MONTHS.get(unit, 0)
        days += int(count) if unit == "day" else 0
    return IntervalParts(months, days, _micros(clock) if clock else 0)


def _micros(clock: re.Match[str]) -> int:
    seconds = (int(clock[2]) * 60 + int(clock[3])) * 60 + int(clock[4])
    micros = seconds * 1_000_000 + int((clock[5] or "").ljust(6, "0"))
    return -micros if clock[1] else micros


def interval_text(value: Any) -> str:
    """A value as PostgreSQL writes it."""
    return interval_parts(value).text
