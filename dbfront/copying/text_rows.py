"""COPY's text and CSV rows: values to lines, and bytes to rows of text.

``CopyWriter`` and ``CopyReader`` are pure; copy.py moves their bytes. The reader accepts pieces
that end anywhere, even inside a UTF-8 character, and returns whole rows; None is NULL. DuckDB can
cast the cells of a row from text. Types that PostgreSQL and DuckDB spell differently (bytes,
arrays, booleans, times with an offset) are parsed and written again in DuckDB's spelling.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, Final

from tierkv.dbfront.copying.statement import CopyOptions
from tierkv.dbfront.postgres_values.parameters import decode_parameter
from tierkv.dbfront.postgres_values.text_format import text_form
from tierkv.dbfront.postgres_values.types import PgType, pg_type
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import SqlError
from tierkv.kvcore.limits import MAX_SQL_BYTES

CellConverter = Callable[[str], str]

_RESPELLED: Final = frozenset({"bool", "bytea", "interval", "date", "time", "timestamp"})


def duckdb_text(value: Any) -> str:
    """Return a value as text that DuckDB casts back to the value."""
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
    """Return the function to respell a cell of text or CSV; None if cells need no respelling."""
    if kind.element is None and kind.name not in _RESPELLED:
        return None
    return lambda cell: duckdb_text(decode_parameter(cell.encode(), kind, 0))


def from_binary(data: bytes, kind: PgType) -> str:
    """Return a cell of the binary format as text for DuckDB."""
    return duckdb_text(decode_parameter(data, kind, 1))


Row = list[str | None]

_TEXT_ESCAPES: Final = {
    "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f", "\v": "\\v",
}  # fmt: skip
_TEXT_UNESCAPES: Final = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v",
}  # fmt: skip
_ESCAPED = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.)", re.DOTALL)


class CopyWriter:
    """Turns rows into COPY lines."""

    def __init__(self, columns: Sequence[Column], options: CopyOptions) -> None:
        self._options = options
        self._names = [column.name for column in columns]
        self._forms = [text_form(pg_type(c.type_name), c.type_name) for c in columns]
        self._forced = [
            options.force_quote_all or name in options.force_quote for name in self._names
        ]
        escapes = {**_TEXT_ESCAPES, options.delimiter: "\\" + options.delimiter}
        escapes |= {"\t": "\\t"} if options.delimiter == "\t" else {}
        self._escapes = str.maketrans(escapes)

    def header(self) -> bytes:
        """Return the header line, or no bytes if the options ask for no header."""
        if not self._options.header:
            return b""
        cells = [self._cell(name, forced=False) for name in self._names]
        return self._line(cells)

    def line(self, row: Sequence[Any]) -> bytes:
        """Encode one row as a line with line end."""
        cells = [
            self._options.null if value is None else self._cell(form(value), forced=forced)
            for value, form, forced in zip(row, self._forms, self._forced, strict=True)
        ]
        if self._options.csv and cells == ["\\."]:
            cells = ['"\\."']  # alone on a line, \. would end the data
        return self._line(cells)

    def trailer(self) -> bytes:
        """Return the end of the data, which is empty for text and CSV."""
        return b""

    def _line(self, cells: Iterable[str]) -> bytes:
        return (self._options.delimiter.join(cells) + "\n").encode("utf-8", "replace")

    def _cell(self, text: str, *, forced: bool) -> str:
        if not self._options.csv:
            return text.translate(self._escapes)
        quote, escape = self._options.quote, self._options.escape
        special = (quote, self._options.delimiter, "\n", "\r")
        if not forced and text != self._options.null and not any(s in text for s in special):
            return text
        if escape != quote:
            text = text.replace(escape, escape * 2)
        return quote + text.replace(quote, escape + quote) + quote


class CopyReader:
    """Turns COPY data into rows; mutated only through ``feed`` and ``finish``."""

    def __init__(
        self, width: int, options: CopyOptions, converters: Sequence[CellConverter | None] = ()
    ) -> None:
        self._width = width
        self._converters = [(at, c) for at, c in enumerate(converters) if c is not None]
        self._options = options
        self._partial = b""
        self._open_lines: list[bytes] = []
        self._open_bytes = 0
        self._skip_header = options.header
        self._line_number = 0
        self._ended = False

    def feed(self, data: bytes) -> list[Row]:
        """Add a piece of data; return the rows that are now complete."""
        return self._rows(self._complete_lines(data))

    def finish(self) -> list[Row]:
        """End the data; return the last row if its line had no line end.

        Raises:
            SqlError: the data ends inside a quoted value.
        """
        last, self._partial = self._partial, b""
        if not last and not self._open_lines:
            return []
        if self._options.csv and (bool(self._open_lines) ^ self._inside_quotes(last)):
            raise self._bad("unterminated CSV quoted field")
        return self._rows([b"\n".join([*self._open_lines, last])])

    def _complete_lines(self, data: bytes) -> list[bytes]:
        """Return complete lines; join a CSV line ending inside quotes with the next line."""
        pieces = (self._partial + data).split(b"\n")
        self._partial = pieces.pop()
        lines: list[bytes] = []
        for piece in pieces:
            stays_open = bool(self._open_lines) ^ self._inside_quotes(piece)
            if self._options.csv and stays_open:
                self._open_lines.append(piece)
                self._open_bytes += len(piece)
                continue
            lines.append(b"\n".join([*self._open_lines, piece]))
            self._open_lines, self._open_bytes = [], 0
        if self._open_bytes + len(self._partial) > MAX_SQL_BYTES:
            raise self._bad(f"a row is longer than {MAX_SQL_BYTES} bytes")
        return lines

    def _inside_quotes(self, line: bytes) -> bool:
        """Return True if quotes in ``line`` leave a value open; an escaped quote does not count."""
        quote, escape = self._options.quote.encode(), self._options.escape.encode()
        if escape != quote:
            line = line.replace(escape * 2, b"").replace(escape + quote, b"")
        return line.count(quote) % 2 == 1

    def _rows(self, lines: list[bytes]) -> list[Row]:
        rows: list[Row] = []
        for line in lines:
            self._line_number += 1
            if self._ended:
                break
            text = self._decode(line.removesuffix(b"\r"))
            if text == "\\.":
                self._ended = True
            elif self._skip_header:
                self._skip_header = False
            else:
                rows.append(self._row(text))
        return rows

    def _decode(self, line: bytes) -> str:
        try:
            if b"\0" not in line:
                return line.decode()
            raise SqlError('invalid byte sequence for encoding "UTF8": 0x00', sqlstate="22021")
        except UnicodeDecodeError:
            raise SqlError(
                "invalid byte sequence for encoding UTF8",
                sqlstate="22021",
                detail=f"COPY, line {self._line_number}",
            ) from None

    def _row(self, text: str) -> Row:
        row = self._csv_cells(text) if self._options.csv else self._text_cells(text)
        if len(row) < self._width:
            raise self._bad("missing data for a column")
        if len(row) > self._width:
            raise self._bad("extra data after last expected column")
        for at, convert in self._converters:
            cell = row[at]
            if cell is not None:
                row[at] = convert(cell)
        return row

    def _bad(self, why: str) -> SqlError:
        return SqlError(why, sqlstate="22P04", detail=f"COPY, line {self._line_number}")

    def _text_cells(self, text: str) -> Row:
        null, delimiter = self._options.null, self._options.delimiter
        if "\\" not in text:
            return [None if cell == null else cell for cell in text.split(delimiter)]
        cells: list[str] = []
        start = at = 0
        while at <= len(text):
            if at == len(text) or text[at] == delimiter:
                cells.append(text[start:at])
                start = at + 1
            elif text[at] == "\\":
                at += 1
            at += 1
        return [None if cell == null else _unescape_text(cell) for cell in cells]

    def _csv_cells(self, text: str) -> Row:
        delimiter, quote = self._options.delimiter, self._options.quote
        if quote not in text:
            null = self._options.null
            return [None if cell == null else cell for cell in text.split(delimiter)]
        row: Row = []
        at = 0
        while True:
            cell, at = self._csv_cell(text, at)
            row.append(cell)
            if at >= len(text):
                return row
            at += 1  # the delimiter

    def _csv_cell(self, text: str, at: int) -> tuple[str | None, int]:
        """Return one value, and the index of the delimiter after the value."""
        options = self._options
        out: list[str] = []
        quoted = inside = False
        while at < len(text) and (inside or text[at] != options.delimiter):
            follows = text[at + 1 : at + 2]
            escapes = follows != "" and follows in (options.quote, options.escape)
            if inside and text[at] == options.escape and escapes:
                out.append(follows)
                at += 2
                continue
            if text[at] == options.quote:
                inside, quoted = not inside, True
            else:
                out.append(text[at])
            at += 1
        value = "".join(out)
        return (None if not quoted and value == options.null else value), at


def _unescape_text(cell: str) -> str:
    """Undo backslash escapes of the text format."""
    return _ESCAPED.sub(_unescape_one, cell) if "\\" in cell else cell


def _unescape_one(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] == "x" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8) & 0xFF)
    return _TEXT_UNESCAPES.get(code, code)
