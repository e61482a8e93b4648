"""COPY's binary rows: values to bytes, and bytes to rows of text.

The module has the same two sides as text_rows.py: a writer with header, line and trailer, and a
reader whose input pieces may end anywhere. Both sides are pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from tierkv.dbfront.copying.text_rows import Row, from_binary
from tierkv.dbfront.postgres_values.binary_format import binary_encoder
from tierkv.dbfront.postgres_values.types import PgType, pg_type
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import SqlError
from tierkv.kvcore.limits import MAX_SQL_BYTES

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEAD_BYTES: Final = len(_SIGNATURE) + 8
_TRAILER: Final = b"\xff\xff"
_NULL: Final = b"\xff\xff\xff\xff"
_OIDS: Final = 1 << 16
_CRITICAL_FLAGS: Final = 0xFFFF0000
_COUNT_BYTES: Final = 2

_NO_SIGNATURE: Final = "COPY file signature not recognized"
_NO_LENGTH: Final = "invalid COPY file header (missing length)"
_WRONG_LENGTH: Final = "invalid COPY file header (wrong length)"
_HEADER_PARTS: Final = (
    (len(_SIGNATURE), _NO_SIGNATURE),
    (len(_SIGNATURE) + 4, "invalid COPY file header (missing flags)"),
    (_HEAD_BYTES, _NO_LENGTH),
    (_HEAD_BYTES + MAX_SQL_BYTES + 1, _WRONG_LENGTH),
)
"""PostgreSQL's messages for a header with fewer bytes than the given number."""


class BinaryWriter:
    """Turns rows into binary COPY data."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._encoders = [binary_encoder(pg_type(c.type_name), c.type_name) for c in columns]
        self._count = struct.pack("!h", len(columns))

    def header(self) -> bytes:
        """Return the signature, the flags and the length of an empty extension."""
        return _SIGNATURE + bytes(8)

    def line(self, row: Sequence[Any]) -> bytes:
        """Encode one row."""
        parts = [self._count]
        for value, encode in zip(row, self._encoders, strict=True):
            if value is None:
                parts.append(_NULL)
            else:
                data = encode(value)
                parts += [struct.pack("!i", len(data)), data]
        return b"".join(parts)

    def trailer(self) -> bytes:
        """Return the end marker of the data."""
        return _TRAILER


class BinaryReader:
    """Turns binary COPY data into rows; mutated only through ``feed`` and ``finish``."""

    def __init__(self, kinds: Sequence[PgType]) -> None:
        self._kinds = kinds
        self._buffer = bytearray()
        self._at = 0
        self._row_number = 0
        self._begun = False
        self._ended = False

    def feed(self, data: bytes) -> list[Row]:
        """Add a piece of data; return the rows that are now complete.

        Raises:
            SqlError: 22P04, not COPY data; 22P03, a value does not fit its column.
        """
        self._buffer += data
        if not self._begun and not self._begin():
            return []
        rows: list[Row] = []
        while not self._ended and (row := self._next_row()) is not None:
            rows.append(row)
        del self._buffer[: self._at]
        self._at = 0
        if self._ended and self._buffer:
            raise self._bad("received copy data after EOF marker")
        if len(self._buffer) > MAX_SQL_BYTES:
            raise self._bad(f"a row is longer than {MAX_SQL_BYTES} bytes")
        return rows

    def finish(self) -> list[Row]:
        """End the data. As in PostgreSQL, the end marker may be missing; half a count is ignored.

        Raises:
            SqlError: 22P04, the header or the last row is incomplete.
        """
        if not self._begun:
            size = len(self._buffer)
            missing = next(why for least, why in _HEADER_PARTS if size < least)
            raise self._bad(missing)
        if len(self._buffer) >= _COUNT_BYTES:
            raise self._bad("unexpected EOF in COPY data")
        return []

    def _bad(self, why: str) -> SqlError:
        return SqlError(why, sqlstate="22P04", detail=f"COPY, row {self._row_number}")

    def _begin(self) -> bool:
        """Skip the header once all of the header has arrived; return True when it is skipped."""
        if not _SIGNATURE.startswith(bytes(self._buffer[: len(_SIGNATURE)])):
            raise self._bad(_NO_SIGNATURE)
        if len(self._buffer) < _HEAD_BYTES:
            return False
        flags, extension = struct.unpack_from("!Ii", self._buffer, len(_SIGNATURE))
        if flags & _OIDS:
            raise self._bad("invalid COPY file header (WITH OIDS)")
        if flags & _CRITICAL_FLAGS:
            raise self._bad("unrecognized critical flags in COPY file header")
        if extension < 0:
            raise self._bad(_NO_LENGTH)
        if extension > MAX_SQL_BYTES:
            raise self._bad(_WRONG_LENGTH)
        if len(self._buffer) < _HEAD_BYTES + extension:
            return False
        self._at = _HEAD_BYTES + extension
        self._begun = True
        return True

    def _next_row(self) -> Row | None:
        """Return the next row, or None if the row is not complete yet or the data has ended."""
        start = at = self._at
        if len(self._buffer) < at + _COUNT_BYTES:
            return None
        (count,) = struct.unpack_from("!h", self._buffer, at)
        at += _COUNT_BYTES
        if count == -1:
            self._ended, self._at = True, at
            return None
        self._row_number += 1
        if count != len(self._kinds):
            raise self._bad(f"row field count is {count}, expected {len(self._kinds)}")
        row: Row = []
        for kind in self._kinds:
            if len(self._buffer) < at + 4:
                self._wait(start)
                return None
            (size,) = struct.unpack_from("!i", self._buffer, at)
            at += 4
            if size < -1:
                raise self._bad("invalid field size")
            if len(self._buffer) < at + max(0, size):
                self._wait(start)
                return None
            row.append(None if size < 0 else from_binary(bytes(self._buffer[at : at + size]), kind))
            at += max(0, size)
        self._at = at
        return row

    def _wait(self, start: int) -> None:
        self._at = start
        self._row_number -= 1
