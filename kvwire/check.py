"""Bounds on what a peer may send, as small checks that name the field.

Called by the conversions only. A message outside the bounds is the peer's fault
(RemoteProtocolError); what a user can cause is checked as UserError in the conversion itself.
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
        RemoteProtocolError: it does not have 16 bytes.
    """
    if len(raw) != BLOCK_KEY_BYTES:
        raise RemoteProtocolError(f"{field} must have {BLOCK_KEY_BYTES} bytes, got {len(raw)}")
    return BlockKey(raw)


def checked_name(text: str, field: str) -> str:
    """Return ``text`` if it follows ``limits.NAME_PATTERN``.

    Raises:
        RemoteProtocolError: it does not.
    """
    if not _NAME.fullmatch(text):
        raise RemoteProtocolError(
            f"{field} {text[:40]!r} is not a name: 1 to {limits.MAX_NAME_CHARS} letters, digits "
            "and _ . : - /"
        )
    return text


def checked_choice(kind: type[_Choice], text: str, field: str) -> _Choice:
    """Return the member of ``kind`` that ``text`` names.

    Raises:
        RemoteProtocolError: there is none.
    """
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(kind)
        raise RemoteProtocolError(f"{field} {text[:40]!r} is none of {known}") from None


def check_count(items: Sized, most: int, field: str) -> None:
    """Refuse more than ``most`` items.

    Raises:
        RemoteProtocolError: there are more.
    """
    if len(items) > most:
        raise RemoteProtocolError(f"{field} has {len(items)} items, the limit is {most}")


def checked_amount(number: float, field: str) -> float:
    """Return ``number`` if it is finite and not negative.

    Raises:
        RemoteProtocolError: it is NaN, infinite or negative.
    """
    if not math.isfinite(number) or number < 0:
        raise RemoteProtocolError(f"{field} must be finite and not negative, got {number}")
    return number


def checked_numbers(numbers: Sequence[float], most: int, field: str) -> tuple[float, ...]:
    """Return ``numbers`` if there are few enough and all are finite.

    Raises:
        RemoteProtocolError: they are not.
    """
    check_count(numbers, most, field)
    if not all(map(math.isfinite, numbers)):
        raise RemoteProtocolError(f"{field} has a number that is not finite")
    return tuple(numbers)
