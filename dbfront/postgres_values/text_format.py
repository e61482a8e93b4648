"""Values in PostgreSQL's text format, which COPY uses too: one encoder per column type.

``text_encoder`` returns the function for a column, once per column; data rows and COPY call the
function per value, never with None. The text follows PostgreSQL 16 with DateStyle ISO,
IntervalStyle postgres and bytea_output hex. Structs, maps, unions and nested lists have no
PostgreSQL type and become JSON as ``to_json`` writes JSON: bare numbers, NaN and infinities as
strings, bytes as hex, map keys as strings.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from tierkv.dbfront.postgres_values.scalar_formats import interval_text
from tierkv.dbfront.postgres_values.types import (
    INT2VECTOR,
    OIDVECTOR,
    PgType,
    function_name,
    is_composite,
    pg_type,
)

JsonForm = Callable[[Any], str]
ScalarForms = Callable[[PgType], Callable[[Any], str]]

_BARE: Final = frozenset({"int2", "int4", "int8", "oid", "numeric", "float4", "float8"})
_DATED: Final = frozenset({"timestamp", "timestamptz"})
_LONG_NAMES: Final = ("TIMESTAMP WITH TIME ZONE", "TIME WITH TIME ZONE")
_QUOTED: Final = re.compile(r'"((?:[^"]|"")*)"(?=\s)')
_OPENING: Final = {"(": 1, ")": -1, "[": 1, "]": -1}


def json_form(duckdb_name: str, scalars: ScalarForms) -> JsonForm:
    """Return the function from a value of a DuckDB type to JSON text.

    Args:
        duckdb_name: the type, for example ``STRUCT(a INTEGER, b VARCHAR[])``.
        scalars: returns the text function of a type that is not composite.
    """
    form = _form(duckdb_name.strip(), scalars)
    return lambda value: "null" if value is None else form(value)


def _form(name: str, scalars: ScalarForms) -> JsonForm:
    if name.endswith("]"):
        return _list_form(json_form(name[: name.rindex("[")], scalars))
    upper = name.upper()
    if upper.startswith("TUPLE("):
        return _struct_form([("", kind) for kind in _parts(name)], scalars)
    if upper.startswith("STRUCT("):
        return _struct_form(_fields(name), scalars)
    if upper.startswith("MAP("):
        parts = list(_parts(name))
        if len(parts) == 2:
            return _map_form(scalars, parts[0], parts[1])
    if upper.startswith("UNION("):
        return any_json
    return _scalar_form(name, scalars)


def _list_form(item: JsonForm) -> JsonForm:
    return lambda value: "[" + ",".join(map(item, value)) + "]"


def _struct_form(fields: Sequence[tuple[str, str]], scalars: ScalarForms) -> JsonForm:
    forms = [json_form(kind, scalars) for _, kind in fields]
    keys = [_quoted(key or f"f{at}") for at, (key, _) in enumerate(fields, 1)]

    def encode(value: Any) -> str:
        values = value.values() if isinstance(value, dict) else value
        pairs = (f"{k}:{form(v)}" for k, form, v in zip(keys, forms, values, strict=True))
        return "{" + ",".join(pairs) + "}"

    return encode


def _map_form(scalars: ScalarForms, key: str, item: str) -> JsonForm:
    key_form, item_form = json_form(key, scalars), json_form(item, scalars)

    def encode(value: Any) -> str:
        pairs = value.items()
        if list(value) == ["key", "value"] and isinstance(value["key"], list):
            pairs = zip(value["key"], value["value"], strict=True)  # keys that can't be hashed
        shown = (f"{_as_key(key_form(k))}:{item_form(v)}" for k, v in pairs)
        return "{" + ",".join(shown) + "}"

    return encode


def _as_key(text: str) -> str:
    return text if text.startswith('"') else _quoted(text)


def _scalar_form(name: str, scalars: ScalarForms) -> JsonForm:
    kind = pg_type(name)
    if name.upper() == "JSON":
        return str
    if kind.name == "bool":
        return lambda value: "true" if value else "false"
    form = scalars(kind)
    if kind.name in _BARE:
        return lambda value: _number(value, form(value))
    if kind.name in _DATED:
        return lambda value: _quoted(form(value).replace(" ", "T", 1))
    return lambda value: _quoted(form(value))


def _number(value: Any, text: str) -> str:
    if value.is_finite() if isinstance(value, Decimal) else math.isfinite(value):
        return text
    return '"NaN"' if value != value else '"Infinity"' if value > 0 else '"-Infinity"'


def any_json(value: Any) -> str:
    """Return the JSON text of a value of unknown type, for example in a union."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float() | Decimal():
            return _number(value, format(value, "f") if isinstance(value, Decimal) else str(value))
        case list() | tuple():
            return "[" + ",".join(map(any_json, value)) + "]"
        case dict():
            pairs = (f"{_as_key(any_json(key))}:{any_json(item)}" for key, item in value.items())
            return "{" + ",".join(pairs) + "}"
        case bytes():
            return _quoted("\\x" + value.hex())
        case dt.date() | dt.time():
            return _quoted(value.isoformat())
    return _quoted(str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache(maxsize=1024)
def _fields(name: str) -> tuple[tuple[str, str], ...]:
    """Return names and types of a struct's fields; ``row(...)`` fields have empty names."""
    return tuple(map(_field, _parts(name)))


def _field(part: str) -> tuple[str, str]:
    if quoted := _QUOTED.match(part):
        return quoted[1].replace('""', '"'), part[quoted.end() :].strip()
    name, space, kind = part.partition(" ")
    if not space or "(" in name or part.upper().startswith(_LONG_NAMES):
        return "", part
    return name, kind.strip()


def _parts(name: str) -> Iterator[str]:
    """Split the text between the outer parentheses at its commas."""
    inner = name[name.index("(") + 1 : name.rindex(")")]
    depth, start, quote = 0, 0, ""
    for at, mark in enumerate(inner):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark == "," and depth == 0:
            yield inner[start:at].strip()
            start = at + 1
        else:
            depth += _OPENING.get(mark, 0)
    if inner[start:].strip():
        yield inner[start:].strip()


TextForm = Callable[[Any], str]

_BARE_ARRAY_BREAKERS: Final = frozenset('{},"\\ \t\n\r\v\f')


def bool_text(value: Any) -> str:
    """Return ``t`` or ``f``."""
    return "t" if value else "f"


def float8_text(value: float) -> str:
    """Return the shortest text that parses to the same value, in PostgreSQL's spelling."""
    text = repr(float(value))
    if "e" not in text and "n" not in text and -1e15 < value < 1e15:
        return text.removesuffix(".0")
    return _pg_float(repr(float(value)), value, fixed_below=15)


def float4_text(value: float) -> str:
    """Return the shortest text that parses to the same 4-byte float."""
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
    """Return the digits without an exponent."""
    if isinstance(value, Decimal):
        if value.is_infinite():
            return "Infinity" if value > 0 else "-Infinity"
        return "NaN" if value.is_nan() else format(value, "f")
    return str(value)


def bytea_text(value: Any) -> str:
    r"""Return ``\x`` and hex digits."""
    return "\\x" + bytes(value).hex()


def date_text(value: Any) -> str:
    """Return an ISO date; years outside Python's range come from DuckDB as text."""
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
    """Return HH:MM:SS[.ffffff]."""
    return _trim(value.isoformat()) if isinstance(value, dt.time) else str(value)


def timetz_text(value: Any) -> str:
    """Return HH:MM:SS[.ffffff]+HH[:MM]."""
    if not isinstance(value, dt.time):
        return str(value)
    return _trim(value.replace(tzinfo=None).isoformat()) + _offset(value)


def timestamp_text(value: Any) -> str:
    """Return YYYY-MM-DD HH:MM:SS[.ffffff]."""
    if not isinstance(value, dt.datetime):
        return _foreign_date(value)
    return _trim(value.isoformat(" "))


def timestamptz_text(value: Any) -> str:
    """Return YYYY-MM-DD HH:MM:SS[.ffffff]+HH[:MM], with the offset of the value."""
    if not isinstance(value, dt.datetime):
        return _foreign_date(value)
    return _trim(value.replace(tzinfo=None).isoformat(" ")) + _offset(value)


def plain_text(value: Any) -> str:
    """Return text unchanged, and composite values as JSON."""
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
    """Return the function from a value of the type to its text."""
    if kind in (INT2VECTOR, OIDVECTOR):
        return lambda value: " ".join(map(str, value))
    if kind.element is not None:
        return _array_text(text_form(kind.element))
    if is_composite(duckdb_name):
        return json_form(duckdb_name, text_form)
    return _FORMS.get(kind.name, plain_text)


def text_encoder(kind: PgType, duckdb_name: str = "") -> Callable[[Any], bytes]:
    """Return the function from a value of the type to the bytes of the text format."""
    form = text_form(kind, duckdb_name)

    def encode(value: Any) -> bytes:
        # DuckDB never returns lone surrogates. NUL can occur, and PostgreSQL's text can't hold NUL.
        return form(value).encode("utf-8", "replace")

    return encode
