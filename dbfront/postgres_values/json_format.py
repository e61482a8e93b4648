"""Composite values as JSON text: structs, maps, unions and nested lists, by their DuckDB type.

text_format.py takes ``json_form`` for a column whose type PostgreSQL has no twin for. Values are
written as PostgreSQL's ``to_json`` does: numbers bare, NaN and infinities as strings, times in ISO
form, bytes as hex, a JSON value inside as what it is. Map keys become strings.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from tierkv.dbfront.postgres_values.types import PgType, pg_type

JsonForm = Callable[[Any], str]
ScalarForms = Callable[[PgType], Callable[[Any], str]]

_BARE: Final = frozenset({"int2", "int4", "int8", "oid", "numeric", "float4", "float8"})
_DATED: Final = frozenset({"timestamp", "timestamptz"})
_LONG_NAMES: Final = ("TIMESTAMP WITH TIME ZONE", "TIME WITH TIME ZONE")
_QUOTED: Final = re.compile(r'"((?:[^"]|"")*)"(?=\s)')
_OPENING: Final = {"(": 1, ")": -1, "[": 1, "]": -1}


def json_form(duckdb_name: str, scalars: ScalarForms) -> JsonForm:
    """The function from a value of a DuckDB type to its JSON text.

    Args:
        duckdb_name: the type, such as ``STRUCT(a INTEGER, b VARCHAR[])``.
        scalars: gives the text form of a type that is not composite.
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
    """JSON text of a value whose type is not known, as in a union."""
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
    """Names and types of a struct's fields; a name is empty where ``row(...)`` gave none."""
    return tuple(map(_field, _parts(name)))


def _field(part: str) -> tuple[str, str]:
    if quoted := _QUOTED.match(part):
        return quoted[1].replace('""', '"'), part[quoted.end() :].strip()
    name, space, kind = part.partition(" ")
    if not space or "(" in name or part.upper().startswith(_LONG_NAMES):
        return "", part
    return name, kind.strip()


def _parts(name: str) -> Iterator[str]:
    """Cut what stands between the outer parentheses at its commas."""
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
