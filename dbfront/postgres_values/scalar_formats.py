"""The formats of intervals and numerics, the two scalar types with more than one field.

An interval keeps months, days and microseconds apart, as PostgreSQL and DuckDB do. Python's
timedelta has no months, so DuckDB writes intervals as text
(postgres_dialect/session/queries.py), and the encoders parse the text or a timedelta. A binary
numeric has base-10000 digits and is exact in both directions: ``weight`` is the power of 10000 of
the first digit, ``dscale`` the number of decimals shown.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, Final

from tierkv.kvcore.errors import RemoteProtocolError, SqlError

_HEAD: Final = struct.Struct("!HhHH")
_POSITIVE: Final = 0x0000
_NEGATIVE: Final = 0x4000
_NAN: Final = 0xC000
_INFINITY: Final = 0xD000
_MINUS_INFINITY: Final = 0xF000
_SPECIAL: Final = {
    _NAN: Decimal("NaN"),
    _INFINITY: Decimal("Infinity"),
    _MINUS_INFINITY: Decimal("-Infinity"),
}
_EXACT: Final = Context(prec=200_000)


def numeric_binary(value: Any) -> bytes:
    """Encode an int or Decimal, or the text of either, exactly."""
    number = value if isinstance(value, Decimal) else Decimal(value)
    if number.is_nan():
        return _HEAD.pack(0, 0, _NAN, 0)
    if number.is_infinite():
        return _HEAD.pack(0, 0, _INFINITY if number > 0 else _MINUS_INFINITY, 0)
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    text = "".join(map(str, digits)) + "0" * max(0, exponent)
    whole, fraction = (text[:-scale], text[-scale:].rjust(scale, "0")) if scale else (text, "")
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and groups[0] == 0:
        groups.pop(0)
        weight -= 1
    while groups and groups[-1] == 0:
        groups.pop()
    head = _HEAD.pack(
        len(groups), weight if groups else 0, _NEGATIVE if sign and groups else _POSITIVE, scale
    )
    return head + struct.pack(f"!{len(groups)}H", *groups)


def numeric_from_binary(data: bytes) -> Decimal:
    """Decode a binary numeric exactly.

    Raises:
        RemoteProtocolError: the bytes are not a numeric.
    """
    if len(data) < _HEAD.size:
        raise RemoteProtocolError("invalid binary numeric: too short")
    count, weight, sign, scale = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + 2 * count:
        raise RemoteProtocolError("invalid binary numeric: wrong length")
    if sign in _SPECIAL:
        return _SPECIAL[sign]
    if sign not in (_POSITIVE, _NEGATIVE) or scale > 0x3FFF:
        raise RemoteProtocolError("invalid binary numeric: bad sign or scale")
    groups = struct.unpack_from(f"!{count}H", data, _HEAD.size)
    if any(group > 9999 for group in groups):
        raise RemoteProtocolError("invalid binary numeric: bad digit")
    return _assemble(groups, weight, scale, negative=sign == _NEGATIVE)


def _assemble(groups: tuple[int, ...], weight: int, scale: int, *, negative: bool) -> Decimal:
    coefficient = int("".join(f"{group:04d}" for group in groups) or "0")
    exponent = 4 * (weight + 1 - len(groups))
    number = Decimal(coefficient).scaleb(exponent, context=_EXACT) if coefficient else Decimal(0)
    number = number.quantize(Decimal(1).scaleb(-scale, context=_EXACT), context=_EXACT)
    return number.copy_negate() if negative else number  # unary minus would round


_PARTS: Final = re.compile(r"(-?\d+) (year|month|day)s?")
_CLOCK: Final = re.compile(r"(-?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?$")
_MONTHS: Final = {"year": 12, "month": 1}


@dataclass(frozen=True, slots=True)
class IntervalParts:
    """An interval; the three fields may have different signs."""

    months: int
    days: int
    micros: int

    @property
    def text(self) -> str:
        """Return PostgreSQL's text, IntervalStyle postgres: ``1 year 2 mons -3 days +04:05:06``."""
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
    """Parse DuckDB's text of an interval, or convert a timedelta.

    Raises:
        SqlError: 22007, the text is not an interval.
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
        raise SqlError(f'invalid input syntax for type interval: "{text}"', sqlstate="22007")
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
    """Return an interval as PostgreSQL writes it."""
    return interval_parts(value).text
