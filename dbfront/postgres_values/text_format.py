"""Values to PostgreSQL's text format (and to COPY's): one encoder per column type.

``text_encoder`` picks the function once per column; data_rows and COPY then call it per value,
never with None. Forms follow PostgreSQL 16 with DateStyle ISO, IntervalStyle postgres and
bytea_output hex.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from tierkv.dbfront.postgres_values.interval_format import interval_text
from tierkv.dbfront.postgres_values.json_format import any_json, json_form
from tierkv.dbfront.postgres_values.type_functions import function_name
from tierkv.dbfront.postgres_values.types import INT2VECTOR, OIDVECTOR, PgType, is_composite

TextForm = Callable[[Any], str]

_BARE_ARRAY_BREAKERS: Final = frozenset('{},"\\ \t\n\r\v\f')


def bool_text(value: Any) -> str:
    """``t`` or ``f``."""
    return "t" if value else "f"


def float8_text(value: float) -> str:
    """Shortest text that reads back the same, in PostgreSQL's spelling."""
    text = repr(float(value))
    if "e" not in text and "n" not in text and -1e15 < value < 1e15:
        return text.removesuffix(".0")
    return _pg_float(repr(float(value)), value, fixed_below=15)


def float4_text(value: float) -> str:
    """Shortest text that reads back the same as a 4-byte float."""
    if not math.isfinite(value):
        return _special(value)
    wanted = struct.pack("!f", value)
    for digits in range(6, 10):
        text = f"{value:.{digits}g}"
        if struct.pack("!f", float(text)) == wanted:
            break
    return _pg_float(repr(float(text)), value, fixed_below=6)


def _special(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _pg_float(shortest: str, value: float, *, fixed_below: int) -> str:
    if not math.isfinite(value):
        return _special(value)
    sign, digits, exponent = Decimal(shortest).normalize().as_tuple()
    assert isinstance(exponent, int)
    prefix = "-" if sign or math.copysign(1.0, value) < 0 else ""
    if value == 0:
        return f"{prefix}0"
    point = len(digits) + exponent - 1
    text = "".join(map(str, digits))
    if -4 <= point < fixed_below:
        return prefix + format(Decimal((0, digits, exponent)), "f")
    mantissa = text[0] + ("." + text[1:] if len(text) > 1 else "")
    return f"{prefix}{mantissa}e{'-' if point < 0 else '+'}{abs(point):02d}"


def numeric_text(value: Any) -> str:
    """Digits without an exponent."""
    if isinstance(value, Decimal):
        if value.is_infinite():
            return "Infinity" if value > 0 else "-Infinity"
        return "NaN" if value.is_nan() else format(value, "f")
    return str(value)


def bytea_text(value: Any) -> str:
    r"""``\x`` and hex digits."""
    return "\\x" + bytes(value).hex()


def date_text(value: Any) -> str:
    """ISO; years Python can't hold come from DuckDB as text."""
    return value.isoformat() if isinstance(value, dt.date) else _foreign_date(value)


def _foreign_date(value: Any) -> str:
    return str(value).replace("(BC)", "BC")


def _trim(text: str) -> str:
    """Cut trailing zeros of a fraction, as PostgreSQL does."""
    return text.rstrip("0") if "." in text else text


def _offset(value: dt.datetime | dt.time) -> str:
    delta = value.utcoffset()
    if delta is None:
        return "+00"
    seconds = int(delta.total_seconds())
    sign = "-" if seconds < 0 else "+"
    hours, rest = divmod(abs(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    text = f"{sign}{hours:02d}"
    if minutes or seconds:
        text += f":{minutes:02d}"
    return text + (f":{seconds:02d}" if seconds else "")


def time_text(value: Any) -> str:
    """HH:MM:SS[.ffffff]."""
    return _trim(value.isoformat()) if isinstance(value, dt.time) else str(value)


def timetz_text(value: Any) -> str:
    """HH:MM:SS[.ffffff]+HH[:MM]."""
    if not isinstance(value, dt.time):
        return str(value)
    return _trim(value.replace(tzinfo=None).isoformat()) + _offset(value)


def timestamp_text(value: Any) -> str:
    """YYYY-MM-DD HH:MM:SS[.ffffff]."""
    if not isinstance(value, dt.datetime):
        return _foreign_date(value)
    return _trim(value.isoformat(" "))


def timestamptz_text(value: Any) -> str:
    """YYYY-MM-DD HH:MM:SS[.ffffff]+HH[:MM], in the offset the value carries."""
    if not isinstance(value, dt.datetime):
        return _foreign_date(value)
    return _trim(value.replace(tzinfo=None).isoformat(" ")) + _offset(value)


def plain_text(value: Any) -> str:
    """Text as it is; what is composed of values as JSON."""
    if isinstance(value, str):
        return value
    return any_json(value) if isinstance(value, dict | list | tuple) else _scalar_text(value)


def _scalar_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytea_text(value)
    if isinstance(value, dt.datetime):
        return timestamp_text(value) if value.tzinfo is None else timestamptz_text(value)
    if isinstance(value, dt.timedelta):
        return interval_text(value)
    return numeric_text(value) if isinstance(value, Decimal) else str(value)


def _array_text(element: TextForm) -> TextForm:
    def encode(value: Any) -> str:
        items = ("NULL" if item is None else _array_item(element(item)) for item in value)
        return "{" + ",".join(items) + "}"

    return encode


def _array_item(text: str) -> str:
    if text and text.upper() != "NULL" and not _BARE_ARRAY_BREAKERS.intersection(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_FORMS: Final[dict[str, TextForm]] = {
    "bool": bool_text,
    "bytea": bytea_text,
    "int2": str,
    "int4": str,
    "int8": str,
    "oid": str,
    "regproc": function_name,
    "float4": float4_text,
    "float8": float8_text,
    "numeric": numeric_text,
    "date": date_text,
    "time": time_text,
    "timetz": timetz_text,
    "timestamp": timestamp_text,
    "timestamptz": timestamptz_text,
    "interval": interval_text,
    "uuid": str,
}


def text_form(kind: PgType, duckdb_name: str = "") -> TextForm:
    """The function from a value of that type to its text."""
    if kind in (INT2VECTOR, OIDVECTOR):
        return lambda value: " ".join(map(str, value))
    if kind.element is not None:
        return _array_text(text_form(kind.element))
    if is_composite(duckdb_name):
        return json_form(duckdb_name, text_form)
    return _FORMS.get(kind.name, plain_text)


def text_encoder(kind: PgType, duckdb_name: str = "") -> Callable[[Any], bytes]:
    """The function from a value of that type to the bytes of its text format."""
    form = text_form(kind, duckdb_name)

    def encode(value: Any) -> bytes:
        # Lone surrogates can't come from DuckDB; NUL can, and PostgreSQL's text can't hold it.
        return form(value).encode("utf-8", "replace")

    return encode
