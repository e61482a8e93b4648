"""The extended query protocol: Parse, Bind, Describe, Execute, Close, Sync.

An ``ExtendedQuery`` per connection holds the prepared statements and portals. After an error the
connection drops messages until Sync. Describing never runs a statement. All statements between two
Syncs are one transaction unless the client opened a transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tierkv.dbfront.copying.statement import parse_copy
from tierkv.dbfront.pgwire.conversation.copy import run_copy
from tierkv.dbfront.pgwire.conversation.exchange import (
    Exchange,
    ImplicitTransaction,
    encoders,
    expand_formats,
    result_fields,
)
from tierkv.dbfront.pgwire.conversation.portals import (
    Portal,
    PreparedStatement,
    bind,
    placing_errors,
    prepare,
)
from tierkv.dbfront.pgwire.conversation.simple_query import check_text, simple_query
from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.postgres_dialect.inference.column_names import with_names
from tierkv.dbfront.postgres_dialect.inference.open_parameters import infer_types
from tierkv.dbfront.postgres_values.binary_format import Encoder
from tierkv.dbfront.postgres_values.parameters import without_void
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.postgres_values.types import PgType, pg_type
from tierkv.dbfront.statement_results import (
    Column,
    RowStream,
    StatementDescription,
    StatementResult,
)
from tierkv.kvcore.errors import SqlError, TierKVError
from tierkv.sql.plan.plan import SqlStatement
from tierkv.sql.text.statement import statement_spans

_ENDS_TRANSACTION: Final = frozenset({"COMMIT", "END", "ROLLBACK", "ABORT"})
_NO_RESULT: Final = StatementDescription(columns=None)
_ALL_ROWS: Final = 1 << 62
_MAX_STATEMENTS: Final = 10_000
"""Maximum of prepared statements; pools keep hundreds, and a leak should get an error."""


class ExtendedQuery:
    """Prepared statements and portals of one connection."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._statements: dict[str, PreparedStatement] = {}
        self._portals: dict[str, Portal] = {}
        self._implicit = ImplicitTransaction(exchange.session)

    async def handle(self, message: m.FrontendMessage) -> None:
        """Answer one message; errors go to the client."""
        try:
            await self._dispatch(message)
        except TierKVError as error:
            await self._exchange.fail(error)
        except (ConnectionError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must cost one statement only
            await self._exchange.fail(error)

    async def _dispatch(self, message: m.FrontendMessage) -> None:
        match message:
            case m.Parse():
                text = SqlStatement(message.sql)
                async with text.read_ahead():
                    await self._parse(message, text)
            case m.Bind():
                await self._bind(message)
            case m.Describe(kind="S"):
                await self._describe_statement(message.name)
            case m.Describe():
                await self._describe_portal(message.name)
            case m.Execute():
                await self._execute(message)
            case m.Close():
                await self._close(message)
            case m.Flush():
                await self._exchange.flush()
            case _:
                raise AssertionError(f"not an extended message: {message}")

    async def sync(self) -> None:
        """End the batch: end its transaction, then send ReadyForQuery."""
        try:
            failed = self._exchange.connection.skipping
            await self._implicit.finish(failed=failed)
        except TierKVError as error:
            await self._exchange.fail(error)
        status = self._exchange.session.transaction_status
        if status == "I":
            await self._close_portals(*self._portals)
        self._exchange.send(self._exchange.connection.send_ready(status))

    async def query(self, sql: str) -> None:
        """Answer a simple Query; drop the unnamed statement and portal, and end the batch."""
        self._statements.pop("", None)
        await self._close_portals("")
        await simple_query(self._exchange, sql, self._implicit)
        if self._exchange.session.transaction_status == "I":
            await self._close_portals(*self._portals)

    async def _close_portals(self, *names: str) -> None:
        for name in names:
            portal = self._portals.pop(name, None)
            if portal is not None:
                await portal.close()

    async def _parse(self, message: m.Parse, text: SqlStatement) -> None:
        if not message.statement:
            self._statements.pop("", None)
        check_text(text)
        statements = self._exchange.session.split(text)
        if len(statements) > 1:
            raise SqlError(
                "cannot insert multiple commands into a prepared statement", sqlstate="42601"
            )
        if message.statement and message.statement in self._statements:
            raise SqlError(
                f'prepared statement "{message.statement}" already exists', sqlstate="42P05"
            )
        if len(self._statements) >= _MAX_STATEMENTS:
            raise SqlError(
                f"a session can have at most {_MAX_STATEMENTS} prepared statements",
                sqlstate="53400",
            )
        # The text includes preceding comments: positions of errors count from its start.
        sql: str = text.part(0, statement_spans(text)[0][1]) if statements else ""
        sql = SqlStatement.of(without_void(sql, message.parameter_oids))
        self._refuse_if_aborted(sql)
        statement = prepare(sql, message.parameter_oids, parse_copy(sql) if sql else None)
        await self._description(statement)  # Errors of the statement are raised here.
        self._statements[message.statement] = statement
        self._exchange.send(replies.PARSE_COMPLETE)

    async def _bind(self, message: m.Bind) -> None:
        statement = self._statement(message.statement)
        self._refuse_if_aborted(statement.sql)
        if message.portal and message.portal in self._portals:
            raise SqlError(f'portal "{message.portal}" already exists', sqlstate="42P03")
        if statement.needs_description():
            await self._description(statement)
        bound = bind(statement, message)
        await self._close_portals(message.portal)
        self._portals[message.portal] = bound
        self._exchange.send(replies.BIND_COMPLETE)

    async def _description(self, statement: PreparedStatement) -> StatementDescription:
        if statement.description is None:
            statement.inferred = await self._infer(statement)
            statement.description = await self._describe(statement, statement.described_casts())
        return statement.description

    async def _infer(self, statement: PreparedStatement) -> dict[int, PgType]:
        """Infer the types of untyped parameters from their places in the statement."""
        if not statement.untyped() or self._exchange.session.transaction_status == "E":
            return {}
        return await infer_types(statement.sql, self._exchange.session.own_rows)

    async def _describe(
        self, statement: PreparedStatement, casts: dict[int, str]
    ) -> StatementDescription:
        if not statement.sql or statement.copy is not None:
            return _NO_RESULT
        with placing_errors(statement.sql, casts):
            sql = statement.cast_sql(casts)
            async with sql.read_ahead():
                described = await self._exchange.session.describe(sql)
        if described.columns is None:
            return described
        columns = await self._numbered(described.columns, statement.sql)
        return replace(described, columns=with_names(columns, statement.sql))

    async def _numbered(self, columns: tuple[Column, ...], sql: str) -> tuple[Column, ...]:
        """Give columns the current numbers of their tables."""
        await self._exchange.session.learn_tables(sql)
        plain = (
            replace(column, table_oid=0, attnum=0) if column.table_oid else column
            for column in columns
        )
        return self._exchange.session.numbered(tuple(plain), sql)

    async def _describe_statement(self, name: str) -> None:
        statement = self._statement(name)
        description = await self._description(statement)
        columns = description.columns
        if columns is not None:  # Tables may have changed since Parse.
            columns = await self._numbered(columns, statement.sql)
        self._exchange.send(replies.parameter_description(statement.parameter_oids()))
        self._send_shape(columns, ())

    async def _describe_portal(self, name: str) -> None:
        cursor = self._exchange.session.cursors.columns(name)
        if cursor is not None and name not in self._portals:
            self._send_shape(cursor, ())  # an SQL cursor is a portal too
            return
        portal = self._portal(name)
        if portal.described is None:
            statement = portal.statement
            casts = statement.with_text(portal.casts)
            if casts == statement.described_casts():
                portal.described = await self._description(statement)
            else:
                portal.described = await self._describe(statement, casts)
        columns = portal.described.columns
        if columns is not None:
            columns = await self._numbered(columns, portal.statement.sql)
        self._send_shape(columns, portal.result_formats)

    def _send_shape(self, columns: tuple[Column, ...] | None, formats: tuple[int, ...]) -> None:
        if columns is None:
            self._exchange.send(replies.NO_DATA)
        else:
            _check_formats(formats, len(columns))
            self._exchange.send(replies.row_description(result_fields(columns, formats)))

    async def _execute(self, message: m.Execute) -> None:
        portal = self._portal(message.portal)
        sql = portal.statement.sql
        if not sql:
            self._exchange.send(replies.EMPTY_QUERY)
            return
        if portal.stream is not None:
            await self._exchange.run(self._send_stream(portal, portal.stream, message.max_rows))
            return
        if portal.result is None:
            self._refuse_if_aborted(sql)
            opened = await self._run(portal)
            if not isinstance(opened, StatementResult):
                portal.stream = opened
                await self._exchange.run(self._send_stream(portal, opened, message.max_rows))
                return
            portal.result = opened
            self._exchange.send_notices(portal.result)
        elif portal.result.columns is None:
            raise SqlError(f'portal "{message.portal}" cannot be run', sqlstate="55000")
        await self._send_portal(portal, portal.result, message.max_rows)

    async def _run(self, portal: Portal) -> StatementResult | RowStream:
        """Run the portal's statement; a longer batch runs it in the batch's transaction."""
        exchange = self._exchange
        sql = portal.statement.sql
        alone = exchange.connection.sync_is_next() and not self._implicit.active
        taken_over = None if alone else await self._implicit.before(sql)
        if taken_over is not None:
            return taken_over
        if portal.statement.copy is not None:
            return StatementResult(await run_copy(exchange, portal.statement.copy))
        if result := self.deallocate(sql):
            return result
        cast_sql = portal.statement.cast_sql(portal.casts)
        async with cast_sql.read_ahead():
            with placing_errors(sql, portal.casts):
                running = exchange.session.execute_rows(cast_sql, portal.values or None)
                return await exchange.run(running)

    async def _send_stream(self, portal: Portal, stream: RowStream, max_rows: int) -> None:
        """Send rows as soon as possible, up to ``max_rows`` (0 means all)."""
        codes = _check_formats(portal.result_formats, len(stream.columns))
        row_encoders = _encoders_as_described(portal, stream.columns, codes)
        left = max_rows or _ALL_ROWS
        while left and (rows := await portal.take(left)):
            left -= len(rows)
            await self._exchange.send_rows(rows, row_encoders)
            await self._exchange.flush()
        sent = (max_rows or _ALL_ROWS) - left
        if stream.result is None:
            self._exchange.send(replies.PORTAL_SUSPENDED)
            return
        self._exchange.send_notices(stream.result)
        self._exchange.send(replies.command_complete(f"SELECT {sent}"))

    async def _send_portal(self, portal: Portal, result: StatementResult, max_rows: int) -> None:
        if result.columns is None:
            self._exchange.send(replies.command_complete(result.command_tag))
            return
        codes = _check_formats(portal.result_formats, len(result.columns))
        row_encoders = _encoders_as_described(portal, result.columns, codes)
        end = min(len(result.rows), portal.sent + max_rows) if max_rows else len(result.rows)
        batch = result.rows[portal.sent : end]
        portal.sent = end
        await self._exchange.send_rows(batch, row_encoders)
        if end < len(result.rows):
            self._exchange.send(replies.PORTAL_SUSPENDED)
            return
        tag = result.command_tag
        if tag.startswith("SELECT ") and len(batch) != len(result.rows):
            tag = f"SELECT {len(batch)}"
        self._exchange.send(replies.command_complete(tag))

    def deallocate(self, sql: str) -> StatementResult | None:
        """Run DEALLOCATE or DISCARD ALL for statements of Parse; None: the session continues.

        Names known only to SQL's PREPARE are left to the engine.
        """
        words = [token for token in tokens(sql) if token.text != ";"]
        if [word.upper for word in words] == ["DISCARD", "ALL"]:
            self._statements.clear()
            return None
        if not words or words[0].upper != "DEALLOCATE":
            return None
        names = [word for word in words[1:] if word.upper != "PREPARE"]
        if len(names) == 1 and names[0].upper == "ALL":
            self._statements = {}
            return None  # The session has further statements, named by SQL's PREPARE.
        if len(names) == 1 and self._statements.pop(names[0].name, None) is not None:
            return StatementResult("DEALLOCATE")
        return None

    async def _close(self, message: m.Close) -> None:
        if message.kind == "S":
            self._statements.pop(message.name, None)
        else:
            await self._close_portals(message.name)
        self._exchange.send(replies.CLOSE_COMPLETE)

    def _statement(self, name: str) -> PreparedStatement:
        if name not in self._statements:
            shown = f'prepared statement "{name}"' if name else "unnamed prepared statement"
            raise SqlError(f"{shown} does not exist", sqlstate="26000")
        return self._statements[name]

    def _portal(self, name: str) -> Portal:
        if name not in self._portals:
            raise SqlError(f'portal "{name}" does not exist', sqlstate="34000")
        return self._portals[name]

    def _refuse_if_aborted(self, sql: str) -> None:
        if self._exchange.session.transaction_status != "E":
            return
        if sql and first_word(sql) not in _ENDS_TRANSACTION:
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
            )


def _check_formats(formats: tuple[int, ...], count: int) -> list[int]:
    if len(formats) > 1 and len(formats) != count:
        raise SqlError(
            f"bind message has {len(formats)} result formats but query has {count} columns",
            sqlstate="08P01",
        )
    return list(expand_formats(formats, count))


def _encoders_as_described(
    portal: Portal, columns: tuple[Column, ...], codes: list[int]
) -> list[Encoder]:
    """Return encoders for the described types; the engine may have narrowed the types since.

    Raises:
        SqlError: 0A000, the result no longer has the described shape.
    """
    described = portal.described or portal.statement.description
    if described is None or described.columns is None:
        return encoders(columns, codes)
    if len(described.columns) != len(columns):
        raise SqlError("cached plan must not change result type", sqlstate="0A000")
    promised = []
    for told, actual in zip(described.columns, columns, strict=True):
        told_type, actual_type = pg_type(told.type_name), pg_type(actual.type_name)
        if told_type.oid == actual_type.oid:
            promised.append(actual)
        elif told_type.name == "text" or told_type.name == actual_type.name:
            promised.append(told)
        else:
            raise SqlError("cached plan must not change result type", sqlstate="0A000")
    return encoders(promised, codes)
