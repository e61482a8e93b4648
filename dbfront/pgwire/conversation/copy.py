"""COPY between a table or query and the client, over either query protocol.

``run_copy`` sends all messages before CommandComplete and returns the command tag. Loading is
atomic: COPY runs in the client's transaction, or in a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from tierkv.dbfront.copying.binary_rows import BinaryReader, BinaryWriter
from tierkv.dbfront.copying.statement import CopyStatement
from tierkv.dbfront.copying.text_rows import CopyReader, CopyWriter, Row, text_converter
from tierkv.dbfront.pgwire.conversation.exchange import Exchange, ImplicitTransaction
from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.replies import too_long
from tierkv.dbfront.postgres_dialect.inference.column_names import with_names
from tierkv.dbfront.postgres_values.types import pg_type
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import CancelledByUserError, SqlError

_ROWS_PER_LOAD: Final = 8_192
_LINES_AT_ONCE: Final = 256


async def run_copy(exchange: Exchange, statement: CopyStatement) -> str:
    """Run a COPY and return the command tag."""
    if statement.to_client:
        return await _copy_out(exchange, statement)
    return await _copy_in(exchange, statement)


async def _copy_out(exchange: Exchange, statement: CopyStatement) -> str:
    result = await exchange.run(exchange.session.execute(statement.select))
    if result.columns is None:
        raise SqlError("COPY query must return rows", sqlstate="42601")
    exchange.send_notices(result)
    binary = statement.options.binary
    columns = with_names(result.columns, statement.select)
    writer = BinaryWriter(columns) if binary else CopyWriter(columns, statement.options)
    exchange.send(replies.copy_out_response(len(result.columns), binary=binary))
    for pieces in _in_batches(_pieces(writer, result.rows)):
        await exchange.send_much(b"".join(map(replies.copy_data, pieces)))
    exchange.send(replies.COPY_DONE)
    return f"COPY {len(result.rows)}"


def _pieces(writer: BinaryWriter | CopyWriter, rows: Sequence[tuple[Any, ...]]) -> Iterator[bytes]:
    """Yield the contents of each CopyData.

    As in PostgreSQL the binary header is in the same message as the first row, or as the trailer of
    an empty result: clients that read one tuple per message depend on this.
    """
    header, trailer = writer.header(), writer.trailer()
    if header and isinstance(writer, CopyWriter):
        yield header
        header = b""
    for row in rows:
        yield header + writer.line(row)
        header = b""
    if header or trailer:
        yield header + trailer


def _in_batches(pieces: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(pieces, _LINES_AT_ONCE)):
        yield batch


async def _columns(exchange: Exchange, statement: CopyStatement) -> tuple[Column, ...]:
    described = await exchange.session.describe(statement.select)
    assert described.columns is not None, "a SELECT has columns"
    return described.columns


async def _copy_in(exchange: Exchange, statement: CopyStatement) -> str:
    columns = await _columns(exchange, statement)
    binary = statement.options.binary
    transaction = ImplicitTransaction(exchange.session)
    await transaction.before("COPY")
    failed = True
    try:
        exchange.send(exchange.connection.send_copy_in(len(columns), binary=binary))
        count = await _load(exchange, statement, columns)
        exchange.connection.end_copy_in()
        failed = False
    finally:
        await transaction.finish(failed=failed)
    return f"COPY {count}"


def _reader(statement: CopyStatement, columns: Sequence[Column]) -> BinaryReader | CopyReader:
    kinds = [pg_type(column.type_name) for column in columns]
    if statement.options.binary:
        return BinaryReader(kinds)
    return CopyReader(len(kinds), statement.options, [text_converter(kind) for kind in kinds])


async def _load(exchange: Exchange, statement: CopyStatement, columns: Sequence[Column]) -> int:
    """Load the client's rows into the table until the client ends the COPY."""
    reader = _reader(statement, columns)
    names = [column.name for column in columns]
    rows: list[Row] = []
    count = 0
    while True:
        message = await exchange.next_message()
        if isinstance(message, m.CopyData):
            rows += reader.feed(message.data)
        elif isinstance(message, m.CopyDone):
            rows += reader.finish()
        elif isinstance(message, m.TooLong):
            raise too_long(message)
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
