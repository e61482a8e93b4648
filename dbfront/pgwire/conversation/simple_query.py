"""The simple query protocol: one Query message, any number of statements, text results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.dbfront.copying.statement import parse_copy
from tierkv.dbfront.pgwire.conversation.copy import run_copy
from tierkv.dbfront.pgwire.conversation.exchange import (
    Exchange,
    ImplicitTransaction,
    encoders,
    result_fields,
)
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.statement_results import Column, StatementResult
from tierkv.kvcore.errors import SqlError, TierKVError, UserError
from tierkv.kvcore.limits import MAX_SQL_BYTES
from tierkv.sql.plan.plan import SqlStatement
from tierkv.sql.text.statement import statement_spans


async def simple_query(exchange: Exchange, sql: str, implicit: ImplicitTransaction) -> None:
    """Answer a Query message, including ReadyForQuery; errors go to the client.

    Args:
        exchange: the connection.
        sql: the statements.
        implicit: the connection's implicit transaction. A batch without Sync may have opened the
            transaction: the query joins and ends the transaction, as in PostgreSQL.
    """
    failed = True
    try:
        check_text(sql)
        text = SqlStatement(sql)
        async with text.read_ahead():
            statements = [SqlStatement.of(one) for one in exchange.session.split(text)]
        if not statements:
            exchange.send(replies.EMPTY_QUERY)
        together = implicit if len(statements) > 1 or implicit.active else None
        for number, statement in enumerate(statements):
            async with statement.read_ahead():
                with _placed_in(text, number):
                    await _one(exchange, statement, together)
        failed = False
        await implicit.finish(failed=False)
    except TierKVError as error:
        await exchange.fail(error)
    except (ConnectionError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a bug of ours must cost one statement, not the server
        await exchange.fail(error)
    if failed:
        await implicit.finish(failed=True)
    exchange.send(exchange.connection.send_ready(exchange.session.transaction_status))


@contextmanager
def _placed_in(sql: str, number: int) -> Iterator[None]:
    """Count error positions from the start of the whole query text, as PostgreSQL does."""
    try:
        yield
    except UserError as error:
        if error.position:
            error.position += statement_spans(sql)[number][0]
        raise


async def _one(exchange: Exchange, sql: str, implicit: ImplicitTransaction | None) -> None:
    result = await implicit.before(sql) if implicit is not None else None
    copy = parse_copy(sql)
    if copy is not None:
        exchange.send(replies.command_complete(await run_copy(exchange, copy)))
        return
    if result is None:
        result = await exchange.run(_run(exchange, sql))
        if result is None:
            return
    await _send_result(exchange, result, sql)


async def _run(exchange: Exchange, sql: str) -> StatementResult | None:
    """Run a statement; return None if its rows were sent already."""
    await exchange.session.learn_tables(sql)
    opened = await exchange.session.execute_rows(sql)
    if isinstance(opened, StatementResult):
        return opened
    _send_shape(exchange, opened.columns, sql)
    result = await exchange.send_stream(opened, encoders(opened.columns, [0] * len(opened.columns)))
    exchange.send_notices(result)
    exchange.send(replies.command_complete(result.command_tag))
    return None


async def _send_result(exchange: Exchange, result: StatementResult, sql: str) -> None:
    exchange.send_notices(result)
    if result.columns is not None:
        _send_shape(exchange, result.columns, sql)
        await exchange.send_rows(result.rows, encoders(result.columns, [0] * len(result.columns)))
    exchange.send(replies.command_complete(result.command_tag))


def _send_shape(exchange: Exchange, columns: tuple[Column, ...], sql: str) -> None:
    columns = exchange.session.numbered(columns, sql)
    exchange.send(replies.row_description(result_fields(columns)))


def check_text(sql: str) -> None:
    """Refuse SQL longer than tierkv.kvcore.limits allows, and bytes that are not text.

    Raises:
        SqlError: 54000, 22021.
    """
    if len(sql) > MAX_SQL_BYTES:
        raise SqlError(
            f"the statement has {len(sql)} characters, at most {MAX_SQL_BYTES} are allowed",
            sqlstate="54000",
        )
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise SqlError(
            f'invalid byte sequence for encoding "UTF8": 0x{ord(sql[error.start]) & 0xFF:02x}',
            sqlstate="22021",
            position=error.start + 1,
            hint="Send statements as UTF-8; other encodings are not converted.",
        ) from None
