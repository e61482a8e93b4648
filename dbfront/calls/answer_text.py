"""Answers as the text that the engine casts to the function's type (sql/calls/dialect.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import Returns
from tierkv.sql.text.exact_json import exact_text

_REPLACEMENT: Final = "\ufffd"


def answer_text(value: Any, returns: Returns, dialect: Dialect) -> str | None:
    """Write an answer for the engine.

    What a model may say and an engine can't hold (NUL, half a surrogate pair) becomes U+FFFD.

    Args:
        value: text, bool, a number, a list, or what JSON may hold; None is NULL.
        returns: the function's type.
        dialect: of the engine that casts the text.
    """
    if value is None:
        return None
    if returns is Returns.TEXT:
        return _clean(str(value))
    if returns in (Returns.VECTOR, Returns.TEXTS) and dialect is Dialect.POSTGRES:
        return _array(value)
    return exact_text(_clean_json(value), comma=", ", colon=": ")


def _clean(text: str) -> str:
    """Replace what is no text to an engine."""
    if "\0" in text:
        text = text.replace("\0", _REPLACEMENT)
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _clean_json(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean_json(item) for item in value]
    return value


def _array(items: list[Any]) -> str:
    """Write PostgreSQL's array text; every item of text is quoted."""
    return f"{{{','.join(_item(item) for item in items)}}}"


def _item(item: Any) -> str:
    if isinstance(item, int | float):
        return repr(item)
    escaped = _clean(str(item)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
