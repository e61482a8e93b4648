"""The embedded relational engine: DuckDB, one cursor and one thread per session.

The event loop never runs DuckDB. Each connection has a worker thread, and cancelling the awaiting
task interrupts the query and waits until the engine has stopped. The AI functions registered here
only look up answers in the AnswerBook of the running statement.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import duckdb

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.contracts import Column
from tierkv.dbfront.databases.duckdb_errors import RaisedErrors, is_disk_full, to_tierkv_error
from tierkv.dbfront.databases.opening import closed_on_failure, connect, open_already
from tierkv.dbfront.databases.simulations import Simulations
from tierkv.dbfront.databases.thread_work import to_its_end
from tierkv.kvcore.errors import ConfigError, SqlError, TierKVError
from tierkv.sql.calls.dialect import Dialect, engine_function
from tierkv.sql.plan.kept_names import KeptNames
from tierkv.sql.plan.plan import MAX_FORMS
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.plan.stream_plan import WINDOW_FUNCTION
from tierkv.sql.views import SCHEMA, SESSION_VARIABLE, simulate_ddl, view_ddl

log = logging.getLogger(__name__)
T = TypeVar("T")

Window = Sequence[Sequence[str | None]]
"""Columns of text, all of equal length."""

_MOST_SECRET: Final = 2**63 // MAX_FORMS - 2
"""Bound of a statement's secret number, about 51 bits of a BIGINT form key."""
_COPY_BATCH_ROWS: Final = 4096
_NOT_NULL: Final = "must not be NULL"
_ENGINE_NAMES: Final = (
    "SELECT lower(function_name) FROM duckdb_functions() WHERE internal "
    "UNION SELECT lower(type_name) FROM duckdb_types() WHERE internal"
)


@dataclass(frozen=True, slots=True)
class DuckDbConfig:
    """Configuration of the engine.

    Attributes:
        path: database file; empty for an in-memory database.
        sandbox: refuse files, network and extension loading, and lock the engine's settings.
        threads: engine threads; with 0, DuckDB chooses.
        memory_limit: for example ``4GB``; if empty, DuckDB chooses.
        trace_dir: folder of the request traces for tierkv.simulate; if empty and ``sandbox`` is on,
            tierkv.simulate reads no traces.
    """

    path: str = ""
    sandbox: bool = True
    threads: int = 0
    memory_limit: str = ""
    trace_dir: str = ""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The engine's raw result set."""

    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]]


@dataclass(slots=True)
class EngineChanges:
    """Counters of the changes that sessions made in the database.

    Attributes:
        commits: committed changes; a commit can make the data of an open transaction out of date.
        schema: changes of tables, macros and other objects, whether committed, rolled back or still
            open.
    """

    commits: int = 0
    schema: int = 0


class DuckDbEngine:
    """A database; sessions get connections from the engine.

    Attributes:
        books: the AnswerBook of each statement's AI calls, by the statement's number.
        windows: the columns of text for each window statement, by the statement's number.
        cancel_session: called on an engine thread by ``pg_cancel_backend(pid)``.
        simulations: runs ``tierkv.simulate``.
        changes: counters of the changes that sessions made.
        raised: errors of the functions registered here, until a connection reports the error.
        reset_statistics: called on an engine thread by ``tierkv.stat_reset(what)``; returns the
            time of the reset as text.
        kept_names: names that clients must not change.
    """

    def __init__(self, config: DuckDbConfig) -> None:
        """Open the database, register the AI functions and create the admin views.

        Raises:
            ConfigError: the database can't be opened or configured.
        """
        self.books: dict[int, AnswerBook] = {}
        self.windows: dict[int, Window] = {}
        self.changes = EngineChanges()
        self.cancel_session: Callable[[int], bool] = lambda pid: False
        self.reset_statistics: Callable[[str | None], str] = lambda what: ""
        self.raised = RaisedErrors()
        self.simulations = Simulations(config.trace_dir, any_file=not config.sandbox)
        try:
            self._root = connect(config.path)
            with closed_on_failure(self._root):
                self._set_up(config)
                self.kept_names = self._kept_names(config)
        except duckdb.Error as error:
            if f'"{engine_function(Dialect.DUCKDB, kept_in_place=False)}" already exists' in str(
                error
            ):
                raise open_already(config.path) from None
            raise ConfigError(
                f"can't open the database {config.path or ':memory:'}: {error}",
                hint="Free space on its disk."
                if is_disk_full(str(error))
                else "Check the path, and that no other process has the file open.",
            ) from None

    def connect(self) -> DuckDbConnection:
        """Open a connection for a session."""
        cursor = self._root.cursor()
        number = _secret_number()
        cursor.execute(f"SET VARIABLE {SESSION_VARIABLE} = {number}")
        return DuckDbConnection(cursor, number, self)

    def close(self) -> None:
        """Close the database; the connections must be closed first."""
        self.simulations.close()
        self._root.close()

    def _set_up(self, config: DuckDbConfig) -> None:
        for kept in (False, True):
            name = engine_function(Dialect.DUCKDB, kept_in_place=kept)
            self._register(name, self._look_up, "BIGINT", "VARCHAR", volatile=kept)
        self._register(WINDOW_FUNCTION, self._window_text, "BIGINT", "BIGINT")
        simulate = self.raised.marking(self.simulations.rows)
        self._register("tierkv_simulate", simulate, "BIGINT", "VARCHAR", "VARCHAR")
        reset = self.raised.marking(lambda what: self.reset_statistics(what))
        self._register("tierkv_stat_reset", reset, "VARCHAR")
        self._root.create_function(
            "pg_cancel_backend",
            lambda pid: self.cancel_session(pid),
            ["BIGINT"],
            "BOOLEAN",
            side_effects=True,
        )
        for statement in _settings(config):
            self._root.execute(statement)
        if (self._root.execute("SELECT current_database()").fetchone() or ("",))[0] == SCHEMA:
            raise ConfigError(
                f'a database file named "{SCHEMA}" hides the admin views of schema {SCHEMA}',
                hint="Rename the file.",
            )
        self._make_views()
        if config.sandbox:
            self._root.execute("SET lock_configuration = true")

    def _make_views(self) -> None:
        """Create the admin views; on a full disk the existing views stay as they are."""
        try:
            self._root.execute(view_ddl())
            self._root.execute(simulate_ddl())
        except duckdb.Error as error:
            if not is_disk_full(str(error)) or not self._has_views():
                raise
            log.error("the disk of front.database is full: tables can be read, not written")

    def _has_views(self) -> bool:
        known = "SELECT count(*) FROM duckdb_views() WHERE schema_name = ?"
        return bool((self._root.execute(known, [SCHEMA]).fetchone() or (0,))[0])

    def _register(
        self, name: str, function: Callable[..., Any], *types: str, volatile: bool = True
    ) -> None:
        self._root.create_function(
            name,
            function,
            list(types),
            "VARCHAR",
            null_handling="special",  # type: ignore[call-overload]  # text is accepted
            side_effects=volatile,
        )

    def _kept_names(self, config: DuckDbConfig) -> KeptNames:
        rows = self._root.execute(_ENGINE_NAMES).fetchall()
        ((database,),) = self._root.execute("SELECT lower(current_database())").fetchall()
        return KeptNames(
            frozenset(name for (name,) in rows),
            frozenset({"main", "public", "pg_catalog", database}),
            others=config.sandbox,
        )

    def _look_up(self, key: int, text: str | None) -> str | None:
        """Return the answer of one row's AI call; called on DuckDB's threads."""
        book = self.books.get(key // MAX_FORMS)
        if book is None:
            raise self.raised.marked(_not_called())
        return book.look_up(key, text)

    def _window_text(self, column: int, row: int) -> str | None:
        """Read one cell of a statement's window; ``column`` counts from its key base."""
        window = self.windows.get(column // MAX_FORMS)
        if window is None:
            raise self.raised.marked(_not_called())
        return window[column % MAX_FORMS][row]


class DuckDbConnection:
    """The connection of one session to the engine; statements run one after the other.

    Attributes:
        own_functions: True if the session may have created macros invisible to ``run_window``.
    """

    def __init__(
        self,
        cursor: duckdb.DuckDBPyConnection,
        number: int,
        engine: DuckDbEngine,
    ) -> None:
        self._cursor = cursor
        self._number = number
        self._engine = engine
        self._books = engine.books
        self._windows = engine.windows
        self._simulations = engine.simulations
        self._raised = engine.raised
        self.own_functions = False
        self._beside: DuckDbConnection | None = None
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

    def new_key_base(self) -> int:
        """Draw an unguessable first form key of a statement.

        The engine's functions find the running statement by the statement's keys. A client with the
        keys of another user's statement could call a model in the other user's name and read the
        rows of the statement. Keys are therefore valid for one statement only.
        """
        return _secret_number() * MAX_FORMS

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
            self._beside = DuckDbConnection(self._cursor.cursor(), self._number, self._engine)
        return self._beside

    async def command(self, text: str) -> EngineResult:
        """Run an internal statement."""
        return await self.run(RewrittenSql(text, (), ()))

    async def settle(self, text: str, *, last: bool = False) -> None:
        """Run BEGIN, COMMIT or ROLLBACK, which a cancel never stops. ``last`` as in ``run``."""
        sql, loop = RewrittenSql(text, (), ()), asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, lambda: self._run(sql, {}, None))
        await to_its_end(future, None, last=last)

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
        self._simulations.cancel(self._number)
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
        return await to_its_end(future, self._interrupt, last=last)

    def _interrupt(self) -> None:
        self._simulations.cancel(self._number)
        self._cursor.interrupt()


def _secret_number() -> int:
    return 1 + secrets.randbelow(_MOST_SECRET)


def _not_called() -> SqlError:
    return SqlError("this function is TierKV's own, no client may call it", sqlstate="42501")


def _settings(config: DuckDbConfig) -> list[str]:
    statements = ["SET GLOBAL errors_as_json = true"]
    if config.threads:
        statements.append(f"SET threads = {int(config.threads)}")
    if config.memory_limit:
        limit = config.memory_limit.replace("'", "''")
        statements.append(f"SET memory_limit = '{limit}'")
    if config.sandbox:
        statements += [
            "SET autoinstall_known_extensions = false",
            "SET autoload_known_extensions = false",
            "SET enable_external_access = false",
        ]
    return statements


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _type_name(name: str) -> str:
    """Return the type as a client sees it: an untyped NULL is text."""
    return "VARCHAR" if name.strip('"') == "NULL" else name
