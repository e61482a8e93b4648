"""Values to PostgreSQL's binary format: one encoder per column type.

``binary_encoder`` returns the function for a column, once per column; the function is never called
with None. Instants are microseconds since 2000-01-01, computed without Python's year limits,
because DuckDB returns dates outside years 1 to 9999 as text.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
import uuid
from collections.abc import Callable
from typing import Any, Final

from tierkv.dbfront.postgres_values.scalar_formats import interval_parts, numeric_binary
from tierkv.dbfront.postgres_values.text_format import text_encoder
from tierkv.dbfront.postgres_values.types import PgType
from tierkv.kvcore.errors import SqlError

Encoder = Callable[[Any], bytes]
"""Converts a value of one type to the bytes of the binary format."""

_EPOCH_DATE: Final = dt.date(2000, 1, 1).toordinal()
_EPOCH: Final = dt.datetime(2000, 1, 1)
_MICRO: Final = dt.timedelta(microseconds=1)
_DAY_MICROS: Final = 86_400_000_000
_INT4: Final = struct.Struct("!i").pack
_INT8: Final = struct.Struct("!q").pack
_INT4_MAX: Final = (1 << 31) - 1
_INT8_MAX: Final = (1 << 63) - 1
_FOREIGN = re.compile(
    r"(\d+)-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?( \(BC\)| BC)?([+-]\d\d)?"
)


def _packed(format_text: str) -> Encoder:
    pack = struct.Struct(format_text).pack

    def encode(value: Any) -> bytes:
        try:
            return pack(value)
        except struct.error:
            raise SqlError(f"value {value!r} out of range", sqlstate="22003") from None

    return encode


def _civil_days(year: int, month: int, day: int) -> int:
    """Return the days since 2000-01-01 in the proleptic Gregorian calendar; year 0 is 1 BC."""
    cycles, year_in_cycle = divmod(year, 400)
    moved = dt.date(year_in_cycle + 400, month, day).toordinal() - _EPOCH_DATE
    return moved + (cycles - 1) * 146_097


def _foreign_micros(text: str) -> tuple[int, int]:
    """Return days and microseconds of a date or timestamp outside Python's range."""
    match = _FOREIGN.fullmatch(text)
    if match is None:
        raise SqlError(f"can't send {text!r} in binary format", sqlstate="22008")
    year = int(match[1])
    days = _civil_days(1 - year if match[8] else year, int(match[2]), int(match[3]))
    clock = int(match[4] or 0) * 3600 + int(match[5] or 0) * 60 + int(match[6] or 0)
    clock -= int(match[9] or 0) * 3600
    return days, clock * 1_000_000 + int((match[7] or "0").ljust(6, "0"))


def _infinity(value: Any, limit: int) -> int | None:
    if isinstance(value, str) and value.endswith("infinity"):
        return -limit - 1 if value.startswith("-") else limit
    return None


def date_binary(value: Any) -> bytes:
    """Encode a date as days since 2000-01-01."""
    if isinstance(value, dt.date):
        return _INT4(value.toordinal() - _EPOCH_DATE)
    endless = _infinity(value, _INT4_MAX)
    return _INT4(_foreign_micros(value)[0] if endless is None else endless)


def _time_micros(value: Any) -> int:
    if isinstance(value, str):
        return 0 if value.startswith("24:") else _foreign_micros(f"2000-01-01 {value}")[1]
    clock = (value.hour * 60 + value.minute) * 60 + value.second
    return int(clock * 1_000_000 + value.microsecond)


def time_binary(value: Any) -> bytes:
    """Encode a time as microseconds since midnight."""
    return _INT8(_time_micros(value))


def timetz_binary(value: Any) -> bytes:
    """Encode microseconds since midnight, and seconds west of Greenwich."""
    offset = value.utcoffset() or dt.timedelta(0)
    return _INT8(_time_micros(value)) + _INT4(-int(offset.total_seconds()))


def timestamp_binary(value: Any) -> bytes:
    """Encode microseconds since 2000-01-01; a value with a time zone is converted to UTC first."""
    if isinstance(value, dt.datetime):
        offset = value.utcoffset() or dt.timedelta(0)
        return _INT8((value.replace(tzinfo=None) - _EPOCH - offset) // _MICRO)
    endless = _infinity(value, _INT8_MAX)
    if endless is not None:
        return _INT8(endless)
    days, micros = _foreign_micros(value)
    return _INT8(days * _DAY_MICROS + micros)


def interval_binary(value: Any) -> bytes:
    """Encode microseconds, days and months."""
    parts = interval_parts(value)
    return struct.pack("!qii", parts.micros, parts.days, parts.months)


def uuid_binary(value: Any) -> bytes:
    """Encode a UUID as sixteen bytes."""
    return value.bytes if isinstance(value, uuid.UUID) else uuid.UUID(str(value)).bytes


def _array_binary(element: PgType) -> Encoder:
    encode_item = binary_encoder(element)

    def encode(value: Any) -> bytes:
        parts = [b""]
        has_null = False
        for item in value:
            if item is None:
                has_null = True
                parts.append(b"\xff\xff\xff\xff")
            else:
                data = encode_item(item)
                parts.append(_INT4(len(data)))
                parts.append(data)
        dimensions = 1 if len(value) else 0
        parts[0] = struct.pack("!iiI", dimensions, has_null, element.oid)
        parts[0] += struct.pack("!ii", len(value), 1) if dimensions else b""
        return b"".join(parts)

    return encode


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "bool": lambda value: b"\1" if value else b"\0",
    "bytea": bytes,
    "int2": _packed("!h"),
    "int4": _packed("!i"),
    "int8": _packed("!q"),
    "oid": _packed("!I"),
    "regproc": _packed("!I"),
    "float4": _packed("!f"),
    "float8": _packed("!d"),
    "numeric": numeric_binary,
    "date": date_binary,
    "time": time_binary,
    "timetz": timetz_binary,
    "timestamp": timestamp_binary,
    "timestamptz": timestamp_binary,
    "interval": interval_binary,
    "uuid": uuid_binary,
}


def binary_encoder(kind: PgType, duckdb_name: str = "") -> Encoder:
    """Return the function from a value of the type to its binary format; text types send text."""
    if kind.element is not None:
        return _array_binary(kind.element)
    return _ENCODERS.get(kind.name) or text_encoder(kind, duckdb_name)
