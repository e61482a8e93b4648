"""A DB-API 2.0 connection (PEP 249) to an embedded TierKV: everything in this process.

``tierkv.connect()`` returns a Connection. ``connection.execute(sql).fetchall()`` works as in
DuckDB, and ``cursor()`` opens an independent session. As in DuckDB, statements outside of a
transaction commit automatically. Parameters are ``?`` or ``$1``.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # for its exit hook, see the end of this file
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from tierkv.dbapi_errors import DatabaseError as DatabaseError
from tierkv.dbapi_errors import DataError as DataError
from tierkv.dbapi_errors import Error as Error
from tierkv.dbapi_errors import IntegrityError as IntegrityError
from tierkv.dbapi_errors import InterfaceError as InterfaceError
from tierkv.dbapi_errors import InternalError as InternalError
from tierkv.dbapi_errors import NotSupportedError as NotSupportedError
from tierkv.dbapi_errors import OperationalError as OperationalError
from tierkv.dbapi_errors import ProgrammingError as ProgrammingError
from tierkv.dbapi_errors import Warning as Warning
from tierkv.dbapi_errors import translate_error as translate_error
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.sql_session import SqlServer, SqlSession
from tierkv.dbfront.statement_results import Column, Notice, RowStream, StatementResult
from tierkv.frames import QueryResult
from tierkv.kvcore import errors
from tierkv.loop_thread import LoopThread
from tierkv.sql.plan.parameters import parameter_types

apilevel = "2.0"
threadsafety = 1
paramstyle = "qmark"

Parameters = Sequence[Any] | Mapping[str, Any]


class Cursor:
    """One SQL session and its last result.

    Attributes:
        arraysize: number of rows of ``fetchmany()`` without a size.
        notices: warnings of the last statement.
    """

    def __init__(self, loop: LoopThread, session: SqlSession) -> None:
        self._loop = loop
        self._session: SqlSession | None = session
        self._result: StatementResult | None = None
        self._total: int | None = None
        self._position = 0
        self._kept = True
        self.arraysize = 1
        self.notices: tuple[Notice, ...] = ()

    @property
    def session(self) -> SqlSession:
        """The session behind this cursor.

        Raises:
            InterfaceError: the cursor is closed.
        """
        if self._session is None:
            raise InterfaceError(errors.SqlError("the cursor is closed", sqlstate="08003"))
        return self._session

    @property
    def description(self) -> list[tuple[Any, ...]] | None:
        """Columns of the last result as PEP 249 seven-tuples; None without a result set."""
        if self._result is None or self._result.columns is None:
            return None
        return [(c.name, c.type_name, None, None, None, None, None) for c in self._result.columns]

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the last result; empty without a result set."""
        return () if self._result is None else self._result.columns or ()

    @property
    def rowcount(self) -> int:
        """Rows returned or changed by the last statement; -1 if unknown."""
        if self._total is not None:
            return self._total
        if self._result is None or not self._kept:
            return -1
        if self._result.columns is not None:
            return len(self._result.rows)
        last = self._result.command_tag.rpartition(" ")[2]
        return int(last) if last.isdigit() else -1

    @property
    def command_tag(self) -> str:
        """PostgreSQL's tag of the last statement, for example ``UPDATE 3``."""
        return "" if self._result is None else self._result.command_tag

    def execute(self, sql: str, parameters: Parameters | None = None) -> Cursor:
        """Run the statements of ``sql`` in order and keep the last one's result.

        Ctrl-C cancels the statement, including the work at the model.

        Raises:
            Error: a subclass by SQLSTATE.
        """
        self._begin(kept=True)
        error = self._run(self.session, sql, parameters)
        if error is not None:
            # Raised here, the traceback shows the caller's code and keeps no engine alive.
            raise error
        return self

    def _run(self, session: SqlSession, sql: str, parameters: Parameters | None) -> Error | None:
        try:
            statements = session.split(sql)
            _check_count(statements, parameters)
            for statement in statements:
                self._result = self._loop.run(
                    session.execute(statement, parameters), on_interrupt=session.cancel
                )
                self.notices += self._result.notices
        except errors.TierKVError as error:
            return translate_error(error)
        return None

    def stream(self, sql: str, parameters: Parameters | None = None) -> Iterator[tuple[Any, ...]]:
        """Run one statement and yield rows while the statement runs, as psycopg's cursors do.

        The rows are not kept, so ``fetchone`` and the other fetch methods need ``execute``.
        ``notices`` are set at the end. Closing the iterator stops the statement.

        Raises:
            Error: a subclass by SQLSTATE; all rows before the error were correct.
        """
        with closing(self.batches(sql, parameters)) as batches:
            for batch in batches:
                yield from batch

    def batches(
        self, sql: str, parameters: Parameters | None = None
    ) -> Generator[Sequence[tuple[Any, ...]], None, None]:
        """Run one statement as ``stream`` does, and yield the available rows as batches.

        ``description`` is set with the first batch, ``command_tag`` at the end.
        """
        self._begin(kept=False)
        session = self.session
        try:
            _check_count([sql], parameters)
            opened = self._loop.run(
                session.execute_rows(sql, parameters), on_interrupt=session.cancel
            )
            if isinstance(opened, StatementResult):
                self._ended(opened)
                if opened.rows:
                    yield opened.rows
            else:
                self._result = StatementResult("", opened.columns)
                yield from self._batches_of(opened, session)
        except errors.TierKVError as error:
            raise translate_error(error) from None

    def _batches_of(
        self, rows: RowStream, session: SqlSession
    ) -> Iterator[Sequence[tuple[Any, ...]]]:
        interrupted = threading.Event()

        async def cancel() -> None:
            interrupted.set()
            await session.cancel()

        try:
            while batch := self._loop.run(rows.next_rows(), on_interrupt=cancel):
                if interrupted.is_set():  # The rows came during the interrupt.
                    raise KeyboardInterrupt
                yield batch
        finally:
            self._loop.run(rows.close())
        if rows.result is not None:
            self._ended(rows.result)

    def _begin(self, *, kept: bool) -> None:
        self._result, self._total, self._position, self.notices = None, None, 0, ()
        self._kept = kept

    def _ended(self, result: StatementResult) -> None:
        """Record the end of a statement whose rows are not kept."""
        self._result = replace(result, rows=())
        last = result.command_tag.rpartition(" ")[2]
        self._total = int(last) if last.isdigit() else -1
        self.notices = result.notices

    def cancel(self) -> None:
        """Stop the running statement, including the work at the model; callable from any thread."""
        self._loop.run(self.session.cancel())

    def executemany(self, sql: str, rows: Sequence[Parameters]) -> Cursor:
        """Run a statement once per parameter row; ``rowcount`` is the total."""
        total = 0
        for row in rows:
            total += max(0, self.execute(sql, row).rowcount)
        self._total = total
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, or None at the end."""
        rows = self._rows()
        if self._position >= len(rows):
            return None
        self._position += 1
        return rows[self._position - 1]

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        """Return up to ``size`` rows (``arraysize`` by default)."""
        start = self._position
        self._position = min(start + (size or self.arraysize), len(self._rows()))
        return list(self._rows()[start : self._position])

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows not fetched yet."""
        start, self._position = self._position, len(self._rows())
        return list(self._rows()[start:])

    def df(self) -> Any:
        """Return all rows not fetched yet as a pandas.DataFrame.

        Raises:
            Error: pandas is not installed, or the statement gave no rows.
        """
        return self._frame(QueryResult.df)

    def arrow(self) -> Any:
        """Return all rows not fetched yet as a pyarrow.Table; see ``df``."""
        return self._frame(QueryResult.arrow)

    def pl(self) -> Any:
        """Return all rows not fetched yet as a polars.DataFrame; see ``df``."""
        return self._frame(QueryResult.pl)

    def _frame(self, make: Callable[[QueryResult], Any]) -> Any:
        left = self._rows()[self._position :]
        frame = make(QueryResult(self.columns, left))
        self._position += len(left)
        return frame

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while (row := self.fetchone()) is not None:
            yield row

    def setinputsizes(self, sizes: Sequence[Any]) -> None:
        """Do nothing (PEP 249 allows it)."""

    def setoutputsize(self, size: int, column: int | None = None) -> None:
        """Do nothing (PEP 249 allows it)."""

    def close(self) -> None:
        """End the session and roll an open transaction back. Safe to call twice."""
        if self._session is not None:
            self._loop.run(self._session.close())
            self._session = None

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rows(self) -> Sequence[tuple[Any, ...]]:
        _ = self.session
        if self._result is None or self._result.columns is None or not self._kept:
            raise InterfaceError(
                errors.SqlError("the last statement gave no rows to fetch", sqlstate="24000")
            )
        return self._result.rows


class Connection:
    """An embedded TierKV with one default cursor; also a context manager."""

    def __init__(self, loop: LoopThread, server: SqlServer, close: Any, client: ClientInfo) -> None:
        self._loop = loop
        self._server = server
        self._close = close
        self._client = client
        self._cursors: list[Cursor] = []
        _open_connections.add(self)
        self._default = self.cursor()

    def cursor(self) -> Cursor:
        """Open another session.

        Raises:
            InterfaceError: the connection is closed.
        """
        self._check_open()
        session = self._loop.run(self._server.open_session(self._client))
        cursor = Cursor(self._loop, session)
        self._cursors.append(cursor)
        return cursor

    def execute(self, sql: str, parameters: Parameters | None = None) -> Cursor:
        """Run SQL on the default cursor and return the cursor."""
        self._check_open()
        return self._default.execute(sql, parameters)

    def executemany(self, sql: str, rows: Sequence[Parameters]) -> Cursor:
        """Run SQL once per parameter row on the default cursor."""
        self._check_open()
        return self._default.executemany(sql, rows)

    def sql(self, sql: str, parameters: Parameters | None = None) -> QueryResult:
        """Run SQL on the default cursor and return the whole result, for example for ``df()``.

        Unlike the cursor from ``execute``, a QueryResult does not change when more SQL is run.
        """
        self._check_open()
        cursor = self._default.execute(sql, parameters)
        rows = cursor.fetchall() if cursor.description is not None else []
        return QueryResult(cursor.columns, rows, cursor.command_tag, cursor.notices)

    def begin(self) -> None:
        """Begin a transaction on the default cursor."""
        self.execute("BEGIN")

    def commit(self) -> None:
        """Commit the default cursor's transaction, if any."""
        self._check_open()
        if self._default.session.transaction_status != "I":
            self.execute("COMMIT")

    def rollback(self) -> None:
        """Roll the default cursor's transaction back, if any."""
        self._check_open()
        if self._default.session.transaction_status != "I":
            self.execute("ROLLBACK")

    def close(self) -> None:
        """Close all cursors and stop the embedded cluster. Safe to call twice."""
        if self._close is None:
            return
        _open_connections.discard(self)
        for cursor in self._cursors:
            cursor.close()
        self._loop.run(self._close())
        self._close = None
        del self._server
        self._loop.stop()

    def _check_open(self) -> None:
        if self._close is None:
            raise InterfaceError(errors.SqlError("the connection is closed", sqlstate="08003"))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_count(statements: Sequence[str], parameters: Parameters | None) -> None:
    """Refuse excess parameters; the engine refuses missing parameters."""
    if parameters is None or isinstance(parameters, Mapping):
        return
    used = max((len(parameter_types(statement)) for statement in statements), default=0)
    if len(parameters) > used:
        raise errors.SqlError(
            f"{len(parameters)} values were given, but the SQL has places for {used}",
            sqlstate="42P02",
        )


_open_connections: WeakSet[Connection] = WeakSet()


def _close_all() -> None:
    """Stop the clusters of a script that forgets close() or ends with a traceback."""
    for connection in list(_open_connections):
        connection.close()


# Not atexit: atexit hooks run after thread pools refuse work, and a cluster needs thread pools to
# stop. Hooks run last in, first out, so the pools' own hook has to be registered before this one:
# hence the import above.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # no public name for it
