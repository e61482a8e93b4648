"""A statement with AI calls on PostgreSQL: its rounds, each under a savepoint.

``tierkv.ai_call`` reports the questions without an answer. Before the next round, the answers are
written to the function's table. Both protocols run through this module, with different ways to
start a round. For EXPLAIN, the AI part is added to PostgreSQL's answer: as rows after the text, or
as a further member of the JSON object.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tierkv.dbfront.explain.plan import Explanation, ai_plan_json, ai_plan_lines
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.conversation import LENGTH
from tierkv.dbfront.postgres.wire.exchange import RelayExchange, ServerReply
from tierkv.dbfront.statement.ai_statement import FIRST_BUDGET, AiStatement
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError
from tierkv.sql.calls.ai_call import CallForm
from tierkv.sql.plan.plan import Explain

_DATA_ROW: Final = b"D"

TAKEN_BACK: Final = "AI Plan: above is a run with NULL for every answer, which was taken back"
"""First line of an estimate: PostgreSQL finds the questions by running the statement."""


_ACTUAL_ROWS: Final = re.compile(rb"rows=(\d+)(?:\.\d+)? loops=")


def actual_rows(reply: ServerReply) -> int:
    """Read the number of a statement's rows from an EXPLAIN ANALYZE."""
    value = reply.first_row()[0] or b""
    if not value.startswith(b"["):
        found = _ACTUAL_ROWS.search(value)
        return int(found[1]) if found else 0
    return int(json.loads(value)[0]["Plan"].get("Actual Rows", 0))


def add_ai_plan(reply: ServerReply, told: Explanation, *, as_json: bool) -> None:
    """Add the AI part of the plan to an EXPLAIN's answer."""
    if as_json:
        _add_member(reply, told)
        return
    lines = ai_plan_lines(told)
    if told.estimate is not None:
        lines.insert(0, TAKEN_BACK)
    for line in lines:
        reply.output.add(messages.data_row([line.encode()]))


def _add_member(reply: ServerReply, told: Explanation) -> None:
    frames = _frames(b"".join(reply.output.pieces()))
    reply.output.close()
    for frame in frames:
        if frame[:1] == _DATA_ROW:
            (value,) = messages.row_values(frame)
            document = json.loads(value or b"[]")
            document[0]["AI Plan"] = ai_plan_json(told)
            frame = messages.data_row([json.dumps(document, indent=2).encode()])
        reply.output.add(frame)


def _frames(data: bytes) -> list[bytes]:
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 1 + LENGTH(data, at + 1)[0]
        frames.append(data[at:end])
        at = end
    return frames


_SAVEPOINT: Final = messages.own_statement("SAVEPOINT tierkv")
_UNDO: Final = messages.own_statement("ROLLBACK TO SAVEPOINT tierkv")
_RELEASE: Final = messages.own_statement("RELEASE SAVEPOINT tierkv")
_FILL: Final = "SELECT tierkv.learn($1::bigint[], $2::bytea[], $3::bytea[])"
_ROOM: Final = "SELECT pg_catalog.set_config('tierkv.room', '{room}', true)"
_TELL: Final = (
    "SELECT pg_catalog.set_config('tierkv.telling', '{round}', true), "
    "pg_catalog.set_config('tierkv.untold', '!', true)"
)
"""Begins a round, in which equal questions are told once and most are told together."""
_NUMBERS: Final = itertools.count(1)
_TELL_REST: Final = messages.own_statement("SELECT tierkv.tell_rest()")
_FILL_BYTES: Final = 8 << 20
"""Approximate size of the messages with answers."""

_NEVER_FOR_NULL: Final = ("57", "53", "58", "40", "25", "XX", "08")
"""Classes of errors that a NULL in place of an answer does not cause."""


class PostgresError(SqlError):
    """An error of PostgreSQL; ``frame`` is the ErrorResponse for the client."""

    code = "postgres_error"

    def __init__(self, frame: bytes) -> None:
        fields = messages.fields(frame)
        super().__init__(
            fields.get("M", b"").decode("utf-8", "replace"),
            sqlstate=fields.get("C", b"XX000").decode("ascii", "replace"),
        )
        self.frame = frame


class RelayRounds:
    """EngineRounds over a relayed session, in an open transaction block.

    Attributes:
        cancelled: an error to raise once PostgreSQL is idle.
        sync: own statements end with a Sync; forbidden in a client's batch.
        asking: PostgreSQL is working; any other wait can be cancelled at once.
        error: the error of the last round, if the round failed.
    """

    def __init__(
        self,
        exchange: RelayExchange,
        statement: AiStatement,
        run_once: Callable[[], Awaitable[ServerReply]],
        *,
        sync: bool,
        stop_after: int | None = None,
    ) -> None:
        """Create the rounds of a statement.

        Args:
            exchange: the session.
            statement: the statement with the calls.
            run_once: runs the engine's text once.
            sync: own statements end with a Sync; forbidden in a client's batch.
            stop_after: number of rows; with this many, the result is final although filters are
                unanswered.
        """
        self.cancelled: TierKVError | None = None
        self.asking = False
        self.error: PostgresError | None = None
        self._exchange = exchange
        self._statement = statement
        self._forms: dict[int, CallForm] = {form.key: form for form in statement.plan.forms}
        self._analyzes = statement.plan.explain is Explain.ANALYZE
        self._run_once = run_once
        self.sync = sync
        self._stop_after = stop_after
        self._room: int | None = None
        self._tells_together = True
        self._told: dict[tuple[int, str], None] = {}  # questions without an answer in PostgreSQL
        self._behind = False
        self._last: ServerReply | None = None
        self._rows = 0

    @property
    def behind(self) -> bool:
        """See EngineRounds."""
        return self._behind

    @property
    def reply(self) -> ServerReply | None:
        """Reply of the last round; None if the round failed."""
        return None if self._last is None or self._last.error is not None else self._last

    def enough(self) -> bool:
        """See EngineRounds."""
        return self._stop_after is not None and self._rows >= self._stop_after

    def ask_few(self) -> None:
        """Limit the next round to a few questions; each later round may ask twice the number."""
        self._room = FIRST_BUDGET

    async def run(self) -> ServerReply | None:
        """See EngineRounds.

        Raises:
            PostgresError: the statement's own failure.
            FeatureNotSupportedError: all that was missed is no call of the statement's text.
        """
        if self._last is not None:
            self._last.output.close()
        with self.at_work():
            await self._fill()
            await self.own(*self._make_room(), _SAVEPOINT, *self._begin_telling())
            self._last = reply = await self._run_once()
            await self._end_telling(reply)
            self._rows = reply.rows
            if self._stop_after is not None and self._analyzes and reply.rows:
                self._rows = actual_rows(reply)
            self._note(reply)
            if reply.error is None:
                if reply.misses and not self._told:  # The rows are discarded, as after any miss.
                    raise FeatureNotSupportedError(
                        "a function or view of the database makes AI calls of its own",
                        hint="Make each AI call in the statement that the client sends.",
                    )
                return reply
            self.error = error = PostgresError(reply.error)
            if not self._told or error.sqlstate.startswith(_NEVER_FOR_NULL):
                raise error
            if not self.sync:
                # Have PostgreSQL listen again after an error in a batch; the block stays open.
                await self._exchange.own(sync=True)
        return None

    def _make_room(self) -> list[bytes]:
        room, self._room = self._room, None if self._room is None else 2 * self._room
        return [] if room is None else [messages.own_statement(_ROOM.format(room=room))]

    def _begin_telling(self) -> list[bytes]:
        if not self._tells_together:
            return []
        return [messages.own_statement(_TELL.format(round=next(_NUMBERS)))]

    async def _end_telling(self, reply: ServerReply) -> None:
        """Have PostgreSQL tell the questions it still keeps.

        An error loses them: from then on, each question is told at once.
        """
        if reply.error is not None:
            self._tells_together = False
        elif self._tells_together and reply.misses:
            reply.misses.update((await self.own(_TELL_REST)).misses)

    async def undo(self) -> None:
        """See EngineRounds."""
        await self.own(_UNDO, _RELEASE)

    async def recover(self) -> None:
        """Undo a run after its own error, as if the run had not been tried."""
        if not self.sync:
            await self._exchange.own(sync=True)
        await self.undo()

    async def release(self) -> None:
        """Keep the effects of the last round."""
        await self.own(_TELL_REST, _RELEASE)

    async def own(self, *statements: bytes) -> ServerReply:
        """Run statements of the relay itself.

        Raises:
            PostgresError: a statement failed.
        """
        with self.at_work():
            reply = await self._exchange.own(*statements, sync=self.sync)
        if reply.error is not None:
            raise PostgresError(reply.error)
        return reply

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Defer a cancel until PostgreSQL's answer has arrived."""
        before, self.asking = self.asking, True
        try:
            yield
        finally:
            self.asking = before
        if self.cancelled is not None and not before:
            raise self.cancelled

    def missed(self, reply: ServerReply) -> dict[tuple[int, str], None]:
        """Report a query's misses to the book; return the questions, for ``fill``."""
        self._statement.book.start_round()
        self._note(reply)
        return dict(self._told)

    async def fill(self, told: dict[tuple[int, str], None]) -> None:
        """Write the book's answers to the questions into PostgreSQL's table."""
        self._told = dict(told)
        await self._fill()

    def _note(self, reply: ServerReply) -> None:
        """Report the misses to the book; note whether the book can already answer one."""
        self._behind = False
        self._told.clear()
        for miss in reply.misses:
            number, _, question = miss.partition(b" ")
            try:
                key, text = int(number), bytes.fromhex(question.decode()).decode("utf-8", "replace")
            except ValueError:
                continue  # A function of the database raised a message with this state.
            if key not in self._forms:
                continue
            self._told[key, text] = None
            self._statement.book.look_up(key, text)
        self._behind = any(True for _ in self._statement.book.answers(self._told))

    async def _fill(self) -> None:
        """Write the book's answers to the requested questions into PostgreSQL's table."""
        keys: list[int] = []
        questions: list[bytes] = []
        answers: list[bytes | None] = []
        size = 0
        for key, text, answer in self._statement.book.answers(self._told):
            keys.append(key)
            questions.append(text.encode())
            answers.append(
                None if answer is None else answer.replace("\0", "").encode("utf-8", "replace")
            )
            size += len(questions[-1]) + len(answers[-1] or b"")
            if size > _FILL_BYTES:
                await self.own(messages.own_arrays(_FILL, keys, questions, answers))
                keys, questions, answers, size = [], [], [], 0
        if keys:
            await self.own(messages.own_arrays(_FILL, keys, questions, answers))
        self._told.clear()
