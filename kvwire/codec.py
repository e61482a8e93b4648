"""Converts a dataclass to its protobuf message and back: one table per message, checks per field.

kvwire/convert.py and metaserver/rpc/wire.py declare the tables. A field without an entry is copied
unchanged. Bounds are checked once, for received messages only. A message outside the bounds is a
fault of the peer (RemoteProtocolError), and the error names message and field; faults of a user are
checked in the conversion itself and raise UserError. Values sent once per token or per chain have
hand-written conversions (kvwire/convert_compute.py, metaserver/rpc/wire.py), which call the
checks directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError, TierKVError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey

_Choice = TypeVar("_Choice", bound=StrEnum)
_NAME = re.compile(limits.NAME_PATTERN)

Value = TypeVar("Value")
Message = TypeVar("Message")


def checked_key(raw: bytes, field: str) -> BlockKey:
    """Return ``raw`` as a block key.

    Raises:
        RemoteProtocolError: ``raw`` does not have 16 bytes.
    """
    if len(raw) != BLOCK_KEY_BYTES:
        raise RemoteProtocolError(f"{field} must have {BLOCK_KEY_BYTES} bytes, got {len(raw)}")
    return BlockKey(raw)


def split_keys(raw: bytes, field: str) -> tuple[BlockKey, ...]:
    """Return concatenated block keys.

    Raises:
        RemoteProtocolError: the last key is cut.
    """
    if len(raw) % BLOCK_KEY_BYTES:
        raise RemoteProtocolError(f"{field} must have whole keys, got {len(raw)} bytes")
    step = BLOCK_KEY_BYTES
    return tuple(BlockKey(raw[at : at + step]) for at in range(0, len(raw), step))


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


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Conversion of one field.

    Attributes:
        unpack: converts the message's field; the second argument is the field name. Raises
            RemoteProtocolError.
        pack: converts the value's field; None copies the field.
    """

    unpack: Callable[[Any, str], Any]
    pack: Callable[[Any], Any] | None = None


class MessageCodec(Generic[Value, Message]):
    """Converts between a dataclass and a message with the same fields.

    Attributes:
        label: name of the message in errors.
    """

    def __init__(
        self,
        value: type[Value],
        message: type[Message],
        label: str,
        invalid: type[TierKVError] = RemoteProtocolError,
        /,
        **fields: FieldCodec,
    ) -> None:
        """Create a table.

        Args:
            value: the dataclass.
            message: the generated class.
            label: name of the message in errors.
            invalid: error class for a ValueError of the dataclass.
            fields: the fields with a conversion; the remaining fields are copied.
        """
        names = tuple(value.__dataclass_fields__)  # type: ignore[attr-defined]
        assert set(names) == set(message.DESCRIPTOR.fields_by_name), label  # type: ignore[attr-defined]
        assert set(fields) <= set(names), label
        self._value, self._message = value, message
        self.label, self._invalid = label, invalid
        self._names = names
        self._get = attrgetter(*names)
        self._unpacks = [
            (names.index(name), field.unpack, f"{label}.{name}") for name, field in fields.items()
        ]
        self._packs = [(name, field.pack) for name, field in fields.items() if field.pack]

    def to_proto(self, value: Value) -> Message:
        """Convert a trusted value. Empty and zero fields are omitted, as protobuf defaults."""
        values = zip(self._names, self._get(value), strict=True)
        fields = {name: value for name, value in values if value}
        for name, pack in self._packs:
            if name in fields:
                fields[name] = pack(fields[name])
        return self._message(**fields)

    def from_proto(self, message: Message) -> Value:
        """Convert a message.

        Raises:
            TierKVError: a value out of bounds; RemoteProtocolError unless the table names another
                class.
        """
        fields = list(self._get(message))
        for index, unpack, name in self._unpacks:
            fields[index] = unpack(fields[index], name)
        try:
            return self._value(*fields)
        except ValueError as error:
            ours = self._invalid is RemoteProtocolError  # The label means nothing to a user.
            raise self._invalid(f"{self.label}: {error}" if ours else str(error)) from error


NAME: Final = FieldCodec(checked_name)
NAME_OR_EMPTY: Final = FieldCodec(lambda raw, name: checked_name(raw, name) if raw else "")
AMOUNT: Final = FieldCodec(checked_amount)
NUMBERS: Final = FieldCodec(lambda raw, name: tuple(raw))
"""A repeated field of any length."""


def at_most(most: int) -> FieldCodec:
    """Return the codec of a repeated field of at most ``most`` items."""

    def unpack(raw: Sequence[Any], name: str) -> tuple[Any, ...]:
        check_count(raw, most, name)
        return tuple(raw)

    return FieldCodec(unpack)


def choice(kind: type[StrEnum]) -> FieldCodec:
    """Return the codec of a field with the values of an enum."""
    return FieldCodec(partial(checked_choice, kind))


def choice_or_none(kind: type[StrEnum]) -> FieldCodec:
    """Return the codec of an optional enum field; None is sent as the empty string."""
    return FieldCodec(lambda raw, name: checked_choice(kind, raw, name) if raw else None)


def one(codec: MessageCodec[Any, Any]) -> FieldCodec:
    """Return the codec of a message field."""
    return FieldCodec(lambda raw, name: codec.from_proto(raw), codec.to_proto)


def many(codec: MessageCodec[Any, Any], most: int) -> FieldCodec:
    """Return the codec of a repeated message field with at most ``most`` items."""

    def unpack(raw: Sequence[Any], name: str) -> tuple[Any, ...]:
        check_count(raw, most, name)
        return tuple(map(codec.from_proto, raw))

    return FieldCodec(unpack, lambda values: list(map(codec.to_proto, values)))
