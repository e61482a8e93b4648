"""A simple query with AI calls: the statements of a message, in order.

Several statements in a message are a single transaction unless the text says otherwise. The
transaction is here the relay's own block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.replies import error_fields
from tierkv.dbfront.postgres.statements.ai_rounds import PostgresError
from tierkv.dbfront.postgres.statements.ai_run import AiRun, error_frame
from tierkv.dbfront.postgres.statements.block import Block
from tierkv.dbfront.postgres.statements.statement import Statement
from tierkv.dbfront.postgres.statements.windows import WindowCursors
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.postgres.wire.messages import encoded, shown
from tierkv.kvcore.errors import FeatureNotSupportedError, TierKVError
from tierkv.sql.plan.plan import Explain
from tierkv.sql.text.statement import StatementKind

_TRANSACTION: Final = frozenset({StatementKind.BEGIN, StatementKind.COMMIT, StatementKind.ROLLBACK})
_FAIL: Final = messages.own_statement("AI statement refused by the TierKV front")
"""Not SQL: PostgreSQL answers with an error, which aborts the client's block as any error does."""


class MakeRun(Protocol):
    """Creates the run of a statement; ``alone``: no other statement shares a new block."""

    def __call__(
        self, statement: Statement, block: Block, *, sync: bool, alone: bool = True
    ) -> AiRun: ...


Refresh = Callable[[frozenset[str], Block], Awaitable[None]]
"""Fills admin views, ahead of a statement that names them."""


class SimpleQuery:
    """One Query message."""

    def __init__(
        self,
        exchange: RelayExchange,
        parameters: dict[str, str],
        make_run: MakeRun,
        refresh: Refresh,
        cursors: WindowCursors,
    ) -> None:
        self._cursors = cursors
        self._exchange = exchange
        self._parameters = parameters
        self._make_run = make_run
        self._refresh = refresh
        self._block = Block(exchange, sync=True)

    async def run(self, statements: list[Statement]) -> None:
        """Run the statements up to the first failure, and send ReadyForQuery to the client."""
        error: TierKVError | None = None
        current: Statement | None = None
        last: ServerReply | None = None
        try:
            for current in statements:
                if last is not None:
                    await self._exchange.deliver(last)
                    last = None
                last = await self._one(current, alone=len(statements) == 1)
        except TierKVError as raised:
            error = raised
        await self._finish(current, last, error)

    async def refuse(self, error: TierKVError) -> None:
        """Answer the whole query with an error; no statement of the query ran."""
        await self._finish(None, None, error)

    async def _finish(
        self, current: Statement | None, last: ServerReply | None, error: TierKVError | None
    ) -> None:
        frame: bytes | None = None
        if error is not None:
            frame = self._error(error, current)
            if not self._block.own and self._exchange.status == "T":
                await self._exchange.own(_FAIL, sync=True)
        unfinished = await self._block.end(failed=error is not None)
        if last is not None:
            await self._exchange.deliver(last, error=unfinished)
        if frame is not None:
            await self._exchange.send([frame])
        await self._exchange.send([replies.ready_for_query(self._exchange.status)])

    def _error(self, error: TierKVError, statement: Statement | None) -> bytes:
        fields = {k: shown(v, self._parameters) for k, v in error_fields(error).items() if v}
        return error_frame(error, statement, fields)

    async def _one(self, statement: Statement, *, alone: bool) -> ServerReply:
        """Run one statement.

        Raises:
            TierKVError: the statement failed.
        """
        if statement.plan is not None and self._exchange.status != "E":
            await self._refresh(statement.views, self._block)
        if statement.has_calls and self._exchange.status != "E":
            return await self._with_calls(statement, alone=alone)
        await self._cursors.before(statement.text, sync=True)
        if statement.kind in _TRANSACTION:
            return await self._transaction(statement)
        if not alone:
            _refuse_copy(statement)
            if self._exchange.status == "I":
                await self._block.open(await self._block.values(), reads=False)
        return await self._plain(statement)

    async def _plain(self, statement: Statement) -> ServerReply:
        text = encoded(statement.engine_text, self._parameters)
        reply = await self._exchange.ask(messages.query(text))
        if reply.error is not None:
            await self._exchange.send(reply.output.pieces())
            raise PostgresError(reply.error)
        return reply

    async def _transaction(self, statement: Statement) -> ServerReply:
        reply = await self._plain(statement)
        if self._block.own and reply.says("25001"):
            reply.output.discard()  # PostgreSQL warns of the relay's block, unknown to the client.
        # The client has either taken over the block or ended it.
        self._block.own = False
        return reply

    async def _with_calls(self, statement: Statement, *, alone: bool) -> ServerReply:
        run = self._make_run(statement, self._block, sync=True, alone=alone)
        await run.open()
        if alone:
            self._block.check_cursor(statement)
        if statement.opens_window and not self._block.own:
            return await self._windowed(statement, run)
        collected = statement.collect_text
        if collected is not None:
            await self._check(statement)  # Before any model is asked.
        reply = await run.answer(
            lambda: self._run_once(statement),
            keep=not statement.declare,
            collect_once=None if collected is None else lambda: self._ask(collected),
        )
        # Later statements in the block, and the rows of a cursor, have no rounds.
        await self._block.end_rounds(run.values, rows_to_come=bool(statement.declare))
        if statement.declare:
            reply.output.close()
            reply = await self._plain(statement)
        await self._exchange.send(run.notices(self._parameters))
        return reply

    async def _windowed(self, statement: Statement, run: AiRun) -> ServerReply:
        """Declare a cursor whose calls are answered while the cursor's rows are fetched."""
        # PostgreSQL reports errors for the text whose positions can be translated.
        await self._check(statement)
        await self._cursors.declare(statement.cursor, statement, run, sync=True)
        text = encoded(statement.cursor_text, self._parameters)
        reply = await self._exchange.ask(messages.query(text), keep_with_misses=True)
        if reply.error is not None:
            raise PostgresError(reply.error)
        await self._block.end_rounds(run.values, rows_to_come=True)
        return reply

    async def _check(self, statement: Statement) -> None:
        """Have PostgreSQL analyse a statement without running it.

        Raises:
            PostgresError: PostgreSQL would refuse to run the statement.
        """
        checked = messages.parse(b"tierkv check", encoded(statement.engine_text, self._parameters))
        checked += messages.framed(b"C", b"S", b"tierkv check", b"\0")
        reply = await self._exchange.ask(checked, sync=True)
        if reply.error is not None:
            raise PostgresError(reply.error)

    async def _ask(self, text: str) -> ServerReply:
        return await self._exchange.ask(messages.query(encoded(text, self._parameters)))

    async def _run_once(self, statement: Statement) -> ServerReply:
        plan = statement.plan
        assert plan is not None
        text = statement.inner.text if statement.declare else statement.engine_text
        keep = plan.stop_after_rows is not None or plan.explain in _ASKS_NOBODY
        return await self._exchange.ask(
            messages.query(encoded(text, self._parameters)), keep_with_misses=keep
        )


_ASKS_NOBODY: Final = (Explain.PLAN, Explain.ESTIMATE)


def _refuse_copy(statement: Statement) -> None:
    if statement.kind is StatementKind.COPY and "STDIN" in statement.text.upper():
        raise FeatureNotSupportedError(
            "COPY FROM STDIN can't be combined with AI calls in one query string",
            hint="Send it separately.",
        )
