"""Results on a terminal or in a pipe: table, JSON or CSV.

Pure functions from columns and rows to text; the CLI prints what they return. NULL is an empty
table cell, JSON null and an empty CSV field.
"""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from itertools import zip_longest
from typing import Any
from uuid import UUID

from dbfront.contracts import Column


class OutputFormat(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def render_rows(
    columns: Sequence[Column], rows: Sequence[tuple[Any, ...]], output: OutputFormat
) -> str:
    """Return rows as text, ending in a newline."""
    if output is OutputFormat.JSON:
        return _render_json(columns, rows)
    if output is OutputFormat.CSV:
        return _render_csv(columns, rows)
    return _render_table(columns, rows)


def _render_json(columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> str:
    names = [column.name for column in columns]
    records = [
        {name: _finite(value) for name, value in zip(names, row, strict=True)} for row in rows
    ]
    text = json.dumps(records, ensure_ascii=False, indent=2, default=_json_value, allow_nan=False)
    return text + "\n"


def _finite(value: Any) -> Any:
    """Spell infinities and NaN as PostgreSQL's to_json does: JSON has no number for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def _json_value(value: object) -> object:
    if isinstance(value, Decimal):
        return float(value) if value.is_finite() else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, timedelta)):
        return str(value)
    return str(value)


def _render_csv(columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows(["" if v is None else _cell(v) for v in row] for row in rows)
    return text.getvalue()


def _render_table(columns: Sequence[Column], rows: Sequence[tuple[Any, ...]]) -> str:
    header = [column.name for column in columns]
    cells = [[_cell(value).replace("\t", "    ").split("\n") for value in row] for row in rows]
    widths = [
        max([_width(name), *(_width(line) for row in cells for line in row[i])])
        for i, name in enumerate(header)
    ]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line(header, widths, [False] * len(header)), "-+-".join("-" * w for w in widths)]
    for row in cells:
        # A cell of several lines, such as a plan, makes the row as high as it needs.
        lines += [_line(parts, widths, right) for parts in zip_longest(*row, fillvalue="")]
    lines.append(f"({len(rows)} row{'' if len(rows) == 1 else 's'})")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    return " | ".join(
        " " * (width - _width(cell)) + cell if flag else cell + " " * (width - _width(cell))
        for cell, width, flag in zip(cells, widths, right, strict=True)
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return str(value)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float, Decimal)) and value is not True)


def _width(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
