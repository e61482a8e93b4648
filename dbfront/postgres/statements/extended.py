"""A batch of the extended protocol with AI calls, from the first AI message to the Sync.

Parse gets the rewritten text; therefore PostgreSQL answers Describe, types included. Bind is kept,
because a portal with missing answers must be bound again; Execute runs the rounds. Each message is
answered before the next message is handled. After an error PostgreSQL itself skips to the Sync.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.replies import error_fields
from tierkv.dbfront.postgres.relay import Relay
from tierkv.dbfront.postgres.statements.ai_rounds import PostgresError
from tierkv.dbfront.postgres.statements.ai_run import AiRun, error_frame
from tierkv.dbfront.postgres.statements.block import Block
from tierkv.dbfront.postgres.statements.simple import MakeRun, Refresh
from tierkv.dbfront.postgres.statements.statement import Statement
from tierkv.dbfront.postgres.statements.windows import ALL, BoundValues, WindowCursors
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.postgres.wire.messages import encoded, shown
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.plan.plan import Explain

_FAIL: Final = messages.parse(b"tierkv", b"AI statement refused by the TierKV front")
_INNER: Final = b"tierkv cursor"
_CLOSE_INNER: Final = messages.framed(b"C", b"S", _INNER, b"\0")
_DROPPED_COPY: Final = frozenset(b"dcf")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared statement with AI calls.

    Attributes:
        statement: text and plan.
        types: parameter types of the client's Parse: count and OIDs.
    """

    statement: Statement
    types: bytes


@dataclass(slots=True)
class AiPortal:
    """A bound statement with AI calls.

    Attributes:
        bind: the client's message.
        answered: all answers are known; the rest of the statement runs by itself.
        suspended: a row limit has stopped the portal.
    """

    prepared: Prepared
    bind: bytes
    answered: bool = False
    suspended: bool = False


@dataclass(slots=True)
class NamedStatements:
    """Prepared statements and portals with AI calls, by name."""

    prepared: dict[bytes, Prepared]
    portals: dict[bytes, AiPortal]

    def __bool__(self) -> bool:
        return bool(self.prepared or self.portals)


class Batch:
    """The rest of one batch."""

    def __init__(
        self,
        relay: Relay,
        exchange: RelayExchange,
        names: NamedStatements,
        make_run: MakeRun,
        refresh: Refresh,
        cursors: WindowCursors,
        fetching: dict[bytes, str],
    ) -> None:
        self._cursors = cursors
        self._fetching = fetching
        self._relay = relay
        self._exchange = exchange
        self._names = names
        self._make_run = make_run
        self._refresh = refresh
        self._block = Block(exchange, sync=False)
        self._block.uncertain = relay.books.in_batch
        self._failed = relay.books.failed

    async def take(self, message: bytes, statement: Statement | None) -> None:
        """Handle one message before the Sync.

        Args:
            message: the whole message.
            statement: set for a Parse of a statement with AI calls.
        """
        if self._failed:
            return
        try:
            await self._take(message, statement)
        except TierKVError as error:
            await self.fail(error)

    async def fail(self, error: TierKVError, statement: Statement | None = None) -> None:
        """Send an error to the client; PostgreSQL, too, skips the rest of the batch."""
        if self._failed:
            return
        self._failed = True
        if not self._relay.books.failed:
            await self._exchange.ask(_FAIL, sync=False)
        parameters = self._relay.books.parameters
        fields = {k: shown(v, parameters) for k, v in error_fields(error).items() if v}
        await self._exchange.send([error_frame(error, statement, fields)])

    async def sync(self, *, tell: bool = True) -> None:
        """End the batch as the client asked.

        Args:
            tell: True if the batch ended with a Sync, which needs an answer.
        """
        if self._block.own and not self._failed:
            error = await self._block.end(failed=False)
            if error is not None:
                await self._exchange.send([error])
        await self._exchange.ask(messages.SYNC)
        if self._block.forsaken and self._exchange.status != "I":
            # COMMIT of an aborted block is a ROLLBACK.
            await self._exchange.own(messages.own_statement("COMMIT"), sync=True)
        if self._exchange.status == "I":
            self._names.portals.clear()
        if tell:
            await self._exchange.send([replies.ready_for_query(self._exchange.status)])

    @property
    def failed(self) -> bool:
        """Return True after an error, which skips all messages before the Sync."""
        return self._failed

    @property
    def _aborted(self) -> bool:
        """Return True if the client's block is aborted, and was not ended by this batch."""
        block = self._block
        return self._exchange.status == "E" and not block.uncertain and not block.open_here

    async def _take(self, message: bytes, statement: Statement | None) -> None:
        kind = message[:1]
        if kind == b"P":
            await self._parse(message, statement)
        elif kind == b"B":
            await self._bind(message)
        elif kind == b"E":
            await self._execute(message)
        elif kind == b"C":
            await self._close(message)
        elif message[0] not in _DROPPED_COPY:
            await self._plain(message)

    async def _plain(self, message: bytes) -> ServerReply:
        """Have PostgreSQL answer a message, and pass the answer to the client."""
        # PostgreSQL may look up a constant call to plan a Bind; a miss in that look-up does not
        # count.
        reply = await self._exchange.ask(message, sync=False, keep_with_misses=True)
        if self._relay.books.copying_in:
            await self._copy_in(reply)
            return reply
        await self._exchange.deliver(reply)
        if reply.error is not None:
            self._failed = True
            await self._exchange.send([reply.error])
        return reply

    async def _copy_in(self, reply: ServerReply) -> None:
        """Pass on the data of a client's COPY in a batch with AI calls."""
        await self._exchange.deliver(reply)
        while (message := await self._relay.next_message())[:1] == b"d":
            self._relay.pass_on(message)
            await self._relay.backend.drain()
        await self._plain(message)

    async def _parse(self, message: bytes, statement: Statement | None) -> None:
        name, text = messages.names(message)
        self._names.prepared.pop(name, None)
        if statement is None:
            await self._plain(message)
            return
        types = message[5 + len(name) + 1 + len(text) + 1 :]
        parameters = self._relay.books.parameters
        sent = encoded(statement.engine_text, parameters)
        reply = await self._exchange.ask(
            messages.framed(b"P", name, b"\0", sent, b"\0", types), sync=False
        )
        if reply.error is not None:
            await self.fail(PostgresError(reply.error), statement)
            return
        self._names.prepared[name] = Prepared(statement, types)
        await self._exchange.deliver(reply)

    async def _bind(self, message: bytes) -> None:
        portal, name = messages.names(message)
        self._names.portals.pop(portal, None)
        await self._cursors.forget(portal.decode("utf-8", "replace"), sync=False)
        if name in self._fetching and not self._aborted:
            await self._cursors.before(self._fetching[name], sync=False)
        portals = self._names.portals.values()
        if all(earlier.answered and not earlier.suspended for earlier in portals):
            await self._block.renew()
        prepared = self._names.prepared.get(name)
        if prepared is not None and not self._aborted:
            await self._refresh(prepared.statement.views, self._block)
        if prepared is None or not prepared.statement.has_calls or self._aborted:
            self._block.uncertain = not self._block.own
            await self._plain(message)
            if prepared is not None and prepared.statement.resets and not self._failed:
                self._names.portals[portal] = AiPortal(prepared, message, answered=True)
            return
        run = self._run_of(prepared)
        # Planning may already look up constant calls.
        await run.open()
        await self._plain(message)
        if not self._failed:
            await self._block.end_rounds(run.values)
            self._names.portals[portal] = AiPortal(prepared, message)

    async def _close(self, message: bytes) -> None:
        name = message[6:-1]
        (self._names.prepared if message[5:6] == b"S" else self._names.portals).pop(name, None)
        if message[5:6] == b"P":
            await self._cursors.forget(name.decode("utf-8", "replace"), sync=False)
        await self._plain(message)

    async def _execute(self, message: bytes) -> None:
        name = message[5 : message.index(b"\0", 5)]
        portal = self._names.portals.get(name)
        rows = int.from_bytes(message[-4:], "big")
        if name in self._cursors and not self._aborted:
            await self._cursors.reach(name.decode("utf-8", "replace"), rows or ALL, sync=False)
        if portal is None or portal.answered:
            reply = await self._plain(message)
            self._block.ran(reply.tag)
            return
        cursor = self._cursors.own_keys(portal.prepared.statement, limited=rows > 0)
        run = self._make_run(cursor or portal.prepared.statement, self._block, sync=False)
        try:
            if cursor is None:
                await self._answer(name, portal, message, run)
            else:
                await run.open()
                self._block.check_cursor(cursor)
                await self._windowed(cursor, portal, message, run)
        except TierKVError as error:
            await self.fail(error, portal.prepared.statement)

    async def _answer(self, name: bytes, portal: AiPortal, message: bytes, run: AiRun) -> None:
        statement = portal.prepared.statement
        limited = message[-4:] != b"\0\0\0\0"
        await run.open()
        self._block.check_cursor(statement)
        runs = _PortalRuns(self._exchange, name, portal)
        parameters = self._relay.books.parameters
        if statement.declare:
            await runs.prepare_inner(encoded(statement.inner.text, parameters))
        again = limited or bool(statement.declare)
        collected = statement.collect_text
        collector = None if collected is None else runs.collector(encoded(collected, parameters))
        reply = await run.answer(runs.once, keep=not again, collect_once=collector)
        if again:
            reply.output.close()
            await runs.bind_again()
            await self._block.end_rounds(run.values, rows_to_come=True)
            reply = await self._exchange.ask(message, sync=False)
            if reply.error is not None:
                raise PostgresError(reply.error)
        else:
            await self._block.end_rounds(run.values)
        portal.answered, portal.suspended = True, limited and not reply.complete
        await self._exchange.send(run.notices(self._relay.books.parameters))
        await self._exchange.deliver(reply)

    async def _windowed(
        self, cursor: Statement, portal: AiPortal, message: bytes, run: AiRun
    ) -> None:
        """Open a cursor whose calls are answered while the cursor's rows are fetched."""
        bound = BoundValues(portal.bind, portal.prepared.types)
        parameters = self._relay.books.parameters
        given, _ = messages.names(portal.bind)
        name = cursor.cursor if cursor.declare else given.decode("utf-8", "replace")
        await self._cursors.declare(name, cursor, run, sync=False, bound=bound)
        parse = messages.framed(
            b"P", _INNER, b"\0", encoded(cursor.cursor_text, parameters), b"\0", bound.types
        )
        # The client's portal runs the text of the cursor from now on.
        bind = messages.close_portal(given) + messages.bind_to(portal.bind, _INNER)
        await self._said(_CLOSE_INNER + parse + bind + _CLOSE_INNER)
        await self._block.end_rounds(run.values, rows_to_come=True)
        portal.answered = True
        if not cursor.declare:
            await self._cursors.reach(name, int.from_bytes(message[-4:], "big"), sync=False)
        reply = await self._plain(message)
        portal.suspended = not reply.complete

    async def _said(self, data: bytes) -> None:
        reply = await self._exchange.ask(data, sync=False, keep_with_misses=True)
        if reply.error is not None:
            raise PostgresError(reply.error)

    def _run_of(self, prepared: Prepared) -> AiRun:
        return self._make_run(prepared.statement, self._block, sync=False)


class _PortalRuns:
    """Runs one portal repeatedly: a portal that has run, or was rolled back, is bound again."""

    def __init__(self, exchange: RelayExchange, name: bytes, portal: AiPortal) -> None:
        self._exchange = exchange
        self._name = name
        self._portal = portal
        self._ran = False
        self._inner = b""
        plan = portal.prepared.statement.plan
        assert plan is not None
        self._keep = plan.stop_after_rows is not None or plan.explain in (
            Explain.PLAN,
            Explain.ESTIMATE,
        )

    async def prepare_inner(self, text: bytes) -> None:
        """Run the query of a DECLARE instead, as a statement and portal of the relay itself."""
        await self._said(self._parse_inner(text))
        self._inner = self._bind_inner()

    def _parse_inner(self, text: bytes) -> bytes:
        types = self._portal.prepared.types
        return _CLOSE_INNER + messages.framed(b"P", _INNER, b"\0", text, b"\0", types)

    def _bind_inner(self) -> bytes:
        return messages.bind_again(self._portal.bind, _INNER, _INNER)

    def collector(self, text: bytes) -> Callable[[], Awaitable[ServerReply]]:
        """Return a function to run another query once, from Parse on, with the portal's values."""
        data = self._parse_inner(text) + messages.close_portal(_INNER) + self._bind_inner()

        async def once() -> ServerReply:
            reply = await self._exchange.ask(data, sync=False)
            if reply.error is not None:
                return reply
            return await self._exchange.ask(
                messages.execute(_INNER) + messages.close_portal(_INNER) + _CLOSE_INNER,
                sync=False,
            )

        return once

    async def once(self) -> ServerReply:
        """Run the portal to its end; errors are returned in the reply, not raised."""
        bind = b""
        if self._inner:
            bind = messages.close_portal(_INNER) + self._inner
        elif self._ran:
            bind = messages.close_portal(self._name) + self._portal.bind
        if bind:
            reply = await self._exchange.ask(bind, sync=False)
            if reply.error is not None:
                return reply
        self._ran = True
        execute = messages.execute(_INNER if self._inner else self._name)
        return await self._exchange.ask(execute, sync=False, keep_with_misses=self._keep)

    async def bind_again(self) -> None:
        """Bind the client's portal again, as if the portal had not run."""
        closed = messages.close_portal(self._name)
        if self._inner:
            closed += messages.close_portal(_INNER) + _CLOSE_INNER
        await self._said(closed + self._portal.bind)

    async def _said(self, data: bytes) -> None:
        reply = await self._exchange.ask(data, sync=False)
        if reply.error is not None:
            raise PostgresError(reply.error)
