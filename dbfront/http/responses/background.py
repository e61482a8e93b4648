"""Responses that are answered while no client waits.

A response begins as ``queued`` in the store, which every front can read. The front of the
request answers the response, and gives a sign of life every few seconds; the same look shows
whether any front has cancelled or deleted the response. Without signs of life for ``LOST_S`` the
response counts as failed.

The events of a streamed response are kept here until some time after its end, so that clients whose
connection broke can go on behind the last event that they saw.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from tierkv.dbfront.contracts import TextEvent
from tierkv.dbfront.http.logprobs import chat_logprobs
from tierkv.dbfront.http.responses.response_run import ResponseRun
from tierkv.dbfront.http.services import FieldError, Services
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_store import SessionTurn, TurnStatus
from tierkv.dbfront.sessions.turn_events import EventWriter
from tierkv.dbfront.sessions.turn_form import response_json, unanswered
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    CallLimitError,
    OverloadedError,
    SessionStoreError,
    TierKVError,
    UserError,
)

log = logging.getLogger("tierkv.sessions")

LOST_S: Final = 30.0
_SIGN_S: Final = 1.0
_KEPT_S: Final = 600.0
"""Seconds after the end of a response for which its events are kept."""
_LOST: Final = {
    "code": "server_error", "message": "the front that answered this response has ended",
}  # fmt: skip


class KeptEvents:
    """The events of one streamed response; ``events[n]`` has sequence number n.

    Attributes:
        writer: numbers the events.
        events: so far.
        ended: True behind the last event.
    """

    def __init__(self) -> None:
        self.writer = EventWriter()
        self.events: list[Mapping[str, Any]] = []
        self.ended = False
        self._news = asyncio.Event()

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Append events, and wake those that follow."""
        self.events += events
        self._wake()

    def end(self) -> None:
        """Nothing comes any more."""
        self.ended = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield all events behind a number, until the end of the response."""
        at = max(0, number + 1)
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.ended:
                return
            await news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def begin(services: Services, run: ResponseRun) -> SessionTurn:
    """Store a response as queued, and answer the response later.

    Raises:
        OverloadedError: the front already answers the maximum number of responses in the
            background.
        TierKVError: the call can't be asked.
    """
    if len(services.background) >= limits.MAX_BACKGROUND_RESPONSES:
        raise OverloadedError(
            f"{limits.MAX_BACKGROUND_RESPONSES} responses are answered in the background here",
            hint="Wait until some have ended, or leave background out.",
        )
    await run.prepare()
    queued = run.asked.open(TurnStatus.QUEUED, run.conversations.clock.wall())
    stored = await run.put(queued, run.asked.asked)
    run.opened_before = True
    if run.body.stream:
        services.kept_events[stored.response_id] = KeptEvents()
    task = asyncio.create_task(_answer(services, run), name=stored.response_id)
    services.background.add(task)
    task.add_done_callback(services.background.discard)
    return stored


def events_of(services: Services, response_id: str) -> KeptEvents:
    """Return the events of a streamed response.

    Raises:
        FieldError: this front does not have them.
    """
    found: KeptEvents | None = services.kept_events.get(response_id)
    if found is not None:
        return found
    error = UserError(
        "stream can't be used here: the events of this response are not kept",
        hint="They are kept at the front that answers, for responses made with background and "
        f"stream, until {_KEPT_S / 60:.0f} minutes after the end. GET the response without stream.",
    )
    raise FieldError("stream", error)


def end(services: Services, response_id: str) -> None:
    """Stop answering a response, if this front does."""
    for task in services.background:
        if task.get_name() == response_id:
            task.cancel()


async def looked_after(conversations: Conversations, turn: SessionTurn) -> SessionTurn:
    """Return a turn; an open one whose front has ended fails."""
    now_s = conversations.clock.wall()
    if not turn.status.is_open or turn.alive_s + LOST_S > now_s:
        return turn
    items = await conversations.run(conversations.store.turn_items, turn.tenant, turn.response_id)
    failed = await conversations.run(
        conversations.store.put_turn, unanswered(turn, now_s, _LOST), items, opened=True
    )
    return failed or turn


async def _answer(services: Services, run: ResponseRun) -> None:
    kept = services.kept_events.get(run.response_id, KeptEvents())
    work = asyncio.ensure_future(_work(run, kept))
    signs = asyncio.ensure_future(_sign(run))
    error: BaseException | None = None
    try:
        await asyncio.wait({work, signs}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            error = work.exception()
    except asyncio.CancelledError:
        error = TierKVError("the front that answered this response is shutting down")
    finally:
        for each in (work, signs):
            each.cancel()
        await asyncio.gather(work, signs, return_exceptions=True)
    if error is not None:
        if not isinstance(error, TierKVError | FieldError):
            log.error("a background response broke", exc_info=error)
        now_s = run.conversations.clock.wall()
        begun = run.asked.open(TurnStatus.IN_PROGRESS, now_s)
        failed = unanswered(begun, now_s, error_json(error))
        with suppress(SessionStoreError, TierKVError):
            failed = await run.put(failed, run.asked.asked)
        tell = kept.writer.failed if failed.status is TurnStatus.FAILED else kept.writer.cancelled
        kept.add([tell(response_json(failed, ()))])
    elif not kept.ended:
        await _tell_end(run, kept)
    kept.end()
    asyncio.get_running_loop().call_later(_KEPT_S, services.kept_events.pop, run.response_id, None)


async def _tell_end(run: ResponseRun, kept: KeptEvents) -> None:
    """Tell that a response was cancelled or deleted."""
    now_s = run.conversations.clock.wall()
    ended = unanswered(run.asked.open(TurnStatus.IN_PROGRESS, now_s), now_s)
    kept.add([kept.writer.cancelled(response_json(ended, ()))])


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


def told_events(
    run: ResponseRun, writer: EventWriter, event: TextEvent
) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a piece of an answer."""
    if event.text:
        logprobs = chat_logprobs(event.tokens)["content"]
        yield from writer.text(run.asked, event.text, logprobs)
    for delta in event.calls:
        yield from writer.call(run.asked, delta)


async def _sign(run: ResponseRun) -> None:
    """Give signs of life until the response is cancelled or deleted."""
    store, asked = run.conversations.store, run.asked
    open_still = True
    while open_still:
        await asyncio.sleep(_SIGN_S)
        with suppress(SessionStoreError):
            open_still = await run.conversations.run(
                store.sign, asked.tenant, asked.response_id, run.conversations.clock.wall()
            )


def error_json(error: BaseException) -> Mapping[str, Any]:
    """Return the ``error`` of a failed response."""
    cause = error.error if isinstance(error, FieldError) else error
    code = "server_error"
    if isinstance(cause, OverloadedError | CallLimitError):
        code = "rate_limit_exceeded"
    elif isinstance(cause, UserError):
        code = "invalid_prompt"
    if not isinstance(cause, TierKVError):
        return {"code": code, "message": "internal error; the log of the front has it"}
    message = f"{cause.message}. {cause.hint}" if cause.hint else cause.message
    return {"code": code, "message": message}
