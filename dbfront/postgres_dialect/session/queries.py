"""Runs rewritten statements with exact intervals, and with types for the catalog's lists.

DuckDB's Python values would make months 30 days each, so a query with intervals among its columns
is run once more with the intervals as text. A query has no effects except on sequences, so a second
run is safe. session/engine_statements.py calls this module after the rewriting of a statement.

``StatementTimer`` holds ``statement_timeout``. session/session.py starts the timer with each
statement. The wire starts the timer earlier and stops the timer later, so sending rows counts as
well. An outer start covers the inner starts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from tierkv.dbfront.copying.statement import quote_name
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, first_word, tokens
from tierkv.dbfront.postgres_values.types import FUNCTION_COLUMNS
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import (
    Column,
    RowStream,
    StatementDescription,
    StatementResult,
)
from tierkv.kvcore.errors import (
    CancelledByUserError,
    DeadlineError,
    FeatureNotSupportedError,
    SqlSyntaxError,
)
from tierkv.sql.plan.changes import may_change
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import StatementKind, classify, main_verb

_INTERVAL: Final = re.compile(r"(?<![\w\"])INTERVAL(?![\w\"])")
_NO_CAST: Final = re.compile(r"\bTUPLE\(|\bUNION\(|\bENUM\(|\bSTRUCT\((?!\"|\w+ )")
"""Types that can't be written as a cast's target, or not safely changed."""


def has_interval(columns: Sequence[Column] | None) -> bool:
    """Return True if a column is an interval or contains intervals."""
    return any("INTERVAL" in column.type_name for column in columns or ())


def _cast(column: Column, value: str) -> str:
    if "INTERVAL" not in column.type_name or _NO_CAST.search(column.type_name):
        return value
    return f"{value}::{_INTERVAL.sub('VARCHAR', column.type_name)}"


def _query_with_text(sql: str, columns: Sequence[Column]) -> str:
    """Return the query with its intervals as text; column names may occur twice."""
    names = [f"own_{at}" for at in range(len(columns))]
    items = ", ".join(
        f"{_cast(column, name)} AS {quote_name(column.name)}"
        for column, name in zip(columns, names, strict=True)
    )
    inner = sql.strip().rstrip(";")
    words = tokenize(inner)
    verb = main_verb(words)
    start = words[verb].start if 0 < verb < len(words) else 0  # A WITH that writes stays in front.
    return f"{inner[:start]}SELECT {items} FROM ({inner[start:]}\n) AS own_rows({', '.join(names)})"


def _returning_with_text(sql: str, columns: Sequence[Column]) -> str:
    """Return the statement with intervals of RETURNING as text, for columns and ``*``."""
    words = [word for word in tokens(sql) if word.text != ";"]
    start = _last_returning(words)
    if start is None:
        return sql
    head = sql[: words[start].end]
    if [word.text for word in words[start + 1 :]] == ["*"]:
        items = [_cast(c, quote_name(c.name)) + f" AS {quote_name(c.name)}" for c in columns]
        return f"{head} {', '.join(items)}"
    items = _items(sql, words[start + 1 :])
    if len(items) != len(columns):
        return sql
    cast = (
        f"{_cast(column, f'({_without_alias(item)})')} AS {quote_name(column.name)}"
        if has_interval((column,))
        else item
        for item, column in zip(items, columns, strict=True)
    )
    return f"{head} {', '.join(cast)}"


def _last_returning(words: Sequence[SqlToken]) -> int | None:
    found = [at for at, word in enumerate(words) if word.upper == "RETURNING"]
    return found[-1] if found else None


def _items(sql: str, words: Sequence[SqlToken]) -> list[str]:
    """Split a select list at its commas."""
    items, depth, start = [], 0, words[0].start if words else 0
    for word in words:
        depth += {"(": 1, ")": -1}.get(word.text, 0)
        if word.text == "," and depth == 0:
            items.append(sql[start : word.start].strip())
            start = word.end
    return [*items, sql[start : words[-1].end].strip()] if words else []


def _without_alias(item: str) -> str:
    """Return ``x`` of ``x AS y`` or ``x y``."""
    words = tokens(item)
    if len(words) < 2 or words[-1].kind not in ("word", "ident"):
        return item
    if words[-2].upper == "AS":
        return item[: words[-2].start].strip()
    follows = words[-2].kind in ("word", "ident") or words[-2].text == ")"
    return item[: words[-1].start].strip() if follows else item


Params = Sequence[Any] | Mapping[str, Any] | None

_QUERIES: Final = frozenset({"SELECT", "FROM", "VALUES", "TABLE"})
_ONCE: Final = ("nextval", "ai_")
"""Words of a query that must not run twice: its only effect, and calls that cost a model's time."""

_VECTORS: Final = {"BIGINT[]": "OID[]", "SMALLINT[]": "INT2VECTOR", "UINTEGER[]": "OIDVECTOR"}
_Shaped = TypeVar("_Shaped", StatementDescription, StatementResult)


def is_query(sql: str) -> bool:
    """Return True if a statement only reads."""
    word = first_word(sql)
    return word in _QUERIES or (word in ("", "WITH") and not may_change(tokenize(sql)))


def refuse_writing_cursor(sql: str) -> None:
    """Refuse a cursor over a statement that writes, before it runs, as PostgreSQL does.

    Raises:
        SqlSyntaxError: the statement is not a query.
        FeatureNotSupportedError: the query has a WITH that writes.
    """
    kind = classify(tokenize(sql))
    if kind.writes:
        raise SqlSyntaxError("DECLARE CURSOR needs a query")
    if kind is StatementKind.QUERY:
        raise FeatureNotSupportedError(
            "DECLARE CURSOR must not contain data-modifying statements in WITH",
            hint="Run the statement without a cursor; for many rows, write to a temporary table.",
        )


def with_oids(shaped: _Shaped, sql: str) -> _Shaped:
    """Give the numbers in catalog queries PostgreSQL's types, which drivers require."""
    if shaped.columns is None or DATABASE not in sql:
        return shaped
    return replace(shaped, columns=tuple(Column(c.name, _type(c)) for c in shaped.columns))


def _type(column: Column) -> str:
    if column.type_name == "UINTEGER" and column.name in FUNCTION_COLUMNS:
        return "REGPROC"
    return _VECTORS.get(column.type_name, column.type_name)


async def run(inner: SqlSession, sql: str, params: Params) -> StatementResult:
    """Run one statement and preserve the months in its rows."""
    if not is_query(sql):
        return await _run_returning(inner, sql, params)
    lowered = sql.lower()
    if any(word in lowered for word in _ONCE):
        columns = (await inner.describe(sql)).columns
        if columns is not None and has_interval(columns):
            result = await inner.execute(_query_with_text(sql, columns), params)
            return replace(result, columns=columns)
    result = await inner.execute(sql, params)
    if result.columns is not None and has_interval(result.columns):
        again = await inner.execute(_query_with_text(sql, result.columns), params)
        result = replace(result, rows=again.rows)
    return with_oids(result, sql)


async def _run_returning(inner: SqlSession, sql: str, params: Params) -> StatementResult:
    selects = classify(tokenize(sql)) is StatementKind.QUERY  # after a WITH that writes
    gives_rows = selects or "returning" in sql.lower()
    columns = (await inner.describe(sql)).columns if gives_rows else None
    if columns is None or not has_interval(columns):
        return await inner.execute(sql, params)
    with_text = _query_with_text if selects else _returning_with_text
    result = await inner.execute(with_text(sql, columns), params)
    return replace(result, columns=columns)


@dataclass(slots=True)
class TimeLeft:
    """Remaining seconds of a statement; 0 at the start means no limit."""

    seconds: float


class StatementTimer:
    """The timer of one session."""

    def __init__(self, cancel: Callable[[], Awaitable[None]]) -> None:
        """Create the timer; ``cancel`` stops the session's statement."""
        self._cancel = cancel
        self._counts = False

    @contextmanager
    def running(self, left: TimeLeft) -> Iterator[None]:
        """Cancel the enclosed work at the time limit; reduce ``left`` by the time used.

        Raises:
            DeadlineError: the time limit cancelled the statement.
        """
        if self._counts or not left.seconds:
            yield
            return
        loop = asyncio.get_running_loop()
        cancels: list[asyncio.Future[None]] = []

        def expire() -> None:
            cancels.append(asyncio.ensure_future(self._cancel()))

        started_s, timer = loop.time(), loop.call_later(left.seconds, expire)
        self._counts = True
        try:
            yield
        except CancelledByUserError:
            if not cancels:
                raise
            raise DeadlineError("canceling statement due to statement timeout") from None
        finally:
            self._counts = False
            timer.cancel()
            left.seconds = max(left.seconds - (loop.time() - started_s), 1e-3)


class NamedRows:
    """A RowStream with PostgreSQL's column names and within the statement's time limit."""

    def __init__(
        self, rows: RowStream, columns: tuple[Column, ...], timer: StatementTimer, left: TimeLeft
    ) -> None:
        self.columns = columns
        self.close = rows.close
        self._rows = rows
        self._timer = timer
        self._left = left

    @property
    def result(self) -> StatementResult | None:
        return self._rows.result

    async def next_rows(self) -> Sequence[tuple[Any, ...]]:
        with self._timer.running(self._left):
            return await self._rows.next_rows()
