"""The endpoints of OpenAI's Responses: /v1/responses, answered at once or in the background.

A response in the background begins as ``queued`` in the store, which every front can read. The
front of the request answers the response, and gives a sign of life every few seconds; the same look
shows whether any front has cancelled or deleted the response. Without signs of life for ``LOST_S``
the response counts as failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import TextEvent
from tierkv.dbfront.http.responses.response_body import ResponseBody
from tierkv.dbfront.http.responses.response_run import ResponseRun
from tierkv.dbfront.http.services import (
    FieldError,
    Services,
    caller_of,
    read_body,
    until_disconnect,
)
from tierkv.dbfront.http.sse import KEEP_ALIVE, Framing, encode_line, open_framed
from tierkv.dbfront.sessions.conversations import Conversations, unknown
from tierkv.dbfront.sessions.session_store import SessionItem, SessionTurn, TurnStatus
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
_LOST: Final = {
    "code": "server_error", "message": "the front that answered this response has ended",
}  # fmt: skip


async def begin_background(services: Services, run: ResponseRun) -> SessionTurn:
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
    task = asyncio.create_task(_answer(services, run), name=stored.response_id)
    services.background.add(task)
    task.add_done_callback(services.background.discard)
    return stored


def end_background(services: Services, response_id: str) -> None:
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
    work = asyncio.ensure_future(_work(run))
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
            await run.put(failed, run.asked.asked)


async def _work(run: ResponseRun) -> None:
    async with run.opened():
        now_s = run.conversations.clock.wall()
        begun = await run.put(run.asked.open(TurnStatus.IN_PROGRESS, now_s), run.asked.asked)
        if not begun.status.is_open:
            return
        async for _ in run.events():
            pass
        await run.store()


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


Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=limits.MAX_ITEMS_AT_ONCE)]


def responses_router(services: Services, conversations: Conversations) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()
    store = conversations.store

    @router.post("/v1/responses", summary="Items in, an answer out; the turn is kept")
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponseBody)
        run = ResponseRun.of(services, conversations, body, caller_of(request))
        if body.background:
            queued = await begin_background(services, run)
            return JSONResponse(response_json(queued, ()))
        if body.stream:
            writer = EventWriter()
            return await open_framed(services, _events(run, writer), _framing(writer))
        return JSONResponse(await until_disconnect(services, request, _answered(run)))

    @router.get("/v1/responses/{response_id}", summary="A kept response")
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise _refused("stream", "is not supported here; GET the response again to follow it")
        turn = await _turn(conversations, request, response_id)
        return response_json(turn, await conversations.run(store.turn_items, *_key(turn)))

    @router.delete("/v1/responses/{response_id}", summary="Delete a kept response")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        turn = await _turn(conversations, request, response_id)
        if not await conversations.run(store.delete_turn, *_key(turn)):
            raise unknown("Response", response_id)
        end_background(services, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", summary="Stop a background response")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        turn = await _turn(conversations, request, response_id)
        if not turn.body["background"]:
            raise _refused("response_id", "names a response that is not a background response")
        items = await conversations.run(store.turn_items, *_key(turn))
        if turn.status.is_open:
            ended = unanswered(turn, conversations.clock.wall())
            stored = await conversations.run(store.put_turn, ended, items, opened=True)
            if stored is None:
                raise unknown("Response", response_id)
            turn = stored
            end_background(services, response_id)
        return response_json(turn, items)

    @router.get("/v1/responses/{response_id}/input_items", summary="What a response was asked with")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Limit = 20,
        order: Order = "desc",
        after: str = "",
    ) -> dict[str, Any]:
        turn = await _turn(conversations, request, response_id)
        items = await conversations.run(store.turn_items, *_key(turn))
        asked = [item for item in items if not item.is_output]
        return page_json(_after(asked[::-1] if order == "desc" else asked, after), limit)

    return router


async def _turn(conversations: Conversations, request: Request, response_id: str) -> SessionTurn:
    """Return a turn of the client's tenant.

    Raises:
        UnknownSessionError: the tenant has none of this id.
    """
    tenant, now_s = caller_of(request).tenant, conversations.clock.wall()
    turn = await conversations.run(conversations.store.turn, tenant, response_id, now_s)
    if turn is None:
        raise unknown("Response", response_id)
    return await looked_after(conversations, turn)


def _key(turn: SessionTurn) -> tuple[str, str]:
    return turn.tenant, turn.response_id


async def _answered(run: ResponseRun) -> dict[str, Any]:
    async with run.opened():
        async with aclosing(run.events()) as events:
            async for _ in events:
                pass
        return response_json(*await run.store())


async def _events(run: ResponseRun, writer: EventWriter) -> AsyncGenerator[Mapping[str, Any], None]:
    async with run.opened():
        begun = run.asked.open(TurnStatus.IN_PROGRESS, 0.0)
        async with aclosing(run.events()) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                # An overload is then an HTTP status, not an event.
                await asyncio.wait({first}, timeout=run.services.config.first_event_wait_s / 2)
                if first.done():
                    first.result()
                for event in writer.begun(response_json(begun, ())):
                    yield event
                async for told in _pieces(run, writer, begun, first, events):
                    yield told
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


async def _pieces(
    run: ResponseRun,
    writer: EventWriter,
    begun: SessionTurn,
    first: asyncio.Future[TextEvent],
    events: AsyncGenerator[TextEvent, None],
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yield the pieces of the answer and the end; an error is an event, too."""
    try:
        for told in _piece(run, writer, await first):
            yield told
        async for event in events:
            for told in _piece(run, writer, event):
                yield told
        turn, items = await run.store()
        output = [item for item in items if item.is_output]
        for told in writer.ended(run.asked, output, response_json(turn, items)):
            yield told
    except (TierKVError, FieldError) as error:
        now_s = run.conversations.clock.wall()
        failed = unanswered(begun, now_s, error_json(error))
        yield writer.failed(response_json(failed, ()))


def _piece(run: ResponseRun, writer: EventWriter, event: TextEvent) -> Iterator[Mapping[str, Any]]:
    if event.text:
        yield from writer.text(run.asked, event.text)
    for delta in event.calls:
        yield from writer.call(run.asked, delta)


def _framing(writer: EventWriter) -> Framing[Mapping[str, Any]]:
    """Return the encoding of a stream; as in OpenAI's API, no ``[DONE]`` ends it."""
    return Framing(
        media_type="text/event-stream",
        chunk=_encoded,
        error=lambda body: _encoded(writer.broken(body["error"])),
        keep_alive=KEEP_ALIVE,
        done=b"",
    )


def _encoded(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + encode_line(event) + b"\n\n"


def _after(items: Sequence[SessionItem], after: str) -> Sequence[SessionItem]:
    places = [place for place, item in enumerate(items) if item.item_id == after]
    if after and not places:
        raise FieldError("after", unknown("Item", after))
    return items[places[0] + 1 :] if places else items


def page_json(items: Sequence[SessionItem], limit: int) -> dict[str, Any]:
    """Return a page of at most ``limit`` items; more items mean that there is another page."""
    data = [item.to_wire() for item in items[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": len(items) > limit,
    }


def _refused(field: str, reason: str) -> FieldError:
    return FieldError(field, UserError(f"{field} {reason}"))
