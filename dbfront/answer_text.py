"""Answers as the text that the engine casts to the function's type (sql/dialect.py)."""

from __future__ import annotations

import json
from typing import Any

from sql.dialect import Dialect
from sql.functions import Returns


def answer_text(value: Any, returns: Returns, dialect: Dialect) -> str | None:
    """Write an answer for the engine.

    Args:
        value: text, bool, a number, a list, or what JSON may hold; None is NULL.
        returns: the function's type.
        dialect: of the engine that casts the text.
    """
    if value is None:
        return None
    if returns is Returns.TEXT:
        return str(value)
    if returns in (Returns.VECTOR, Returns.TEXTS) and dialect is Dialect.POSTGRES:
        return _array(value)
    return json.dumps(value, ensure_ascii=False)


def _array(items: list[Any]) -> str:
    """Write PostgreSQL's array text; every item of text is quoted."""
    return f"{{{','.join(_item(item) for item in items)}}}"


def _item(item: Any) -> str:
    if isinstance(item, int | float):
        return repr(item)
    escaped = str(item).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
