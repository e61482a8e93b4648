"""PostgreSQL's binary numeric: base-10000 digits, exact in both directions.

binary_format.py and parameters.py call it. ``weight`` is the power of 10000 of the first digit,
``dscale`` the number of decimals shown.
"""

from __future__ import annotations

import struct
from decimal import Context, Decimal
from typing import Any, Final

from tierkv.kvcore.errors import RemoteProtocolError

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
    """Encode an int or Decimal (or their text) exactly."""
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
    """Decode exactly.

    Raises:
        RemoteProtocolError: not a numeric.
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
