"""Checks of received fields against their bounds; each error names the field.

Called by the conversions only. A message outside the bounds is a fault of the peer
(RemoteProtocolError). Faults of a user are checked in the conversion itself and raise UserError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Sized
from enum import StrEnum
from typing import TypeVar

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey

_Choice = TypeVar("_Choice", bound=StrEnum)
_NAME = re.compile(limits.NAME_PATTERN)


def checked_key(raw: bytes, field: str) -> BlockKey:
    """Return ``raw`` as a block key.

    Raises:
        RemoteProtocolError: ``raw`` does not have 16 bytes.
    """
    if len(raw) != BLOCK_KEY_BYTES:
        raise RemoteProtocolError(f"{field} must have {BLOCK_KEY_BYTES} bytes, got {len(raw)}")
    return BlockKey(raw)


def checked_name(text: str, field: str) -> str:
    """Return ``text`` if it matches ``limits.NAME_PATTERN``.

    Raises:
        RemoteProtocolError: ``text`` does not match.
    """
    if not _NAME.fullmatch(text):
        raise RemoteProtocolError(
            f"{field} {text[:40]!r} is not a name: 1 to {limits.MAX_NAME_CHARS} letters, digits "
            "and _ . : - /"
        )
    return text


def checked_choice(kind: type[_Choice], text: str, field: str) -> _Choice:
    """Return the member of ``kind`` with the value ``text``.

    Raises:
        RemoteProtocolError: no such member.
    """
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(kind)
        raise RemoteProtocolError(f"{field} {text[:40]!r} is none of {known}") from None


def check_count(items: Sized, most: int, field: str) -> None:
    """Refuse more than ``most`` items.

    Raises:
        RemoteProtocolError: too many items.
    """
    if len(items) > most:
        raise RemoteProtocolError(f"{field} has {len(items)} items, the limit is {most}")


def checked_amount(number: float, field: str) -> float:
    """Return ``number`` if it is finite and not negative.

    Raises:
        RemoteProtocolError: ``number`` is NaN, infinite or negative.
    """
    if not math.isfinite(number) or number < 0:
        raise RemoteProtocolError(f"{field} must be finite and not negative, got {number}")
    return number


def checked_numbers(numbers: Sequence[float], most: int, field: str) -> tuple[float, ...]:
    """Return ``numbers`` if there are at most ``most`` and all are finite.

    Raises:
        RemoteProtocolError: too many numbers, or a number that is not finite.
    """
    check_count(numbers, most, field)
    if not all(map(math.isfinite, numbers)):
        raise RemoteProtocolError(f"{field} has a number that is not finite")
    return tuple(numbers)
