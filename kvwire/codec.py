"""One table per message: how a dataclass becomes its protobuf message, and how it comes back.

kvwire/convert.py and metaserver/rpc/wire.py declare the tables. A field without an entry is copied
as it is. Bounds are checked on the way in only, once, and the error names message and field. What
travels once per token or chain is converted by hand (kvwire/convert_compute.py, wire_locate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from tierkv.kvcore.errors import RemoteProtocolError, TierKVError
from tierkv.kvwire.check import check_count, checked_amount, checked_choice, checked_name

Value = TypeVar("Value")
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How one field travels.

    Attributes:
        unpack: takes what the message has and the name of the field; raises RemoteProtocolError.
        pack: takes what the value has; None copies it.
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
        """Make a table.

        Args:
            value: the dataclass.
            message: the generated class.
            label: name of the message in errors.
            invalid: the error of a value that the dataclass refuses with ValueError.
            fields: the fields that are not just copied.
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
        """Convert a value, which is trusted. Empty and zero are what a message begins with."""
        values = zip(self._names, self._get(value), strict=True)
        fields = {name: value for name, value in values if value}
        for name, pack in self._packs:
            if name in fields:
                fields[name] = pack(fields[name])
        return self._message(**fields)

    def from_proto(self, message: Message) -> Value:
        """Convert a message.

        Raises:
            TierKVError: a bound is broken; RemoteProtocolError if the table names no other.
        """
        fields = list(self._get(message))
        for index, unpack, name in self._unpacks:
            fields[index] = unpack(fields[index], name)
        try:
            return self._value(*fields)
        except ValueError as error:
            ours = self._invalid is RemoteProtocolError  # A user does not know the label.
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
    """Return the codec of a field with one of some names."""
    return FieldCodec(partial(checked_choice, kind))


def choice_or_none(kind: type[StrEnum]) -> FieldCodec:
    """Return the codec of such a field that may be None, which travels as the empty string."""
    return FieldCodec(lambda raw, name: checked_choice(kind, raw, name) if raw else None)


def one(codec: MessageCodec[Any, Any]) -> FieldCodec:
    """Return the codec of a field that is a message."""
    return FieldCodec(lambda raw, name: codec.from_proto(raw), codec.to_proto)


def many(codec: MessageCodec[Any, Any], most: int) -> FieldCodec:
    """Return the codec of a repeated field of messages, at most ``most``."""

    def unpack(raw: Sequence[Any], name: str) -> tuple[Any, ...]:
        check_count(raw, most, name)
        return tuple(map(codec.from_proto, raw))

    return FieldCodec(unpack, lambda values: list(map(codec.to_proto, values)))
