"""SQL cursors: DECLARE, FETCH, MOVE and CLOSE over whole results, or over streams of rows.

psycopg's named cursors, JDBC and BI tools use SQL cursors. A cursor lives until its transaction
ends unless declared WITH HOLD. A cursor over a stream only moves forward, and passed rows are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.inference.column_names import with_names
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.dbfront.statement_results import Column, Notice, RowStream, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError

_OPTIONS: Final = frozenset({"BINARY", "INSENSITIVE", "ASENSITIVE", "NO", "SCROLL"})
_ALL: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Declaration:
    """``DECLARE name [[NO] SCROLL] CURSOR [WITH HOLD] FOR query``; ``scroll`` None: not given."""

    name: str
    query: str
    hold: bool
    scroll: bool | None = None

    @property
    def needs_all_rows(self) -> bool:
        """Return True if the cursor may need rows that a stream has not yet, or no longer."""
        return self.hold or bool(self.scroll)


@dataclass(slots=True)
class _Cursor:
    """An open cursor.

    Attributes:
        rows: known rows, except dropped rows.
        at: the current row from 1, 0 before the first, n + 1 after the last.
        committed: a held cursor survives once its transaction is committed.
        stream: source of further rows; None when all rows are known.
        forgotten: number of dropped rows before ``rows``.
    """

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]
    hold: bool
    scroll: bool
    committed: bool = False
    at: int = 0
    stream: RowStream | None = None
    forgotten: int = 0

    @property
    def known(self) -> int:
        """Return the number of the last known row."""
        return self.forgotten + len(self.rows)

    def between(self, start: int, end: int) -> Sequence[tuple[Any, ...]]:
        """Return the known rows after number ``start``, up to ``end``."""
        return self.rows[max(start - self.forgotten, 0) : max(end - self.forgotten, 0)]

    async def reach(self, row: int) -> tuple[Notice, ...]:
        """Fetch rows until ``row`` is known or the stream ends; return the notices of the end."""
        while self.stream is not None and self.known < row:
            batch = await self.stream.next_rows()
            self.rows += batch
            if not batch:
                ended, self.stream = self.stream.result, None
                return ended.notices if ended is not None else ()
        return ()

    def forget_passed(self) -> None:
        """Drop the rows before the current row, if the cursor cannot move back."""
        passed = min(self.at - 1, self.known) - self.forgotten
        if self.stream is not None and passed > 0:
            del self.rows[:passed]
            self.forgotten += passed


def parse_declare(sql: str) -> Declaration:
    """Parse a DECLARE.

    Raises:
        SqlSyntaxError: malformed.
        FeatureNotSupportedError: a binary cursor.
    """
    words = tokens(sql)
    at = 2
    while at < len(words) and words[at].upper in _OPTIONS:
        at += 1
    options = [word.upper for word in words[2:at]]
    if "BINARY" in options:
        raise FeatureNotSupportedError(
            "binary cursors are not supported", hint="Request binary results in Bind instead."
        )
    scroll = "NO" not in options if "SCROLL" in options else None
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

    def refuse_taken(self, name: str) -> None:
        """Refuse to declare a cursor that is open.

        Raises:
            SqlError: 42P03.
        """
        if name in self._open:
            raise SqlError(f'cursor "{name}" already exists', sqlstate="42P03")

    def declare(
        self,
        declaration: Declaration,
        opened: StatementResult | RowStream,
        columns: tuple[Column, ...] | None = None,
    ) -> StatementResult:
        """Open a cursor over a result, or over a stream of rows.

        Args:
            declaration: the statement.
            opened: the result or stream of the query.
            columns: the columns of ``opened`` with the numbers of their tables.

        Raises:
            SqlError: 42P03, the name is taken; 42601, the query returns no rows.
        """
        self.refuse_taken(declaration.name)
        if opened.columns is None:
            raise SqlError("DECLARE CURSOR needs a query", sqlstate="42601")
        columns = with_names(columns or opened.columns, declaration.query)
        if not isinstance(opened, StatementResult):
            self._open[declaration.name] = _Cursor(
                columns, [], hold=False, scroll=False, stream=opened
            )
            return StatementResult("DECLARE CURSOR")
        self._open[declaration.name] = _Cursor(
            columns,
            list(opened.rows),
            hold=declaration.hold,
            scroll=declaration.scroll is not False,
        )
        return StatementResult("DECLARE CURSOR", notices=opened.notices)

    def columns(self, name: str) -> tuple[Column, ...] | None:
        """Return the columns of an open cursor, or None."""
        cursor = self._open.get(name)
        return cursor.columns if cursor else None

    def fetch_columns(self, sql: str) -> tuple[Column, ...]:
        """Return the columns of a FETCH."""
        return self._find(tokens(sql)[-1]).columns

    def _find(self, token: SqlToken) -> _Cursor:
        if token.name not in self._open:
            raise SqlError(f'cursor "{token.name}" does not exist', sqlstate="34000")
        return self._open[token.name]

    async def fetch(self, sql: str) -> StatementResult:
        """Run FETCH or MOVE."""
        words = [word for word in tokens(sql) if word.text != ";"]
        if len(words) < 2:
            raise SqlSyntaxError("FETCH needs a cursor")
        cursor = self._find(words[-1])
        middle = [word.upper for word in words[1:-1] if word.upper not in ("FROM", "IN")]
        notices = await cursor.reach(_furthest(cursor, middle))
        rows = _move(cursor, middle)
        cursor.forget_passed()
        if words[0].upper == "MOVE":
            return StatementResult(f"MOVE {len(rows)}", notices=notices)
        return StatementResult(f"FETCH {len(rows)}", cursor.columns, rows, notices)

    async def close(self, name: str | None) -> None:
        """Close one cursor, or all cursors, and stop their running queries.

        Raises:
            SqlError: 34000, the cursor does not exist.
        """
        if name is not None and name not in self._open:
            raise SqlError(f'cursor "{name}" does not exist', sqlstate="34000")
        for closed in list(self._open) if name is None else [name]:
            cursor = self._open.pop(closed)
            if cursor.stream is not None:
                await cursor.stream.close()

    async def close_streams(self) -> None:
        """Close the cursors over streams, which never outlive their transaction."""
        for name in [name for name, cursor in self._open.items() if cursor.stream is not None]:
            await self.close(name)

    def end_transaction(self, *, committed: bool = True) -> None:
        """Close the cursors without hold, and the cursors declared by a failed transaction."""
        self._open = {
            name: cursor
            for name, cursor in self._open.items()
            if cursor.hold and (committed or cursor.committed)
        }
        for cursor in self._open.values():
            cursor.committed = True


def _move(cursor: _Cursor, words: list[str]) -> Sequence[tuple[Any, ...]]:
    """Move in FETCH's direction and return the passed rows.

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


def _furthest(cursor: _Cursor, words: list[str]) -> int:
    """Return the last row, from 1, that FETCH's direction needs."""
    match words:
        case [] | ["NEXT"] | ["FORWARD"]:
            return cursor.at + 1
        case ["ALL"] | ["FORWARD", "ALL"] | ["LAST"]:
            return _ALL
        case ["PRIOR"] | ["BACKWARD", *_]:
            return 0
        case ["FIRST"]:
            return 1
        case ["ABSOLUTE", *number]:
            return _number(number) if _number(number) >= 0 else _ALL
        case ["FORWARD" | "RELATIVE", *number] | number:
            return cursor.at + _number(number)
    raise AssertionError("the last case takes everything")


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
            return _seat(cursor, cursor.known)
        case ["ABSOLUTE", *number]:
            count = _number(number)
            return _seat(cursor, count if count >= 0 else cursor.known + 1 + count)
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
    """Move over ``count`` rows, backwards if negative; ``at`` is the current row, from 1."""
    total = cursor.known
    if count == 0:  # the current row again
        return cursor.between(cursor.at - 1, cursor.at) if cursor.at else []
    if count > 0:
        start = min(cursor.at, total)
        end = min(start + count, total)
        cursor.at = end if end - start == count else total + 1
        return cursor.between(start, end)
    stop = cursor.at - 1
    start = max(stop + count, 0)
    cursor.at = start + 1 if stop + count >= 0 else 0
    return list(reversed(cursor.between(start, max(stop, 0))))


def _seat(cursor: _Cursor, row: int) -> Sequence[tuple[Any, ...]]:
    """Move to one row, counted from 1."""
    cursor.at = max(0, min(row, cursor.known + 1))
    return cursor.between(row - 1, row) if row >= 1 else []
