"""What the command line shows: rows as table, JSON or CSV, and a progress bar on standard error.

Columns and rows become text, at once or row by row; the CLI prints the text. NULL is an empty table
cell, JSON null and an empty CSV field. The bar shows the AI calls of a running statement, on a
terminal only; the session reports the number of finished calls. Importing this module does not
import rich, and the bar never affects the statement.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Column, Notice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class OutputFormat(StrEnum):
    """Format of printed rows."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def render_rows(
    columns: Sequence[Column], rows: Sequence[tuple[Any, ...]], output: OutputFormat
) -> str:
    """Return rows as text with a final newline."""
    writer = RowWriter(columns, output)
    return writer.rows(rows) + writer.end()


def render_texts(
    names: Sequence[str], rows: Sequence[tuple[str, ...]], output: OutputFormat
) -> str:
    """Return a listing of texts that come from no statement."""
    return render_rows([Column(name, "text") for name in names], rows, output)


class RowWriter:
    """Converts the rows of one result to text as the rows come.

    JSON and CSV do not depend on the division into pieces. The columns of a table have the width of
    the first rows; later, wider rows widen the columns from there on.
    """

    def __init__(self, columns: Sequence[Column], output: OutputFormat) -> None:
        self._names = [column.name for column in columns]
        self._output = output
        self._count = 0
        self._widths: list[int] = []
        self._right: list[bool] = []

    def rows(self, rows: Sequence[tuple[Any, ...]]) -> str:
        """Return the text of the next rows; before the first rows also the start of the result."""
        if not rows:
            return ""
        match self._output:
            case OutputFormat.JSON:
                text = ("," if self._count else "[") + _json_records(self._names, rows)
            case OutputFormat.CSV:
                text = _csv_lines([] if self._count else [self._names], rows)
            case OutputFormat.TABLE:
                text = self._table_lines(rows)
        self._count += len(rows)
        return text

    def end(self) -> str:
        """Return the text that ends a result, with a final newline."""
        match self._output:
            case OutputFormat.JSON:
                return "\n]\n" if self._count else "[]\n"
            case OutputFormat.CSV:
                return "" if self._count else _csv_lines([self._names], ())
            case OutputFormat.TABLE:
                head = "" if self._count else self._table_lines(())
                return f"{head}({self._count} row{'' if self._count == 1 else 's'})\n"

    def _table_lines(self, rows: Sequence[tuple[Any, ...]]) -> str:
        cells = [[_cell(value).replace("\t", "    ").split("\n") for value in row] for row in rows]
        begins = not self._widths
        before = self._widths if not begins else [_width(name) for name in self._names]
        self._widths = [
            max([least, *(_width(line) for row in cells for line in row[i])])
            for i, least in enumerate(before)
        ]
        lines = []
        if begins:
            self._right = [
                bool(rows) and all(_is_number(row[i]) for row in rows)
                for i in range(len(self._names))
            ]
            lines += [
                _line(self._names, self._widths, [False] * len(self._names)),
                "-+-".join("-" * width for width in self._widths),
            ]
        for row in cells:
            # A cell with several lines, for example a plan, makes the row higher.
            parts = zip_longest(*row, fillvalue="")
            lines += [_line(line, self._widths, self._right) for line in parts]
        return "".join(line.rstrip() + "\n" for line in lines)


def unique_names(names: Sequence[str]) -> list[str]:
    """Number repeated names of columns: ``a``, ``a_1``."""
    unique: list[str] = []
    for name in names:
        tried, number = name, 0
        while tried in unique:
            number += 1
            tried = f"{name}_{number}"
        unique.append(tried)
    return unique


def _json_records(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return JSON objects without the brackets of a list."""
    keys = unique_names(names)
    records = [{key: _finite(value) for key, value in zip(keys, row, strict=True)} for row in rows]
    text = json.dumps(records, ensure_ascii=False, indent=2, default=_json_value, allow_nan=False)
    return text[1:-2]


def _finite(value: Any) -> Any:
    """Write infinities and NaN as PostgreSQL's to_json does: JSON has no numbers for them."""
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


def _csv_lines(head: Sequence[Sequence[str]], rows: Sequence[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(head)
    writer.writerows(["" if v is None else _cell(v) for v in row] for row in rows)
    return text.getvalue()


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
    """Terminal columns: wide East Asian characters take two, combining characters none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def make_bar(console: Console | None = None) -> Progress:
    """Return the progress bar for all long operations of this package."""
    # A pipe shows no bar and should not wait for the import of rich.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )


class StatementBar:
    """Shows calls done and calls known of one session while the block runs.

    ``on_notice`` receives, on the event loop, the notices of the statement before its rows.
    """

    def __init__(
        self,
        session: SqlSession,
        *,
        label: str = "AI calls",
        enabled: bool = True,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self._session = session
        self._label = label
        self._progress = make_bar() if enabled and sys.stderr.isatty() else None
        self._task: Any = None
        self._on_notice = on_notice

    def __enter__(self) -> StatementBar:
        if self._progress is not None:
            self._progress.start()
        self._session.on_progress = self._show
        return self

    def _show(self, progress: Any) -> None:
        if progress.notice is not None and self._on_notice is not None:
            self._on_notice(progress.notice)
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=progress.calls_total)
        self._progress.update(self._task, completed=progress.calls_done, total=progress.calls_total)

    def __exit__(self, *exc: object) -> None:
        self._session.on_progress = None
        if self._progress is not None:
            self._progress.stop()
