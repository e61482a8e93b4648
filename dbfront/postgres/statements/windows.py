"""A cursor with AI calls answered during its fetches, a window of rows at a time.

PostgreSQL's own cursor returns the rows to the client. Hidden portals, opened at the same moment
over the same rows in the same order, make the cursor's calls ahead of each FETCH: a portal for
every filter and another for the items. Models answer the missing calls, and the answers are written
to the table of the cursor's calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import Final

from tierkv.dbfront.postgres.statements.ai_rounds import PostgresError, RelayRounds
from tierkv.dbfront.postgres.statements.ai_run import AiRun
from tierkv.dbfront.postgres.statements.statement import Statement, StatementPlanner
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.postgres.wire.messages import encoded
from tierkv.kvcore.errors import TierKVError, UserError
from tierkv.sql.text.lexer import Token, name_value, tokenize

WINDOW_ROWS: Final = 64
"""Number of rows per window."""

ALL: Final = 1 << 62
_MOST_ROWS: Final = 4096
_SERIAL: Final = count(1)
_KNOWN: Final = (
    "SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_cursors AS c "
    "WHERE c.name OPERATOR(pg_catalog.=) "
    "pg_catalog.convert_from($1, 'UTF8')::pg_catalog.name::pg_catalog.text "
    "AND pg_catalog.strpos(c.statement, '({key}, ') OPERATOR(pg_catalog.>) 0), "
    "extract(epoch from pg_catalog.current_setting('statement_timeout')::interval), "
    "pg_catalog.current_setting('idle_in_transaction_session_timeout')"
)
_KNOWS: Final = "SELECT tierkv.knows({key}, $1)"
_ROUND: Final = (
    "SELECT pg_catalog.set_config('tierkv.round', '{round}', true), "
    "pg_catalog.set_config('idle_in_transaction_session_timeout', '{idle}', true)"
)
_WHERE: Final = "SELECT pg_catalog.current_setting('tierkv.round', true)"
_SPOKEN: Final = re.compile(rb"(?i)\b(?:fetch|move|close)\b")
_PLAIN: Final = frozenset({"FROM", "IN"})


@dataclass(frozen=True, slots=True)
class BoundValues:
    """A client's bound values: the Bind, and the end of the Parse with the types."""

    bind: bytes
    types: bytes


def may_fetch(message: bytes) -> bool:
    """Return True if a message may read or close a cursor; quick."""
    return _SPOKEN.search(message) is not None


def _words(text: str) -> list[Token]:
    try:
        return [token for token in tokenize(text) if token.text != ";"]
    except UserError:
        return []


def touches(text: str) -> bool:
    """Return True if a statement reads or closes a cursor."""
    return fetched(text) is not None or closed(text) is not None


def closed(text: str) -> str | None:
    """Return the cursor of a CLOSE; empty for CLOSE ALL, None for other statements."""
    tokens = _words(text)
    if len(tokens) != 2 or tokens[0].upper != "CLOSE":
        return None
    return "" if tokens[1].upper == "ALL" else name_value(tokens[1])


def fetched(text: str) -> tuple[str, int] | None:
    """Return the cursor of a FETCH or MOVE, and the maximum number of rows forward."""
    tokens = _words(text)
    if len(tokens) < 2 or tokens[0].upper not in ("FETCH", "MOVE"):
        return None
    words = [token.upper for token in tokens[1:-1] if token.upper not in _PLAIN]
    return name_value(tokens[-1]), _forward(words)


def _forward(words: list[str]) -> int:
    if words in ([], ["NEXT"], ["FORWARD"]):
        return 1
    if words[0] in ("PRIOR", "BACKWARD"):
        return ALL if "-" in words else 0
    if words[0] == "FORWARD":
        words = words[1:]
    if len(words) == 1 and words[0].isdigit():
        return int(words[0])
    return ALL  # To the end, a position, or backward: ALL is an upper bound.


class Windows:
    """The hidden portals of one cursor.

    Attributes:
        run: the statement that declared the cursor; its counters and limits apply to the cursor.
    """

    def __init__(
        self, name: str, statement: Statement, exchange: RelayExchange, run: AiRun
    ) -> None:
        plan = statement.plan
        assert plan is not None and plan.cursor_rows is not None
        self.run = run
        self._plan = plan.cursor_rows
        self._exchange = exchange
        self._rounds: RelayRounds | None = None
        self._name = name.encode()
        self._key = plan.forms[0].key
        serial = next(_SERIAL)
        stages = range(len(self._plan.stages))
        self._names = [f"tierkv rows {serial} {stage}".encode() for stage in stages]
        self._round = self._idle = ""
        self._wanted = 0
        self._passed = 0
        self._taught: dict[tuple[int, str], None] = {}
        self._ended = False
        self._failed: TierKVError | None = None

    async def open(
        self, parameters: dict[str, str], bound: BoundValues | None, *, sync: bool
    ) -> None:
        """Open the portals, in the transaction and with the settings of the cursor's declaration.

        Raises:
            PostgresError: PostgreSQL would refuse the query, too.
        """
        types = b"\0\0"
        if bound is not None:
            types = await self._types(encoded(self._plan.rows.text, parameters), bound.types, sync)
        data = b""
        for name, stage in zip(self._names, self._plan.stages, strict=True):
            text = encoded(stage.text, parameters)
            data += messages.framed(b"P", name, b"\0", text, b"\0", types)
            data += _bind(name, bound) + messages.framed(b"C", b"S", name, b"\0")
        await self._ask(data, sync=sync)
        reply = await self._ask(messages.own_statement(_WHERE), sync=sync)
        self._round = (reply.first_row()[0] or b"").decode()
        self._rounds = await self.run.begin_windows()

    async def _types(self, text: bytes, given: bytes, sync: bool) -> bytes:
        """Get the types of the values from the whole query: in a part they may look different."""
        name = self._names[0]
        parse = messages.framed(b"P", name, b"\0", text, b"\0", given)
        ends = messages.framed(b"D", b"S", name, b"\0") + messages.framed(b"C", b"S", name, b"\0")
        reply = await self._ask(parse + ends, sync=sync)
        return messages.first_of(b"t", b"".join(reply.output.pieces()))

    async def _ask(self, data: bytes, *, sync: bool) -> ServerReply:
        reply = await self._exchange.ask(data, sync=sync, keep_with_misses=True)
        if reply.error is not None:
            raise PostgresError(reply.error)
        return reply

    async def close(self, *, sync: bool) -> None:
        """Close the portals, before or after the end of the cursor."""
        await self._ask(b"".join(map(messages.close_portal, self._names)), sync=sync)

    async def reach(self, rows: int, *, sync: bool) -> bool:
        """Answer the calls of the cursor's next ``rows`` rows; return False if the cursor is gone.

        Raises:
            TierKVError: a call failed, or PostgreSQL did.
        """
        assert self._rounds is not None
        self._rounds.sync = sync
        text = _KNOWN.format(key=self._key)
        own = messages.own_statement(text, [self._name], [messages.BYTEA])
        alive, timeout, idle = (await self._rounds.own(own)).first_row()
        if alive == b"0":
            return False
        self._idle = (idle or b"0").decode()
        await self._remember(self._rounds)
        self._wanted = min(self._wanted + rows, ALL)
        if not self._ended and self._passed < self._wanted:
            await self._answer(self._rounds, float(timeout or 0))
        return True

    async def _answer(self, rounds: RelayRounds, timeout_s: float) -> None:
        if self._failed is not None:  # Failed inside a savepoint; the portals have moved on.
            raise self._failed
        try:
            work = self._windows(rounds)
            await self.run.in_windows(work, timeout_s, last=lambda: self._ended)
        except TierKVError as error:
            self._failed = error
            raise

    async def _remember(self, rounds: RelayRounds) -> None:
        """Write the answers again if a rollback to a savepoint removed them.

        A rollback always removes the last answer first, and checking the last answer is enough.
        """
        if not self._taught:
            return
        key, question = next(reversed(self._taught))
        own = messages.own_statement(_KNOWS.format(key=key), [question.encode()], [messages.BYTEA])
        if (await rounds.own(own)).first_row() == [b"f"]:
            await self._rounds_go(rounds, on=True)
            await rounds.fill(self._taught)
            await self._rounds_go(rounds, on=False)

    async def _windows(self, rounds: RelayRounds) -> None:
        await self._rounds_go(rounds, on=True)
        while not self._ended and self._passed < self._wanted:
            size = min(max(WINDOW_ROWS, self._wanted - self._passed), _MOST_ROWS)
            for name in self._names:
                reply = await self._stage(rounds, name, size)
                told = rounds.missed(reply)
                await self.run.ask_missed()
                await rounds.fill(told)
                self._taught.update(told)
            self._ended = reply.rows < size
            self._passed += sum(row[0] == b"t" for row in reply.all_rows())
            reply.output.close()
        await self._rounds_go(rounds, on=False)

    async def _rounds_go(self, rounds: RelayRounds, *, on: bool) -> None:
        text = _ROUND.format(round=self._round if on else "", idle="0" if on else self._idle)
        await rounds.own(messages.own_statement(text))

    async def _stage(self, rounds: RelayRounds, name: bytes, size: int) -> ServerReply:
        with rounds.at_work():
            return await self._ask(messages.execute(name, size), sync=rounds.sync)


def _bind(name: bytes, bound: BoundValues | None) -> bytes:
    if bound is not None:
        return messages.bind_again(bound.bind, name, name)
    return messages.framed(b"B", name, b"\0", name, b"\0", b"\0\0" * 3)


class WindowCursors:
    """The cursors of one session whose calls are answered as the rows are fetched.

    Attributes:
        run: run of the cursor with calls being answered.
    """

    def __init__(
        self, exchange: RelayExchange, parameters: dict[str, str], planner: StatementPlanner
    ) -> None:
        self.run: AiRun | None = None
        self._exchange = exchange
        self._parameters = parameters
        self._planner = planner
        self._open: dict[str, Windows] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, name: bytes) -> bool:
        return name.decode("utf-8", "replace") in self._open

    def own_keys(self, statement: Statement, *, limited: bool) -> Statement | None:
        """Plan a statement again with form keys for its own cursor; None if it opens no window."""
        plan = statement.plan
        if statement.opens_window or (limited and plan is not None and plan.cursor_rows):
            return self._planner.statements(statement.text)[0]
        return None

    async def declare(
        self,
        name: str,
        statement: Statement,
        run: AiRun,
        *,
        sync: bool,
        bound: BoundValues | None = None,
    ) -> None:
        """Open the hidden portals of the next declared cursor.

        Raises:
            PostgresError: PostgreSQL would refuse the query, too.
        """
        windows = Windows(name, statement, self._exchange, run)
        await windows.open(self._parameters, bound, sync=sync)
        await self.forget(name, sync=sync)
        self._open[name] = windows

    def clear(self) -> None:
        """Forget all cursors after the end of their transaction."""
        for windows in self._open.values():
            windows.run.close_windows()
        self._open.clear()

    async def forget(self, name: str, *, sync: bool) -> None:
        """Forget a cursor that is gone."""
        windows = self._open.pop(name, None)
        if windows is None:
            return
        windows.run.close_windows()
        if self._exchange.status != "E":
            await windows.close(sync=sync)

    async def before(self, text: str, *, sync: bool) -> None:
        """Answer the calls ahead of a FETCH or MOVE; close the hidden portals of a closed cursor.

        Raises:
            TierKVError: a call failed, or PostgreSQL did.
        """
        if not self._open or self._exchange.status == "E":
            return
        gone = closed(text)
        if gone is not None:
            for name in [gone] if gone else list(self._open):
                await self.forget(name, sync=sync)
        found = fetched(text)
        if found is not None:
            await self.reach(*found, sync=sync)

    async def reach(self, name: str, rows: int, *, sync: bool) -> None:
        """Answer the calls of the next rows of a cursor.

        Raises:
            TierKVError: a call failed, or PostgreSQL did.
        """
        windows = self._open.get(name)
        if windows is None:
            return
        self.run = windows.run
        try:
            alive = await windows.reach(rows, sync=sync)
            await self._exchange.send(windows.run.news(self._parameters))
        finally:
            self.run = None
        if not alive:
            await self.forget(name, sync=sync)
