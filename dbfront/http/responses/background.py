"""Responses that are answered while no client waits: a queue, and the handler of its entries.

A response begins as ``queued`` in the store of conversations, which every front can read, and as an
entry of the queue (dbfront/queue). A front takes the entry, answers the response, and gives a
sign of life every second; the same look shows whether any front has cancelled or deleted the
response. If the front is killed or told to end, another front takes the entry, or the same one
after its restart, and answers from the beginning. A response without signs of life counts as
failed when every front has had time to take the entry.

A response with ``stream`` as well is answered by the front of its request, without the queue: the
front keeps the events for some time after the end, and clients with a broken connection go on
behind the last event received. If that front is killed, the response fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from tierkv.dbfront.http.config import KeyRing, RestCaller
from tierkv.dbfront.http.responses.kept_events import KeptEvents, told_events
from tierkv.dbfront.http.responses.response_body import ResponseBody
from tierkv.dbfront.http.responses.response_run import ResponseRun
from tierkv.dbfront.http.services import FieldError, Services
from tierkv.dbfront.queue.queue_worker import QueueWorker, UnreadableEntryError
from tierkv.dbfront.queue.work_log import WorkLog
from tierkv.dbfront.sessions.conversations import Conversations, unknown
from tierkv.dbfront.sessions.session_store import SessionItem, SessionTurn, TurnStatus
from tierkv.dbfront.sessions.turn_form import response_json, unanswered
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    AuthenticationError,
    CallLimitError,
    OverloadedError,
    SessionStoreError,
    SqlError,
    TierKVError,
    UserError,
)

log = logging.getLogger("tierkv.sessions")

QUEUE: Final = "responses"
GROUP: Final = "fronts"
_SIGN_S: Final = 1.0
_CLAIMS: Final = 3
"""Times ``claim_s`` without a sign of life after which no front will go on."""
_LEAST_LOST_S: Final = 30.0
_QUEUED_LOST_S: Final = 3_600.0
"""Longest stay in the queue; then the log has lost the entry."""
_KEPT_S: Final = 600.0
"""Seconds after the end of a streamed response for which its events are kept."""
_LOST: Final = {
    "code": "server_error", "message": "the front that answered this response has ended",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseQueue:
    """Where background responses wait.

    Attributes:
        log: has the entries.
        front: begins the names of this front's consumers.
        claim_s: idle time after which an entry counts as left by a dead front.
        alone: no other process takes entries.
        lasts: the entries outlive this process.
    """

    log: WorkLog
    front: str = "front"
    claim_s: float = 30.0
    alone: bool = True
    lasts: bool = False

    def lost_s(self, status: TurnStatus) -> float:
        """Return the seconds without a sign of life after which no front will go on."""
        if not self.lasts:
            return _LEAST_LOST_S
        queued = status is TurnStatus.QUEUED
        return _QUEUED_LOST_S if queued else max(_LEAST_LOST_S, _CLAIMS * self.claim_s)


@dataclass(frozen=True, slots=True)
class QueuedResponse:
    """A response in the queue: whose, which, and the request.

    Attributes:
        tenant: on whose behalf.
        key: name of the caller's key; empty for keys of the configuration.
        response_id: the stored turn.
        request: the body of the request, JSON.
    """

    tenant: str
    key: str
    response_id: str
    request: str

    def to_json(self) -> str:
        """Return the text of an entry."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> QueuedResponse:
        """Read an entry.

        Raises:
            UnreadableEntryError: no front has written the entry.
        """
        try:
            fields = json.loads(text)
            found = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
            if not all(isinstance(each, str) for each in asdict(found).values()):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise UnreadableEntryError("no front has written this entry") from None
        return found


class BackgroundResponses:
    """Queues responses, and answers those of the queue. Implements EntryHandler."""

    def __init__(
        self, services: Services, conversations: Conversations, keys: KeyRing, queue: ResponseQueue
    ) -> None:
        """Note what to use; ``start`` begins to take entries."""
        self._services = services
        self._conversations = conversations
        self._keys = keys
        self._queue = queue
        self._works: dict[str, asyncio.Future[None]] = {}
        self._kept: dict[str, KeptEvents] = {}
        self._streamed: set[asyncio.Task[None]] = set()
        self._worker = QueueWorker(
            queue.log,
            self,
            queue=QUEUE,
            group=GROUP,
            front=queue.front,
            claim_s=queue.claim_s,
            alone=queue.alone,
            width=limits.MAX_BACKGROUND_RESPONSES,
        )
        self._taking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take entries."""
        self._taking = asyncio.create_task(self._worker.run(), name="background-responses")

    def drain(self) -> set[asyncio.Task[None]]:
        """Take no more entries; return the tasks that are answering."""
        self._worker.close()
        return self._worker.serving | self._streamed

    async def stop(self) -> None:
        """Give the entries that are being answered back to the queue; end the streamed ones."""
        tasks = [*self._streamed, *([self._taking] if self._taking is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._taking = None

    async def begin(self, run: ResponseRun, request: str) -> SessionTurn:
        """Store a response as queued, and let a front answer later.

        Args:
            run: the response, not opened.
            request: the body of the request.

        Raises:
            TierKVError: the call can't be asked, or the queue is full or away.
            FieldError: the request is too large for the queue.
        """
        if run.body.stream and len(self._streamed) >= limits.MAX_BACKGROUND_RESPONSES:
            raise OverloadedError(
                f"{limits.MAX_BACKGROUND_RESPONSES} streamed responses are answered here",
                hint="Wait until some have ended, or leave stream or background out.",
            )
        await run.prepare()
        queued = run.asked.open(TurnStatus.QUEUED, self._conversations.clock.wall())
        if run.body.stream:
            stored = await run.put(queued, run.asked.asked)
            run.go_on(stored)
            kept = self._kept[stored.response_id] = KeptEvents()
            task = asyncio.create_task(self._stream(run, stored, kept), name=stored.response_id)
            self._streamed.add(task)
            task.add_done_callback(self._streamed.discard)
            return stored
        caller = run.caller
        entry = QueuedResponse(caller.tenant, caller.key, queued.response_id, request).to_json()
        if (size := len(entry.encode())) > limits.MAX_QUEUE_BODY_BYTES:
            reason = f"background: a request of {size} bytes can't wait in the queue"
            hint = f"At most {limits.MAX_QUEUE_BODY_BYTES} can; leave background out."
            raise FieldError("background", UserError(reason, hint=hint))
        stored = await run.put(queued, run.asked.asked)
        try:
            await self._queue.log.add(QUEUE, entry)
        except TierKVError as error:
            store = self._conversations.store
            with suppress(SessionStoreError):
                await self._conversations.run(store.delete_turn, stored.tenant, stored.response_id)
            if isinstance(error, SqlError):
                full = "the queue of background responses is full"
                hint = "Wait until some have ended, or leave background out."
                raise OverloadedError(full, hint=hint) from None
            raise
        return stored

    def events_of(self, response_id: str) -> KeptEvents:
        """Return the events of a streamed response.

        Raises:
            FieldError: this front does not have them.
        """
        if response_id in self._kept:
            return self._kept[response_id]
        error = UserError(
            "stream can't be used here: the events of this response are not kept",
            hint="They are kept at the front that answers, for responses made with background and "
            f"stream, until {_KEPT_S / 60:.0f} minutes after the end. GET the response without "
            "stream.",
        )
        raise FieldError("stream", error)

    def forget(self, response_id: str) -> None:
        """Stop answering a deleted response, and drop its events."""
        self.end(response_id)
        self._kept.pop(response_id, None)

    async def cancel(self, turn: SessionTurn, items: Sequence[SessionItem]) -> SessionTurn:
        """Cancel a response that is open; return the turn as it is then.

        Raises:
            UnknownSessionError: the response was deleted meanwhile.
        """
        if not turn.status.is_open:
            return turn
        store, now_s = self._conversations.store, self._conversations.clock.wall()
        ended = unanswered(turn, now_s)
        stored = await self._conversations.run(store.put_turn, ended, items, opened=True)
        if stored is None:
            raise unknown("Response", turn.response_id)
        self.end(turn.response_id)
        return stored

    def end(self, response_id: str) -> None:
        """Stop answering a cancelled response, if this front answers it."""
        if response_id in self._works:
            self._works[response_id].cancel()

    async def turn(self, tenant: str, response_id: str) -> SessionTurn:
        """Return a stored turn; an open one fails if no front goes on with it.

        Raises:
            UnknownSessionError: the tenant has none of this id.
        """
        store, now_s = self._conversations.store, self._conversations.clock.wall()
        turn = await self._conversations.run(store.turn, tenant, response_id, now_s)
        if turn is None:
            raise unknown("Response", response_id)
        return await without_front(self._conversations, turn, self._queue.lost_s(turn.status))

    async def run(self, body: str) -> None:
        """Answer the response of an entry, unless it has ended; see EntryHandler.

        Raises:
            SessionStoreError: the store is away.
            DirectoryUnavailableError: it is not known whether the key of the request is valid.
        """
        queued = QueuedResponse.from_json(body)
        turn = await self._turn(queued)
        if turn is None or not turn.status.is_open:
            return
        caller = RestCaller(queued.tenant, queued.key)
        if not await self._keys.has_key(caller):
            revoked = AuthenticationError(
                "the API key of this response was revoked before the answer",
                hint="Send the request again with a valid key.",
            )
            await self._fail(turn, error_json(revoked), KeptEvents())
            return
        run = ResponseRun.of(
            self._services,
            self._conversations,
            ResponseBody.model_validate_json(queued.request),
            caller,
        )
        run.go_on(turn)
        await self._answer(run, turn, KeptEvents())

    async def _stream(self, run: ResponseRun, turn: SessionTurn, kept: KeptEvents) -> None:
        try:
            await self._answer(run, turn, kept)
        except (SessionStoreError, asyncio.CancelledError) as error:
            ending = TierKVError("the front that answered this response is shutting down")
            cause = error if isinstance(error, TierKVError) else ending
            with suppress(SessionStoreError):
                await self._fail(turn, error_json(cause), kept)
        kept.end()
        loop = asyncio.get_running_loop()
        loop.call_later(_KEPT_S, lambda: self._kept.pop(turn.response_id, None))

    async def _answer(self, run: ResponseRun, turn: SessionTurn, kept: KeptEvents) -> None:
        """Answer a stored turn, until it is cancelled or deleted."""
        error: BaseException | None = None
        work = asyncio.ensure_future(_work(run, kept))
        signs = asyncio.ensure_future(_sign(self._conversations, turn))
        self._works[turn.response_id] = work
        try:
            await asyncio.wait({work, signs}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not work.cancelled():
                error = work.exception()
        finally:
            del self._works[turn.response_id]
            for each in (work, signs):
                each.cancel()
            await asyncio.gather(work, signs, return_exceptions=True)
        if isinstance(error, SessionStoreError):
            raise error
        if error is not None:
            if not isinstance(error, TierKVError | FieldError):
                log.error("a background response broke", exc_info=error)
            await self._fail(turn, error_json(error), kept)
        elif not kept.ended:  # Cancelled or deleted.
            ended = unanswered(turn, self._conversations.clock.wall())
            kept.add([kept.writer.cancelled(response_json(ended, ()))])

    async def give_up(self, body: str, reason: str) -> None:
        """Let the response fail; see EntryHandler."""
        turn = await self._turn(QueuedResponse.from_json(body))
        if turn is not None and turn.status.is_open:
            error = {"code": "server_error", "message": reason}
            await self._fail(turn, error, KeptEvents())

    async def _turn(self, queued: QueuedResponse) -> SessionTurn | None:
        store, now_s = self._conversations.store, self._conversations.clock.wall()
        return await self._conversations.run(store.turn, queued.tenant, queued.response_id, now_s)

    async def _fail(self, turn: SessionTurn, error: Mapping[str, Any], kept: KeptEvents) -> None:
        store, now_s = self._conversations.store, self._conversations.clock.wall()
        items = await self._conversations.run(store.turn_items, turn.tenant, turn.response_id)
        failed = unanswered(turn, now_s, error)
        told = await self._conversations.run(store.put_turn, failed, items, opened=True) or failed
        tell = kept.writer.failed if told.status is TurnStatus.FAILED else kept.writer.cancelled
        kept.add([tell(response_json(told, ()))])


async def without_front(
    conversations: Conversations, turn: SessionTurn, lost_s: float
) -> SessionTurn:
    """Return a turn; an open one fails after ``lost_s`` seconds without a sign of life."""
    store, now_s = conversations.store, conversations.clock.wall()
    if not turn.status.is_open or turn.alive_s + lost_s > now_s:
        return turn
    items = await conversations.run(store.turn_items, turn.tenant, turn.response_id)
    failed = await conversations.run(
        store.put_turn, unanswered(turn, now_s, _LOST), items, opened=True
    )
    return failed or turn


async def _work(run: ResponseRun, kept: KeptEvents) -> None:
    async with run.opened():
        now_s = run.conversations.clock.wall()
        begun = await run.put(run.asked.open(TurnStatus.IN_PROGRESS, now_s), run.asked.asked)
        if not begun.status.is_open:
            return
        kept.add(kept.writer.begun(response_json(begun, ())))
        async for event in run.events():
            kept.add(told_events(run, kept.writer, event))
        turn, items = await run.store()
        output = [item for item in items if item.is_output]
        if turn.status.is_answered:
            kept.add(kept.writer.ended(run.asked, output, response_json(turn, items)))
            kept.end()


async def _sign(conversations: Conversations, turn: SessionTurn) -> None:
    """Give signs of life until the response is cancelled or deleted."""
    sign, open_still = conversations.store.sign, True
    while open_still:
        await asyncio.sleep(_SIGN_S)
        with suppress(SessionStoreError):
            now_s = conversations.clock.wall()
            open_still = await conversations.run(sign, turn.tenant, turn.response_id, now_s)


def error_json(error: BaseException) -> Mapping[str, Any]:
    """Return the ``error`` of a failed response."""
    cause = error.error if isinstance(error, FieldError) else error
    code = "server_error"
    if isinstance(cause, OverloadedError | CallLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(cause, AuthenticationError):
        code = cause.code
    elif isinstance(cause, UserError):
        code = "invalid_prompt"
    if not isinstance(cause, TierKVError):
        return {"code": code, "message": "internal error; the log of the front has it"}
    message = f"{cause.message}. {cause.hint}" if cause.hint else cause.message
    return {"code": code, "message": message}
