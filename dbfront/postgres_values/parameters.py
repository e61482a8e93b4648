"""Parameters from the wire to Python values: text and binary, by PostgreSQL type.

portals.py calls ``decode_parameter`` for each Bind parameter. Text that DuckDB parses better
(dates, uuids, JSON) stays text, and the statement casts the text. A value that does not fit its
type is the user's error (22P02, 22P03). PostgreSQL drops void arguments, and ``without_void`` does
the same: pgJDBC sends ``{ ? = call f(?) }`` as ``select * from f($1,$2)`` with a void NULL for the
result.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, Final

from tierkv.dbfront.postgres_values.scalar_formats import numeric_from_binary
from tierkv.dbfront.postgres_values.types import TEXT, PgType
from tierkv.kvcore.errors import ProtocolError, SqlError, UserError
from tierkv.sql.text.exact_values import SPACES, parse_array
from tierkv.sql.text.lexer import Token, TokenKind, tokenize

_VOID: Final = 2278


def declared_types(types: bytes) -> tuple[int, ...]:
    """Read the type OIDs at the end of a Parse message: a count, then the OIDs."""
    count = int.from_bytes(types[:2], "big")
    return tuple(int.from_bytes(types[2 + 4 * at : 6 + 4 * at], "big") for at in range(count))


def without_void(text: str, oids: Sequence[int]) -> str:
    """Blank the void arguments of calls; all other tokens keep the same positions.

    Args:
        text: text of a Parse message.
        oids: OIDs of the parameter types in the same message.
    """
    void = {f"${number}" for number, oid in enumerate(oids, 1) if oid == _VOID}
    if not void:
        return text
    try:
        tokens = tokenize(text)
    except UserError:
        return text
    blanked = list(text)
    for index in range(1, len(tokens) - 1):
        if tokens[index].kind is TokenKind.PARAMETER and tokens[index].text in void:
            for gone in _argument(tokens, index):
                blanked[gone.start : gone.end] = " " * (gone.end - gone.start)
    return "".join(blanked)


def _argument(tokens: list[Token], index: int) -> list[Token]:
    """Return the tokens of a parameter that is a whole argument, with one adjacent comma."""
    before, after = tokens[index - 1], tokens[index + 1]
    if before.text not in ("(", ",") or after.text not in (",", ")"):
        return []
    if after.text == ",":
        return [tokens[index], after]
    return [before, tokens[index]] if before.text == "," else [tokens[index]]


_EPOCH_DATE: Final = dt.date(2000, 1, 1).toordinal()
_EPOCH: Final = dt.datetime(2000, 1, 1)
_TRUE: Final = ("t", "true", "y", "yes", "on", "1")
_FALSE: Final = ("f", "false", "n", "no", "off", "0")
_MAX_DIMENSIONS: Final = 6


def decode_parameter(data: bytes, kind: PgType, format_code: int) -> Any:
    """Decode one parameter to a value that DuckDB can bind.

    Args:
        data: the bytes of the parameter, not NULL.
        kind: the declared or inferred type.
        format_code: 0 text, 1 binary.

    Raises:
        SqlError: 22P02 or 22P03, the value does not fit the type; 22021, not UTF-8 or a NUL
            character.
    """
    try:
        value = _from_binary(data, kind) if format_code else _from_text(data.decode(), kind)
    except UnicodeDecodeError:
        raise SqlError("invalid byte sequence for encoding UTF8", sqlstate="22021") from None
    except (ValueError, InvalidOperation, struct.error, OverflowError, ProtocolError):
        form, state = ("binary", "22P03") if format_code else ("text", "22P02")
        shown = "" if format_code else f": {data[:64].decode(errors='replace')!r}"
        raise SqlError(
            f"invalid {form} representation for type {kind.name}{shown}", sqlstate=state
        ) from None
    if isinstance(value, str) and "\0" in value:  # PostgreSQL's text can't hold NUL
        raise SqlError('invalid byte sequence for encoding "UTF8": 0x00', sqlstate="22021")
    return value


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(text)


def _bytea(text: str) -> bytes:
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    out = bytearray()
    raw = text.encode()
    at = 0
    while at < len(raw):
        if raw[at] != 0x5C:
            out.append(raw[at])
            at += 1
        elif raw[at + 1 : at + 2] == b"\\":
            out.append(0x5C)
            at += 2
        else:
            out.append(int(raw[at + 1 : at + 4].decode(), 8))
            at += 4
    return bytes(out)


def _plain_int(text: str) -> int:
    if "_" in text:
        raise ValueError(text)
    return int(text)


_WITH_OFFSET = re.compile(r"(.*?\d)\s*(?:[+-]\d\d(?::?\d\d){0,2}|Z)", re.DOTALL)
_DATE_WITH_OFFSET = re.compile(r"(\d{4,}-\d\d-\d\d)\s*(?:[+-]\d\d(?::?\d\d){0,2}|Z)")


def _without_offset(text: str) -> str:
    """Cut the offset of a time or timestamp without zone; JDBC sends an offset with each value."""
    match = _WITH_OFFSET.fullmatch(text.strip(SPACES)) if ":" in text else None
    return match[1] if match else text


def _date_text(text: str) -> str:
    match = _DATE_WITH_OFFSET.fullmatch(text.strip(SPACES))
    return match[1] if match else text


_FROM_TEXT: Final[dict[str, Callable[[str], Any]]] = {
    "bool": _bool,
    "int2": _plain_int,
    "int4": _plain_int,
    "int8": _plain_int,
    "oid": _plain_int,
    "regproc": _plain_int,
    "float4": float,
    "float8": float,
    "numeric": Decimal,
    "bytea": _bytea,
    "interval": lambda text: text.replace("+", ""),  # DuckDB reads no plus sign
    "date": _date_text,
    "time": _without_offset,
    "timestamp": _without_offset,
}


def _from_text(text: str, kind: PgType) -> Any:
    if kind.element is not None:
        return parse_array(text, partial(_from_text, kind=kind.element))
    convert = _FROM_TEXT.get(kind.name)
    return convert(text) if convert else text


def _exact(format_text: str) -> Callable[[bytes], Any]:
    unpack = struct.Struct(format_text).unpack
    return lambda data: unpack(data)[0]


def _date(data: bytes) -> Any:
    days = int(_exact("!i")(data))
    if abs(days) >= (1 << 31) - 1:
        return "infinity" if days > 0 else "-infinity"
    return dt.date.fromordinal(days + _EPOCH_DATE)


def _clock(micros: int) -> dt.time:
    if not 0 <= micros < 86_400_000_000:
        raise ValueError("time out of range")
    return (_EPOCH + dt.timedelta(microseconds=micros)).time()


def _timetz(data: bytes) -> dt.time:
    micros, west = struct.unpack("!qi", data)
    return _clock(micros).replace(tzinfo=dt.timezone(dt.timedelta(seconds=-west)))


def _timestamp(data: bytes) -> Any:
    micros = int(_exact("!q")(data))
    if abs(micros) >= (1 << 63) - 1:
        return "infinity" if micros > 0 else "-infinity"
    return _EPOCH + dt.timedelta(microseconds=micros)


def _timestamptz(data: bytes) -> Any:
    value = _timestamp(data)
    # Text, because DuckDB would need pytz to bind a datetime with a time zone.
    return f"{value.isoformat(' ')}+00" if isinstance(value, dt.datetime) else value


def _interval(data: bytes) -> str:
    micros, days, months = struct.unpack("!qii", data)
    return f"{months} months {days} days {micros} microseconds"


def _jsonb(data: bytes) -> str:
    if data[:1] != b"\1":
        raise ValueError("unknown jsonb version")
    return data[1:].decode()


_FROM_BINARY: Final[dict[str, Callable[[bytes], Any]]] = {
    "bool": _exact("!?"),
    "int2": _exact("!h"),
    "int4": _exact("!i"),
    "int8": _exact("!q"),
    "oid": _exact("!I"),
    "regproc": _exact("!I"),
    "float4": _exact("!f"),
    "float8": _exact("!d"),
    "numeric": numeric_from_binary,
    "bytea": bytes,
    "date": _date,
    "time": lambda data: _clock(_exact("!q")(data)),
    "timetz": _timetz,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "interval": _interval,
    "uuid": lambda data: uuid.UUID(bytes=data),
    "jsonb": _jsonb,
}


def _from_binary(data: bytes, kind: PgType) -> Any:
    if kind.element is not None:
        return _array_from_binary(data, kind.element)
    convert = _FROM_BINARY.get(kind.name)
    return convert(data) if convert else data.decode()


def _array_from_binary(data: bytes, element: PgType) -> list[Any]:
    dimensions, _, _ = struct.unpack_from("!iiI", data)
    if not 0 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError("bad array")
    sizes = [struct.unpack_from("!ii", data, 12 + 8 * at)[0] for at in range(dimensions)]
    total = 1
    for size in sizes:
        total *= size
        if size < 0 or total > len(data):
            raise ValueError("bad array")
    at = 12 + 8 * dimensions
    values: list[Any] = []
    for _ in range(total if dimensions else 0):
        (length,) = struct.unpack_from("!i", data, at)
        at += 4
        if length < -1 or at + max(0, length) > len(data):
            raise ValueError("bad array")
        values.append(None if length < 0 else _from_binary(data[at : at + length], element))
        at += max(0, length)
    if at != len(data):
        raise ValueError("bad array")
    return _shape(values, sizes)


def _shape(values: list[Any], sizes: list[int]) -> list[Any]:
    """Cut a flat list into nested lists of the given sizes."""
    for size in reversed(sizes[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)] if size else []
    return values


def is_text(kind: PgType) -> bool:
    """Return True if parameters of the type are bound as plain text, without a cast."""
    return kind.name == TEXT.name
