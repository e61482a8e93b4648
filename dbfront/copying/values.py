"""COPY's values on their way into a table: from PostgreSQL's forms to text that DuckDB casts.

Rows are loaded as text. Where the two spell a type differently (bytes, arrays, booleans, times
with an offset) a cell is taken apart and written anew; what came in binary is written as text.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from tierkv.dbfront.postgres_values.parameters import decode_parameter
from tierkv.dbfront.postgres_values.types import PgType

CellConverter = Callable[[str], str]

_RESPELLED: Final = frozenset({"bool", "bytea", "interval", "date", "time", "timestamp"})


def duckdb_text(value: Any) -> str:
    """A value as text that DuckDB casts back to it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return "".join(f"\\x{byte:02X}" for byte in value)
    if isinstance(value, list):
        return f"[{', '.join(map(_item, value))}]"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    return value.isoformat() if isinstance(value, dt.date | dt.time) else str(value)


def _item(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return duckdb_text(value)
    if isinstance(value, int | float | Decimal | uuid.UUID):
        return duckdb_text(value)
    return '"' + duckdb_text(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def text_converter(kind: PgType) -> CellConverter | None:
    """How a cell of the text or CSV format is written anew; None where it may stay."""
    if kind.element is None and kind.name not in _RESPELLED:
        return None
    return lambda cell: duckdb_text(decode_parameter(cell.encode(), kind, 0))


def from_binary(data: bytes, kind: PgType) -> str:
    """A cell of the binary format as text for DuckDB."""
    return duckdb_text(decode_parameter(data, kind, 1))
