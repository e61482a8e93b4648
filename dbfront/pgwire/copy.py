"""COPY between a table or query and the client, over either query protocol.

``run_copy`` sends everything up to but without CommandComplete and answers the command tag.
Loading is atomic: it runs in the client's transaction, or in one of its own.
"""

from __future__ import annotations

from typing import Final

from dbfront.contracts import Column
from dbfront.pgwire import messages as m
from dbfront.pgwire import replies
from dbfront.pgwire.copy_format import CopyReader, CopyWriter, Row
from dbfront.pgwire.copy_statement import CopyStatement
from dbfront.pgwire.exchange import Exchange
from dbfront.pgwire.implicit import ImplicitTransaction
from kvcore.errors import CancelledByUserError, SqlError

_ROWS_PER_LOAD: Final = 8_192
_LINES_AT_ONCE: Final = 256


async def run_copy(exchange: Exchange, statement: CopyStatement) -> str:
    """Carry out a COPY and give its command tag."""
    if statement.to_client:
        return await _copy_out(exchange, statement)
    return await _copy_in(exchange, statement)


async def _copy_out(exchange: Exchange, statement: CopyStatement) -> str:
    result = await exchange.run(exchange.session.execute(statement.select))
    if result.columns is None:
        raise SqlError("COPY query must return rows", sqlstate="42601")
    exchange.send_notices(result)
    writer = CopyWriter(result.columns, statement.options)
    exchange.send(replies.copy_out_response(len(result.columns)))
    if header := writer.header():
        exchange.send(replies.copy_data(header))
    for at in range(0, len(result.rows), _LINES_AT_ONCE):
        lines = map(writer.line, result.rows[at : at + _LINES_AT_ONCE])
        await exchange.send_much(b"".join(map(replies.copy_data, lines)))
    exchange.send(replies.COPY_DONE)
    return f"COPY {len(result.rows)}"


async def _columns(exchange: Exchange, statement: CopyStatement) -> tuple[Column, ...]:
    described = await exchange.session.describe(statement.select)
    assert described.columns is not None, "a SELECT has columns"
    return described.columns


async def _copy_in(exchange: Exchange, statement: CopyStatement) -> str:
    names = [column.name for column in await _columns(exchange, statement)]
    transaction = ImplicitTransaction(exchange.session)
    await transaction.before("COPY")
    failed = True
    try:
        exchange.send(exchange.connection.send_copy_in(len(names)))
        count = await _load(exchange, statement, names)
        exchange.connection.end_copy_in()
        failed = False
    finally:
        await transaction.finish(failed=failed)
    return f"COPY {count}"


async def _load(exchange: Exchange, statement: CopyStatement, names: list[str]) -> int:
    """Feed what the client sends to the table until it says it is done."""
    reader = CopyReader(len(names), statement.options)
    rows: list[Row] = []
    count = 0
    while True:
        message = await exchange.next_message()
        if isinstance(message, m.CopyData):
            rows += reader.feed(message.data)
        elif isinstance(message, m.CopyDone):
            rows += reader.finish()
        elif isinstance(message, m.CopyFail):
            raise CancelledByUserError(f"COPY from stdin failed: {message.reason}")
        else:
            raise ConnectionResetError("client left during COPY")
        done = isinstance(message, m.CopyDone)
        if rows and (done or len(rows) >= _ROWS_PER_LOAD):
            loading = exchange.session.copy_in(statement.table, names, rows)
            count += await exchange.run(loading)
            rows = []
        if done:
            return count
