"""The embedded relational engine: a DuckDB database, opened with its functions and admin views.

dbfront/statement/server.py creates the engine and takes one connection per session
(duckdb_connection.py). The AI functions registered here only look up answers in the AnswerBook of
the running statement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import duckdb

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.databases.duckdb_connection import (
    OPERATORS,
    DuckDbConnection,
    Window,
    secret_number,
)
from tierkv.dbfront.databases.duckdb_errors import RaisedErrors, is_disk_full
from tierkv.dbfront.databases.simulations import Simulations
from tierkv.kvcore.errors import ConfigError, SqlError
from tierkv.sql.calls.dialect import Dialect, engine_function
from tierkv.sql.plan.call_sites import MAX_FORMS
from tierkv.sql.plan.kept_names import KeptNames
from tierkv.sql.plan.stream_plan import WINDOW_FUNCTION
from tierkv.sql.schema_rights import SHARED_SCHEMAS, name_readers
from tierkv.sql.view_rights import UserNames, view_reads
from tierkv.sql.views import SCHEMA, SESSION_VARIABLE, simulate_ddl, view_ddl

log = logging.getLogger(__name__)
_UNREAD_LOG = "Failure while replaying WAL"
_ENGINE_NAMES: Final = (
    "SELECT lower(function_name) FROM duckdb_functions() WHERE internal "
    "UNION SELECT lower(type_name) FROM duckdb_types() WHERE internal"
)
_SCHEMAS: Final = "SELECT DISTINCT lower(schema_name) FROM duckdb_schemas()"
_DEFINITIONS: Final = (
    "SELECT lower(view_name), lower(schema_name), sql FROM duckdb_views() WHERE NOT internal "
    f"AND database_name = current_database() AND schema_name <> '{SCHEMA}' UNION ALL "
    "SELECT lower(function_name), lower(schema_name), macro_definition FROM duckdb_functions() "
    f"WHERE NOT internal AND database_name = current_database() AND schema_name <> '{SCHEMA}' "
    "AND function_type IN ('macro', 'table_macro')"
)

_CANCEL: Final = (
    "CREATE OR REPLACE TEMP MACRO pg_cancel_backend(pid) AS "
    f"tierkv_cancel(getvariable('{SESSION_VARIABLE}')::BIGINT, pid::BIGINT)"
)
"""A macro of each session, because a function of the engine does not know who calls."""


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
        cancel_session: called on an engine thread by ``pg_cancel_backend(pid)``, with the number of
            the session that asks.
        simulations: runs ``tierkv.simulate``.
        changes: counters of the changes that sessions made.
        raised: errors of the functions registered here, until a connection reports the error.
        reset_statistics: likewise by ``tierkv.stat_reset(what)``; returns the time of the reset as
            text.
        kept_names: names that clients must not change.
    """

    _engine_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: DuckDbConfig) -> None:
        """Open the database, register the AI functions and create the admin views.

        Raises:
            ConfigError: the database can't be opened or configured.
        """
        self.books: dict[int, AnswerBook] = {}
        self.windows: dict[int, Window] = {}
        self.changes = EngineChanges()
        self._user_names: tuple[int, UserNames] | None = None
        self.cancel_session: Callable[[int, int], bool] = lambda number, pid: False
        self.reset_statistics: Callable[[int, str | None], str] = lambda number, what: ""
        self.raised = RaisedErrors()
        self.simulations = Simulations(config.trace_dir, any_file=not config.sandbox)
        try:
            self._root = _opened(config.path)
            with _closed_on_failure(self._root):
                self._set_up(config)
                self.kept_names = self._kept_names(config)
        except duckdb.Error as error:
            if f'"{engine_function(Dialect.DUCKDB, kept_in_place=False)}" already exists' in str(
                error
            ):
                raise _open_already(config.path) from None
            raise ConfigError(
                f"can't open the database {config.path or ':memory:'}: {error}",
                hint="Free space on its disk."
                if is_disk_full(str(error))
                else "Check the path, and that no other process has the file open.",
            ) from None

    def connect(self) -> DuckDbConnection:
        """Open a connection for a session."""
        cursor = self._root.cursor()
        number = secret_number()
        cursor.execute(f"SET VARIABLE {SESSION_VARIABLE} = {number};{_CANCEL};{OPERATORS}")
        return DuckDbConnection(cursor, number, self)

    def known_names(self) -> UserNames | None:
        """Return what ``user_names`` returned last; None after changes."""
        known = self._user_names
        return known[1] if known is not None and known[0] == self.changes.schema else None

    def user_names(self) -> UserNames:
        """Ask the engine for users' schemas, and for what computes names; not on the event loop."""
        state = self.changes.schema
        with closing(self._root.cursor()) as cursor:
            schemas = frozenset(name for (name,) in cursor.execute(_SCHEMAS).fetchall())
            made = cursor.execute(_DEFINITIONS).fetchall()
        schemas -= SHARED_SCHEMAS
        readers = name_readers((name, text) for name, _, text in made)
        names = UserNames(schemas, readers, view_reads(made, schemas))
        self._user_names = state, names
        return names

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query of the front; none if its tables do not exist yet."""
        with closing(self._root.cursor()) as cursor:
            try:
                return cursor.execute(query).fetchall()
            except duckdb.CatalogException:
                return []

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
        reset = self.raised.marking(lambda number, what: self.reset_statistics(number, what))
        self._register("tierkv_stat_reset", reset, "BIGINT", "VARCHAR")
        self._root.create_function(
            "tierkv_cancel",
            self.raised.marking(lambda number, pid: self.cancel_session(number, pid)),
            ["BIGINT", "BIGINT"],
            "BOOLEAN",
            side_effects=True,
        )
        with suppress(duckdb.Error):  # Only where it was installed: LOAD downloads nothing.
            self._root.execute("LOAD vss")
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
        if not DuckDbEngine._engine_names:  # All databases of a process have the same: 50 ms saved.
            names = self._root.execute(_ENGINE_NAMES).fetchall()
            DuckDbEngine._engine_names = frozenset(name for (name,) in names)
        ((database,),) = self._root.execute("SELECT lower(current_database())").fetchall()
        return KeptNames(
            DuckDbEngine._engine_names,
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


def _not_called() -> SqlError:
    return SqlError(
        "this function is internal to TierKV; clients may not call it", sqlstate="42501"
    )


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


def _opened(path: str | None) -> duckdb.DuckDBPyConnection:
    """Open a database file, or an in-memory database.

    After a kill DuckDB replays the log of changes missing from the file. While opening the file,
    DuckDB replays the log before most functions are registered, and fails if a constraint or
    default of a changed table calls a function. A database attached later is replayed with all
    functions.

    Raises:
        duckdb.Error: the database can't be opened.
    """
    try:
        return duckdb.connect(path or ":memory:")
    except duckdb.Error as error:
        if path is None or _UNREAD_LOG not in str(error):
            raise
        log.warning("replaying the write-ahead log of %s after a kill", path)
    with closing(duckdb.connect(":memory:")) as beside:
        beside.execute("SELECT upper('a')")
        quoted = path.replace("'", "''")
        beside.execute(f"ATTACH '{quoted}' AS recovered")
        beside.execute("CHECKPOINT recovered")
        beside.execute("DETACH recovered")
    return duckdb.connect(path)


def _open_already(path: str) -> ConfigError:
    """Return the error for a second opening of a database in the same process."""
    return ConfigError(
        f"the database {path} is already open in this process",
        hint="Use that connection, with a cursor for each thread, or close() it first.",
    )


@contextmanager
def _closed_on_failure(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Close a connection on failure; its functions would keep the connection open forever."""
    try:
        yield
    except BaseException:
        connection.close()
        raise
