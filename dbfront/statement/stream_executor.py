"""Runs a statement with AI calls as a stream: rows are returned before later rows are read.

The engine streams the base query (sql/plan/stream_plan.py) in windows. For each window the AI
filters are evaluated first, in order of expected savings, then the outputs for rows that passed. A
window is collected, evaluated and replayed like a statement; only the answers are kept after the
window. The first windows are small, so that the first row comes early. Window sizes double up to a
size at which sorting prompts pays off. With a LIMIT a window aims at the number of rows still
needed, so that few calls are wasted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tierkv.dbfront.accounts.statistics import FilterOrder, cost_tokens
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection, EngineResult
from tierkv.dbfront.statement.ai_statement import AiStatement
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import CancelledByUserError, TierKVError
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.plan.stream_plan import StreamPlan, why_not_bound, window_statement

_FIRST_LIMITED: Final = 16
_FIRST: Final = 64
_MOST: Final = 4096
_MOST_REPEATING: Final = 65_536
"""Maximum rows of a window while few rows need new calls."""


class WindowSize:
    """Chooses the size of each window of one statement."""

    def __init__(self, max_concurrency: int, *, limited: bool) -> None:
        self._size = _FIRST_LIMITED if limited else min(max_concurrency, _FIRST)
        self._most = _MOST
        self._seen = self._given = 0

    def next(self, remaining: int | None) -> int:
        """Return the number of rows for the next window; ``remaining`` rows are still needed."""
        if remaining is None or not self._given:
            return self._size
        share = self._given / self._seen
        return max(1, min(self._size, math.ceil(1.25 * remaining / share)))

    def ran(self, *, rows: int, given: int, calls: int) -> None:
        """Record a window: its rows, the rows returned, and its distinct calls."""
        self._seen += rows
        self._given += given
        self._most = _MOST_REPEATING if 8 * calls < rows else _MOST
        self._size = max(1, min(2 * self._size, self._most))


KEPT_ANSWERS: Final = 100_000
"""Number of distinct calls whose answers are kept. The limit bounds memory; older calls are asked
again.
"""

_MEANING: Final = (
    "default_collation",
    "integer_division",
    "ieee_floating_point_ops",
    "search_path",
)
"""Engine settings with influence on expressions around AI calls."""

_COLLATED: Final = (
    r"SELECT EXISTS (SELECT 1 FROM duckdb_tables() WHERE regexp_matches(sql, '\bCOLLATE\b', 'i')) "
    r"OR EXISTS (SELECT 1 FROM duckdb_views() WHERE NOT internal "
    r"AND regexp_matches(sql, '\bCOLLATE\b', 'i'))"
)
"""Query: does any column have a collation? The answer to a call about the column would inherit it.

The pattern matches the whole word, because every session on the wire has a catalogue table with a
column ``datcollate``.
"""

Row = tuple[Any, ...]


class RowSink(Protocol):
    """Receives a statement's rows as they are produced.

    1. ``begin`` is called once, before the first rows and before any call for the rows is sent.
    2. ``begin`` and ``put`` return when the reader wants rows, and raise RowsNotWantedError when
       the reader has closed.
    """

    async def begin(self, columns: tuple[Column, ...]) -> None: ...

    async def put(self, rows: Sequence[Row]) -> None: ...


class CannotStreamError(Exception):
    """The statement has to be replayed because of its data or the session; the message says why.

    Raised before a call is sent or a row is returned. Never leaves the executor.
    """


class StreamedStatement:
    """One statement as a stream, in an open transaction.

    Attributes:
        columns: columns of the statement's rows; set by ``open``.
        count: rows returned so far.
    """

    def __init__(
        self,
        stream: StreamPlan,
        params: Mapping[str, Any],
        connection: DuckDbConnection,
        statement: AiStatement,
        *,
        max_concurrency: int,
    ) -> None:
        self.columns: tuple[Column, ...] = ()
        self.count = 0
        self._stream = stream
        self._params = params
        self._connection = connection
        self._statement = statement
        self._key_base = connection.new_key_base()
        self._types: tuple[str, ...] = ()
        self._outputs: tuple[Column, ...] = ()
        self._outputs_at: tuple[int, ...] = ()
        self._skip = stream.offset
        self._more_rows = False
        self._filters = statement.trace.filter_order = FilterOrder(len(stream.filters))
        self._size = WindowSize(max_concurrency, limited=stream.limit is not None)

    async def open(self) -> None:
        """Start the base query and determine the columns; no call is made yet.

        Raises:
            CannotStreamError: the statement has to be replayed.
            TierKVError: the engine refuses the base query, although it may accept the statement.
        """
        await self.prepare()
        self.based_on(await self._connection.open_rows(self._stream.base_sql, self._params))

    async def prepare(self) -> None:
        """Determine the input and output types of the window statements.

        Raises:
            CannotStreamError: the statement cannot run over windows.
            TierKVError: the engine refuses the base query.
        """
        stream, connection = self._stream, self._connection
        self._refuse("the session created macros" if connection.own_functions else "")
        bound = stream.bound
        if any(not column.is_call_text for column in bound):
            described = await connection.describe(stream.types_sql, None)
            self._types = tuple(column.type_name for column in described[-len(bound) :])
        else:
            self._types = ("VARCHAR",) * len(bound)
        for column, type_name in zip(bound, self._types, strict=True):
            self._refuse(why_not_bound(column, type_name))
        if any(column.is_call_text and column.compared for column in bound):
            ((collated,),) = (await connection.command(_COLLATED)).rows
            self._refuse("an answer is compared, possibly with a collation" if collated else "")
        mine, beside = await connection.settings_beside(_MEANING)
        self._refuse("" if mine == beside else "the session changed the engine's settings")
        self._outputs = await self._describe_window_statements()

    def based_on(self, base: Sequence[Column]) -> None:
        """Set the columns of the base query.

        Raises:
            CannotStreamError: a column has the name of a placeholder.
        """
        names = [column.name for column in base]
        taken = [name for name in self._stream.placeholders if names.count(name) > 1]
        self._refuse(f"it has a column named {taken[0]}" if taken else "")
        self._outputs_at = tuple(names.index(name) for name in self._stream.placeholders)
        columns = list(base[: len(base) - len(self._stream.bound)])
        for at, output in zip(self._outputs_at, self._outputs, strict=True):
            columns[at] = output
        self.columns = tuple(columns)

    async def rows(self) -> AsyncGenerator[list[Row]]:
        """Yield the rows, one window at a time."""
        remaining = self._stream.limit
        ended = remaining == 0
        while not ended:
            size = self._size.next(remaining)
            base = await self._connection.fetch_rows(size)
            ended = len(base) < size
            self._more_rows = not ended
            asked = self._statement.stats.distinct_calls
            rows = await self._window(base, remaining)
            self._size.ran(
                rows=len(base),
                given=len(rows),
                calls=self._statement.stats.distinct_calls - asked,
            )
            self._statement.book.forget_oldest(KEPT_ANSWERS)
            if remaining is not None:
                remaining -= len(rows)
                ended = ended or not remaining
            self.count += len(rows)
            if rows:
                yield rows

    async def _window(self, base: list[Row], remaining: int | None) -> list[Row]:
        alive = await self._filtered(base)
        skipped = min(self._skip, len(alive))
        self._skip -= skipped
        end = None if remaining is None else skipped + remaining
        return await self.with_outputs([base[index] for index in alive[skipped:end]])

    async def with_outputs(self, base: list[Row]) -> list[Row]:
        """Convert rows of the base query to rows of the statement."""
        width = len(self.columns)
        if self._stream.outputs_sql is None or not base:
            return [row[:width] for row in base]
        answers = await self._ask(self._stream.outputs_sql, base)
        rows = [list(row[:width]) for row in base]
        for row, answer in zip(rows, answers.rows, strict=True):
            for at, value in zip(self._outputs_at, answer, strict=True):
                row[at] = value
        return [tuple(row) for row in rows]

    async def _filtered(self, base: list[Row]) -> list[int]:
        """Return the indexes of the rows that pass every filter."""
        alive = list(range(len(base)))
        measuring = self._filters.measuring
        for number in self._filters.order():
            # While the filters are unmeasured, each filter is asked about every row.
            asked = list(range(len(base))) if measuring else alive
            if not asked:
                break
            before = cost_tokens(self._statement.stats)
            rows = [base[index] for index in asked]
            result = await self._ask(self._stream.filters[number], rows)
            passed = {asked[row[0]] for row in result.rows}
            cost = cost_tokens(self._statement.stats) - before
            self._filters.ran(number, rows=len(asked), passed=len(passed), cost=cost)
            alive = [index for index in alive if index in passed]
        return alive

    async def _ask(self, sql: RewrittenSql, rows: list[Row]) -> EngineResult:
        count = len(self._stream.bound)
        window = list(zip(*(row[-count:] for row in rows), strict=True))
        text = self._over_window(sql, len(rows))
        rounds = _WindowRounds(
            self._statement, self._connection, text, self._params, window, self._key_base
        )
        return await self._statement.until_answered(rounds, partly=self._more_rows)

    def _over_window(self, sql: RewrittenSql, rows: int) -> RewrittenSql:
        base = self._key_base
        return window_statement(sql, self._stream.bound, self._types, key_base=base, rows=rows)

    async def _describe_window_statements(self) -> tuple[Column, ...]:
        """Return the output columns; check that the helper connection accepts every statement."""
        try:
            for sql in self._stream.filters:
                await self._connection.describe_window(self._over_window(sql, 0))
            if self._stream.outputs_sql is None:
                return ()
            return await self._connection.describe_window(
                self._over_window(self._stream.outputs_sql, 0)
            )
        except CancelledByUserError:
            raise
        except TierKVError as error:
            raise CannotStreamError(error.message) from error

    def _refuse(self, reason: str) -> None:
        if reason:
            raise CannotStreamError(reason)


@dataclass(slots=True)
class _WindowRounds:
    """EngineRounds over one window; a run changes nothing, so ``undo`` does nothing."""

    statement: AiStatement
    connection: DuckDbConnection
    sql: RewrittenSql
    params: Mapping[str, Any]
    window: Sequence[Sequence[str | None]]
    key_base: int

    @property
    def behind(self) -> bool:
        """Always False: DuckDB reads the book directly."""
        return False

    async def run(self) -> EngineResult | None:
        """See EngineRounds."""
        try:
            return await self.connection.run_window(
                self.sql,
                self.params,
                self.statement.book,
                self.window,
                key_base=self.key_base,
            )
        except CancelledByUserError:
            raise
        except TierKVError:
            # NULL replaces missing answers, so the complete statement may not fail.
            if not self.statement.book.has_misses:
                raise
            return None

    async def undo(self) -> None:
        """See EngineRounds."""

    def enough(self) -> bool:
        """See EngineRounds."""
        return False
