"""The conversation of one logged-in client, for both query protocols and COPY.

An ``Exchange`` joins the sans-I/O connection, the socket and the SQL session: it reads the next
message, sends rows with back-pressure, and runs statements within reach of cancel, hang-up and
statement_timeout.

Statements sent together succeed or fail together, as in PostgreSQL: a simple query with several
statements, and all statements of the extended protocol up to Sync, are one transaction unless the
client opened a transaction. Both handlers share one ``ImplicitTransaction`` per connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar

from tierkv.dbfront.accounts.statistics import StatementProgress
from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.connection import ConnectionPhase, PgConnection
from tierkv.dbfront.pgwire.protocol.replies import (
    Field,
    IdleTimeoutError,
    error_fields,
    notice_fields,
)
from tierkv.dbfront.pgwire.protocol.stream import WRITE_HIGH_BYTES, PgStream
from tierkv.dbfront.postgres_dialect.session.session import DialectSession
from tierkv.dbfront.postgres_values.binary_format import Encoder, binary_encoder
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.postgres_values.text_format import text_encoder
from tierkv.dbfront.postgres_values.types import pg_type
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Notice, RowStream, StatementResult
from tierkv.kvcore.errors import CancelledByUserError, SqlError, TierKVError
from tierkv.kvcore.limits import MAX_RESULT_COLUMNS

_LOG = logging.getLogger(__name__)
_ROWS_AT_ONCE: Final = 256
_T = TypeVar("_T")


class Exchange:
    """The conversation of one client.

    Attributes:
        connection: the protocol rules.
        stream: the socket.
        session: the SQL session.
        running: True while a statement runs; a cancel is passed on only then.
        goodbye: the error sent for a cancelled statement while the server stops; None otherwise.
        leaving: the error that ends the connection between two statements; None: no end is near.
    """

    def __init__(self, connection: PgConnection, stream: PgStream, session: DialectSession) -> None:
        self.connection = connection
        self.stream = stream
        self.session = session
        self.running = False
        self.goodbye: TierKVError | None = None
        self.leaving: TierKVError | None = None
        self._pending = bytearray()
        self._cancels: set[asyncio.Task[None]] = set()
        self._told: Notice | None = None
        stream.on_hangup = self.cancel

    async def next_message(self) -> m.FrontendMessage | None:
        """Return the next message, or None if the client is gone. Flush before waiting.

        Raises:
            RemoteProtocolError: malformed bytes; the connection must end.
            IdleTimeoutError: the client was idle for longer than the session's settings allow.
        """
        while True:
            message = self.connection.next_message()
            if message is not None:
                assert not isinstance(
                    message, m.SslRequest | m.GssEncRequest | m.CancelRequest | m.Startup
                )
                return message
            await self.flush()
            data = await self._read()
            if not data:
                return None
            self.connection.receive_data(data)

    async def _read(self) -> bytes:
        """Wait for the client; between statements no longer than the session's settings allow."""
        idle = self._between_statements
        in_transaction = self.session.transaction_status != "I"
        if self.leaving is not None and idle and not in_transaction:
            raise self.leaving
        limit_s = self.session.settings.idle_timeout_s(in_transaction=in_transaction) if idle else 0
        try:
            async with asyncio.timeout(limit_s or None):
                return await self.stream.read()
        except TimeoutError:
            raise IdleTimeoutError(in_transaction=in_transaction) from None

    @property
    def _between_statements(self) -> bool:
        return self.connection.phase is ConnectionPhase.READY and not self.connection.extended

    def leave(self, error: TierKVError) -> None:
        """End the connection with ``error`` as soon as no statement and no transaction is open."""
        self.leaving = error
        if self._between_statements and self.session.transaction_status == "I":
            self.stream.interrupt(error)

    def send(self, data: bytes) -> None:
        """Queue bytes until the next flush."""
        self._pending += data

    async def flush(self) -> None:
        """Pass queued bytes to the socket and wait while the client is slow."""
        if self._pending:
            self.stream.write(bytes(self._pending))
            self._pending.clear()
            await self.stream.drain()

    async def send_much(self, data: bytes) -> None:
        """Queue bytes, flushing whenever 64 KB are queued."""
        self._pending += data
        if len(self._pending) >= WRITE_HIGH_BYTES:
            await self.flush()

    async def send_rows(self, rows: Sequence[tuple[Any, ...]], encoders: Sequence[Encoder]) -> None:
        """Send DataRows; back-pressure of a slow client bounds the memory."""
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            await self.send_much(replies.data_rows(rows[at : at + _ROWS_AT_ONCE], encoders))

    async def send_stream(self, rows: RowStream, encoders: Sequence[Encoder]) -> StatementResult:
        """Send each batch of DataRows at once; return the result after the last row."""
        try:
            while batch := await rows.next_rows():
                await self.send_rows(batch, encoders)
                await self.flush()
        finally:
            await rows.close()
        assert rows.result is not None, "the last rows were taken"
        return rows.result

    def send_notices(self, result: StatementResult) -> None:
        """Send the notices of a statement, and the changed settings."""
        told, self._told = self._told, None
        for notice in result.notices:
            if notice is not told:
                self.send(replies.notice_response(notice_fields(notice)))
        for name, value in self.session.settings.take_changes():
            self.send(replies.parameter_status(name, value))

    def tell(self, progress: StatementProgress) -> None:
        """Send a running statement's notice at once, because its rows may take a while."""
        if progress.notice is not None:
            self._told = progress.notice
            self.send(replies.notice_response(notice_fields(progress.notice)))
            self.stream.write(bytes(self._pending))
            self._pending.clear()

    def send_error(self, error: BaseException) -> None:
        """Send an error that ends the statement but not the connection."""
        if not isinstance(error, TierKVError):
            _LOG.error("statement failed inside the server", exc_info=error)
        self.connection.fail_statement()
        ends = self.goodbye is not None and isinstance(error, CancelledByUserError)
        said = self.goodbye if self.goodbye is not None and ends else error
        self.send(replies.error_response(error_fields(said, fatal=ends)))

    async def fail(self, error: BaseException) -> None:
        """Send an error, and mark the client's transaction as failed, whatever the cause."""
        self.send_error(error)
        await self.session.fail_transaction()

    def cancel(self) -> None:
        """Cancel the running statement, if any; may be called from any callback of the loop."""
        if self.running:
            task = asyncio.get_running_loop().create_task(self.session.cancel())
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def run(self, work: Awaitable[_T]) -> _T:
        """Run a statement within reach of a cancel.

        Raises:
            DeadlineError: statement_timeout passed.
        """
        self.running = True
        try:
            with self.session.timed():
                return await work
        finally:
            self.running = False

    async def close(self) -> None:
        """Close the SQL session, which rolls back an open transaction."""
        self.stream.on_hangup = None
        if self._cancels:
            await asyncio.gather(*self._cancels, return_exceptions=True)
        await self.session.close()


def result_fields(result_columns: Sequence[Any], formats: Sequence[int] = ()) -> tuple[Field, ...]:
    """Return RowDescription fields of columns; ``formats`` as in Bind: zero, one or one per column.

    Raises:
        SqlError: 54011, more columns than the protocol allows.
    """
    if len(result_columns) > MAX_RESULT_COLUMNS:
        raise SqlError(
            f"the result has {len(result_columns)} columns, at most {MAX_RESULT_COLUMNS} are "
            "allowed",
            sqlstate="54011",
        )
    codes = expand_formats(formats, len(result_columns))
    fields = []
    for column, code in zip(result_columns, codes, strict=True):
        kind = pg_type(column.type_name)
        table = column.table_oid, column.attnum
        fields.append(Field(column.name, kind.oid, kind.size, kind.typmod, code, *table))
    return tuple(fields)


def expand_formats(formats: Sequence[int], count: int) -> Sequence[int]:
    """Return one format code per column."""
    if not formats:
        return [0] * count
    return list(formats) * count if len(formats) == 1 else formats


def encoders(result_columns: Sequence[Any], codes: Sequence[int]) -> list[Encoder]:
    """Return one encoder per column."""
    return [
        (binary_encoder if code else text_encoder)(pg_type(c.type_name), c.type_name)
        for c, code in zip(result_columns, codes, strict=True)
    ]


_BEGIN: Final = frozenset({"BEGIN", "START"})
_END: Final = frozenset({"COMMIT", "END", "ROLLBACK", "ABORT"})
_ALONE: Final = frozenset(
    {"SET", "RESET", "SHOW", "VACUUM", "CHECKPOINT", "ATTACH", "DETACH", "USE", "INSTALL", "LOAD"}
    | {"PRAGMA", "DISCARD", "DEALLOCATE", "PREPARE", "LISTEN", "UNLISTEN"}
)
"""Statements that need no transaction, or that DuckDB refuses inside a transaction."""


class ImplicitTransaction:
    """At most one open implicit transaction.

    Attributes:
        active: True if this object, not the client, opened the current transaction.
    """

    def __init__(self, session: SqlSession) -> None:
        self.active = False
        self._session = session

    async def before(self, sql: str) -> StatementResult | None:
        """Open a transaction for a statement that needs a transaction.

        A BEGIN of the client takes over the open implicit transaction: its result is then returned,
        and the statement must not be run.
        """
        word = first_word(sql)
        if self.active and word in _BEGIN:
            self.active = False
            return StatementResult("BEGIN")
        if word in _END and not _goes_back(sql):
            self.active = False
        elif word not in _BEGIN | _ALONE and self._session.transaction_status == "I":
            await self._session.execute("BEGIN")
            self.active = True
        return None

    async def finish(self, *, failed: bool) -> None:
        """Commit or roll back the implicit transaction."""
        if self.active:
            self.active = False
            if self._session.transaction_status != "I":
                await self._session.execute("ROLLBACK" if failed else "COMMIT")


def _goes_back(sql: str) -> bool:
    """Return True for ROLLBACK TO, which does not end the transaction."""
    return any(token.upper == "TO" for token in tokens(sql))
