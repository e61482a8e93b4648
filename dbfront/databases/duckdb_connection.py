"""One session's connection to DuckDB: a cursor and a worker thread.

The event loop never runs DuckDB. Cancelling the awaiting task interrupts the query and waits until
the engine has stopped. ``DuckDbEngine.connect`` creates the connections; the executor and the
transactions of dbfront/statement/ run statements here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import duckdb

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.databases.duckdb_errors import to_tierkv_error
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import SqlError, TierKVError
from tierkv.sql.calls.dialect import DUCKDB_INNER_PRODUCT
from tierkv.sql.plan.call_sites import MAX_FORMS
from tierkv.sql.plan.kept_names import KeptNames
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.view_rights import UserNames

if TYPE_CHECKING:
    from tierkv.dbfront.databases.duckdb_engine import DuckDbEngine, EngineChanges

T = TypeVar("T")
_log = logging.getLogger(__name__)

Window = Sequence[Sequence[str | None]]
"""Columns of text, all of equal length."""

_MOST_SECRET: Final = 2**63 // MAX_FORMS - 2
"""Bound of a statement's secret number, about 51 bits of a BIGINT form key."""
OPERATORS: Final = (
    f'CREATE OR REPLACE TEMP MACRO "{DUCKDB_INNER_PRODUCT}"(a, b) AS '
    "list_negative_inner_product(a, b)"
)
"""Operators that the engine lacks, for a new connection; DuckDB has ``<=>`` and ``<->``."""
_COPY_BATCH_ROWS: Final = 4096
_NOT_NULL: Final = "must not be NULL"
_INTERRUPT_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The engine's raw result set."""

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]


class DuckDbConnection:
    """The connection of one session to the engine; statements run one after the other.

    Attributes:
        number: secret number of the session.
        own_functions: True if the session may have created macros invisible to ``run_window``.
    """

    def __init__(
        self,
        cursor: duckdb.DuckDBPyConnection,
        number: int,
        engine: DuckDbEngine,
    ) -> None:
        self._cursor = cursor
        self.number = number
        self._engine = engine
        self._books = engine.books
        self._windows = engine.windows
        self._simulations = engine.simulations
        self._raised = engine.raised
        self.own_functions = False
        self._beside: DuckDbConnection | None = None
        self._first_path = ""
        self._fetched: RewrittenSql | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="duckdb")

    @property
    def engine_changes(self) -> EngineChanges:
        """Return the counters of changes that sessions made in the database."""
        return self._engine.changes

    @property
    def kept_names(self) -> KeptNames:
        """Return the names that clients must not change."""
        return self._engine.kept_names

    async def user_names(self) -> UserNames:
        """Return users' schemas, and the views and macros with computed names of tables."""
        known = self._engine.known_names()
        return await asyncio.to_thread(self._engine.user_names) if known is None else known

    def new_key_base(self) -> int:
        """Draw an unguessable first form key of a statement.

        The engine's functions find the running statement by the statement's keys. A client with the
        keys of another user's statement could call a model in the other user's name and read the
        rows of the statement. Keys are therefore valid for one statement only.
        """
        return secret_number() * MAX_FORMS

    async def run(
        self,
        sql: RewrittenSql,
        params: Mapping[str, Any] | None = None,
        book: AnswerBook | None = None,
        *,
        last: bool = False,
    ) -> EngineResult:
        """Run one statement to its end.

        Args:
            sql: the statement.
            params: values by parameter name; unused values are ignored.
            book: answers for the AI calls of the statement.
            last: True if nothing of the statement follows; a cancel too late to stop the engine is
                then ignored.

        Raises:
            TierKVError: the engine's error, translated.
        """
        used = {name: value for name, value in (params or {}).items() if name in sql.parameters}
        return await self._in_thread(lambda: self._run(sql, used, book), last=last)

    async def open_rows(
        self, sql: RewrittenSql, params: Mapping[str, Any] | None = None
    ) -> tuple[Column, ...]:
        """Start a query with rows fetched on demand; return the columns.

        The query ends when the last row is fetched, or when the connection runs another statement.
        """
        used = {name: value for name, value in (params or {}).items() if name in sql.parameters}
        return await self._in_thread(lambda: self._open(sql, used))

    async def fetch_rows(self, most: int) -> list[tuple[Any, ...]]:
        """Fetch the next rows of the ``open_rows`` query; fewer than ``most`` rows mean the end."""
        return await self._in_thread(lambda: self._fetch(most))

    async def end_rows(self) -> None:
        """End the query of ``open_rows``, even if rows are left; the transaction continues."""
        await self.command("SELECT 0")

    async def run_window(
        self,
        sql: RewrittenSql,
        params: Mapping[str, Any],
        book: AnswerBook | None,
        window: Window,
        *,
        key_base: int,
    ) -> EngineResult:
        """Run a statement over columns of text while rows of another query are being fetched.

        A second connection runs the statement and sees neither the transaction nor temporary
        tables. The statement reads column ``n`` as ``key_base + n``.
        """
        beside = self._helper()
        self._windows[key_base // MAX_FORMS] = window
        try:
            return await beside.run(sql, params, book)
        finally:
            self._windows.pop(key_base // MAX_FORMS, None)

    async def describe_window(self, sql: RewrittenSql) -> tuple[Column, ...]:
        """Return the columns of a statement for ``run_window``."""
        return await self._helper().describe(sql, None)

    async def settings_beside(self, names: Sequence[str]) -> tuple[list[Any], list[Any]]:
        """Return engine settings of this connection, and of the connection for windows."""
        text = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
        return (await self.command(text)).rows, (await self._helper().command(text)).rows

    def _helper(self) -> DuckDbConnection:
        if self._beside is None:
            cursor = self._cursor.cursor()
            cursor.execute(OPERATORS)
            if self._first_path:
                cursor.execute(self._first_path)
            self._beside = DuckDbConnection(cursor, self.number, self._engine)
        return self._beside

    async def enter_schema(self, schema: str) -> None:
        """Look names up in a schema first, then in ``main``."""
        path = ("main" if schema == "main" else f"{_quoted(schema)},main").replace("'", "''")
        self._first_path = f"SET search_path = '{path}'"
        await self.command(self._first_path)
        if self._beside is not None:
            await self._beside.command(self._first_path)

    async def make_schema(self, schema: str) -> bool:
        """Create a schema unless it exists; return whether it exists then."""
        try:
            await self.command(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)}")
        except SqlError as error:  # Another session makes it, or the disk is full.
            _log.warning("schema %s was not made: %s", schema, error.message)
        self.engine_changes.schema += 1
        return schema.lower() in (await self.user_names()).schemas

    async def command(self, text: str) -> EngineResult:
        """Run an internal statement."""
        return await self.run(RewrittenSql(text, (), ()))

    async def settle(self, text: str, *, last: bool = False) -> None:
        """Run BEGIN, COMMIT or ROLLBACK, which a cancel never stops. ``last`` as in ``run``."""
        sql, loop = RewrittenSql(text, (), ()), asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: self._run(sql, {}, None))
        await _to_its_end(future, None, last=last)

    async def set_variable(self, name: str, value: str) -> None:
        """Set a session variable for the admin views to unpack."""
        await self.run(RewrittenSql(f"SET VARIABLE {name} = $1", (), ("1",)), {"1": value})

    async def describe(self, sql: RewrittenSql, book: AnswerBook | None) -> tuple[Column, ...]:
        """Return the columns of a query without running the query."""
        described = RewrittenSql(
            f"DESCRIBE {sql.text}",
            tuple((offset + 9, source) for offset, source in sql.marks),
            sql.parameters,
        )
        try:
            result = await self.run(described, dict.fromkeys(sql.parameters), book)
        except SqlError as error:
            if _NOT_NULL not in error.message:
                raise
            # round(x, $1) can't be described with a NULL.
            result = await self.run(described, dict.fromkeys(sql.parameters, 1), book)
        return tuple(Column(row[0], _type_name(row[1])) for row in result.rows)

    async def check(self, sql: RewrittenSql) -> None:
        """Raise the engine parser's error for a statement, without resolving names or running."""

        def parse() -> None:
            with self._translated(sql):
                self._cursor.extract_statements(sql.text)

        await self._in_thread(parse)

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        """Insert rows of text, cast to the table's types; the caller has the transaction."""
        if not rows:
            return 0
        width = len(columns) or len(rows[0])
        names = f" ({', '.join(map(_quoted, columns))})" if columns else ""
        values = ", ".join(f"r[{index}]" for index in range(1, width + 1))
        insert = f"INSERT INTO {table}{names} SELECT {values} FROM (SELECT unnest($1) AS r)"
        for start in range(0, len(rows), _COPY_BATCH_ROWS):
            batch = [list(row) for row in rows[start : start + _COPY_BATCH_ROWS]]
            await self.run(RewrittenSql(insert, (), ("1",)), {"1": batch})
        return len(rows)

    async def close(self) -> None:
        """Interrupt the running statement and free the connection."""
        if self._beside is not None:
            await self._beside.close()
        self._simulations.cancel(self.number)
        self._cursor.interrupt()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._cursor.close)
        self._thread.shutdown()

    def _run(
        self, sql: RewrittenSql, params: Mapping[str, Any], book: AnswerBook | None
    ) -> EngineResult:
        number = None if book is None or book.first_key is None else book.first_key // MAX_FORMS
        if book is not None and number is not None:
            self._books[number] = book
        try:
            with self._translated(sql):
                columns = self._execute(sql, params)
                return EngineResult(columns, self._cursor.fetchall() if columns else [])
        finally:
            if number is not None:
                self._books.pop(number, None)

    def _open(self, sql: RewrittenSql, params: Mapping[str, Any]) -> tuple[Column, ...]:
        with self._translated(sql):
            columns = self._execute(sql, params)
        self._fetched = sql
        return columns

    def _fetch(self, most: int) -> list[tuple[Any, ...]]:
        assert self._fetched is not None, "something else was run while rows were fetched"
        with self._translated(self._fetched):
            return self._cursor.fetchmany(most)

    def _execute(self, sql: RewrittenSql, params: Mapping[str, Any]) -> tuple[Column, ...]:
        self._fetched = None
        result = self._cursor.execute(sql.text, dict(params) if params else None)
        return tuple(Column(item[0], _type_name(str(item[1]))) for item in result.description or ())

    @contextmanager
    def _translated(self, sql: RewrittenSql) -> Iterator[None]:
        try:
            yield
        except duckdb.Error as error:
            failed = self._raised.take(str(error))
            raise failed or to_tierkv_error(error, sql.text, sql.source_position) from None
        except RuntimeError as error:
            # DuckDB's Python layer raises RuntimeError for a cursor interrupted between execute and
            # fetch.
            raise TierKVError(f"the engine failed: {error}") from error

    async def _in_thread(self, work: Callable[[], T], *, last: bool = False) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await _to_its_end(future, self._interrupt, last=last)

    def _interrupt(self) -> None:
        self._simulations.cancel(self.number)
        self._cursor.interrupt()


def secret_number() -> int:
    """Draw an unguessable number of a session or statement."""
    return 1 + secrets.randbelow(_MOST_SECRET)


async def _to_its_end(
    future: asyncio.Future[T], interrupt: Callable[[], None] | None, *, last: bool
) -> T:
    """Wait until the work is done, however often the waiting task is cancelled.

    Args:
        future: the work.
        interrupt: asks the work to stop. Called repeatedly after a cancel, because an interrupt
            before the work starts is lost. None if the work must not be stopped.
        last: nothing of the statement follows; a cancel after the work is too late and ignored.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled, and the work was stopped or is done.
        Exception: the work's own error. The error has precedence over a cancel if ``interrupt`` is
            None.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        stopping = cancelled is not None and interrupt is not None
        try:
            await asyncio.wait([future], timeout=_INTERRUPT_AGAIN_S if stopping else None)
        except asyncio.CancelledError as error:
            cancelled = error
        if cancelled is not None and interrupt is not None and not future.done():
            interrupt()
    failed = future.exception()
    if cancelled is None or (last and failed is None):
        return future.result()
    if failed is not None and interrupt is None:
        raise failed
    raise cancelled


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _type_name(name: str) -> str:
    """Return the type as a client sees it: an untyped NULL is text."""
    return "VARCHAR" if name.strip('"') == "NULL" else name
