"""SQL cursors: DECLARE, FETCH, MOVE and CLOSE over results that are kept whole.

psycopg's named cursors, JDBC and BI tools use them. A cursor lives until its transaction ends
unless it was declared WITH HOLD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dbfront.contracts import Column, StatementResult
from dbfront.pgwire.sql_tokens import Token, tokens
from kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError

_OPTIONS: Final = frozenset({"BINARY", "INSENSITIVE", "ASENSITIVE", "NO", "SCROLL"})
_ALL: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Declaration:
    """``DECLARE name ... CURSOR [WITH HOLD] FOR query``."""

    name: str
    query: str
    hold: bool
    scroll: bool = True


@dataclass(slots=True)
class _Cursor:
    """An open cursor; ``at`` is the current row from 1, 0 before the first, n + 1 after the last.

    A held cursor survives its transaction once that is committed.
    """

    columns: tuple[Column, ...]
    rows: Sequence[tuple[Any, ...]]
    hold: bool
    scroll: bool
    committed: bool = False
    at: int = 0


def parse_declare(sql: str) -> Declaration:
    """Read a DECLARE.

    Raises:
        SqlSyntaxError: malformed.
    """
    words = tokens(sql)
    at = 2
    while at < len(words) and words[at].upper in _OPTIONS:
        at += 1
    options = [word.upper for word in words[2:at]]
    if "BINARY" in options:
        raise FeatureNotSupportedError(
            "binary cursors are not supported", hint="Ask for binary results in Bind instead."
        )
    scroll = "NO" not in options
    hold = False
    if at < len(words) and words[at].upper == "CURSOR":
        at += 1
        if [word.upper for word in words[at + 1 : at + 2]] == ["HOLD"]:
            hold = words[at].upper == "WITH"
            at += 2
        if at + 1 < len(words) and words[at].upper == "FOR":
            return Declaration(
                words[1].name, sql[words[at].end :].strip().rstrip(";"), hold, scroll
            )
    raise SqlSyntaxError("syntax error in DECLARE CURSOR")


class Cursors:
    """The cursors of one session."""

    def __init__(self) -> None:
        self._open: dict[str, _Cursor] = {}

    def declare(self, declaration: Declaration, result: StatementResult) -> StatementResult:
        """Open a cursor over a result.

        Raises:
            SqlError: 42P03, the name is taken; 42601, the query gives no rows.
        """
        if declaration.name in self._open:
            raise SqlError(f'cursor "{declaration.name}" already exists', sqlstate="42P03")
        if result.columns is None:
            raise SqlError("DECLARE CURSOR needs a query", sqlstate="42601")
        self._open[declaration.name] = _Cursor(
            result.columns, result.rows, declaration.hold, declaration.scroll
        )
        return StatementResult("DECLARE CURSOR", notices=result.notices)

    def columns(self, name: str) -> tuple[Column, ...] | None:
        """The columns of an open cursor, or None."""
        cursor = self._open.get(name)
        return cursor.columns if cursor else None

    def fetch_columns(self, sql: str) -> tuple[Column, ...]:
        """The columns a FETCH will give."""
        return self._find(tokens(sql)[-1]).columns

    def _find(self, token: Token) -> _Cursor:
        if token.name not in self._open:
            raise SqlError(f'cursor "{token.name}" does not exist', sqlstate="34000")
        return self._open[token.name]

    def fetch(self, sql: str) -> StatementResult:
        """Carry out FETCH or MOVE."""
        words = [word for word in tokens(sql) if word.text != ";"]
        if len(words) < 2:
            raise SqlSyntaxError("FETCH needs a cursor")
        cursor = self._find(words[-1])
        middle = [word.upper for word in words[1:-1] if word.upper not in ("FROM", "IN")]
        rows = _move(cursor, middle)
        if words[0].upper == "MOVE":
            return StatementResult(f"MOVE {len(rows)}")
        return StatementResult(f"FETCH {len(rows)}", cursor.columns, rows)

    def close(self, name: str | None) -> None:
        """Close one cursor, or all.

        Raises:
            SqlError: 34000, no such cursor.
        """
        if name is None:
            self._open.clear()
        elif self._open.pop(name, None) is None:
            raise SqlError(f'cursor "{name}" does not exist', sqlstate="34000")

    def end_transaction(self, *, committed: bool = True) -> None:
        """Close the cursors that are not held, and those that a failed transaction declared."""
        self._open = {
            name: cursor
            for name, cursor in self._open.items()
            if cursor.hold and (committed or cursor.committed)
        }
        for cursor in self._open.values():
            cursor.committed = True


def _move(cursor: _Cursor, words: list[str]) -> Sequence[tuple[Any, ...]]:
    """Move as FETCH's direction says and give the rows passed over.

    Raises:
        SqlError: 55000, backwards in a NO SCROLL cursor.
    """
    before = cursor.at
    rows = _directed(cursor, words)
    if not cursor.scroll and (cursor.at < before or words[:1] in (["PRIOR"], ["BACKWARD"])):
        cursor.at = before
        raise SqlError(
            "cursor can only scan forward", sqlstate="55000", hint="Declare it with SCROLL."
        )
    return rows


def _directed(cursor: _Cursor, words: list[str]) -> Sequence[tuple[Any, ...]]:
    match words:
        case [] | ["NEXT"] | ["FORWARD"]:
            return _step(cursor, 1)
        case ["PRIOR"] | ["BACKWARD"]:
            return _step(cursor, -1)
        case ["ALL"] | ["FORWARD", "ALL"]:
            return _step(cursor, _ALL)
        case ["BACKWARD", "ALL"]:
            return _step(cursor, -_ALL)
        case ["FIRST"]:
            return _seat(cursor, 1)
        case ["LAST"]:
            return _seat(cursor, len(cursor.rows))
        case ["ABSOLUTE", *number]:
            count = _number(number)
            return _seat(cursor, count if count >= 0 else len(cursor.rows) + 1 + count)
        case ["RELATIVE", *number]:
            return _seat(cursor, cursor.at + _number(number))
        case ["BACKWARD", *number]:
            return _step(cursor, -_number(number))
        case ["FORWARD", *number] | number:
            return _step(cursor, _number(number))
    raise AssertionError("the last case takes everything")


def _number(words: list[str]) -> int:
    try:
        return int("".join(words))
    except ValueError:
        raise SqlSyntaxError(f"syntax error in FETCH at {' '.join(words)!r}") from None


def _step(cursor: _Cursor, count: int) -> Sequence[tuple[Any, ...]]:
    """Pass over ``count`` rows, backwards if negative; ``at`` is the current row, from 1."""
    total = len(cursor.rows)
    if count == 0:  # the current row again
        return cursor.rows[cursor.at - 1 : cursor.at] if 1 <= cursor.at <= total else []
    if count > 0:
        start = min(cursor.at, total)
        end = min(start + count, total)
        cursor.at = end if end - start == count else total + 1
        return cursor.rows[start:end]
    stop = cursor.at - 1
    start = max(stop + count, 0)
    cursor.at = start + 1 if stop + count >= 0 else 0
    return list(reversed(cursor.rows[start : max(stop, 0)]))


def _seat(cursor: _Cursor, row: int) -> Sequence[tuple[Any, ...]]:
    """Sit on one row, from 1."""
    cursor.at = max(0, min(row, len(cursor.rows) + 1))
    return cursor.rows[row - 1 : row] if 1 <= row <= len(cursor.rows) else []
