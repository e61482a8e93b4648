"""The endpoints of OpenAI's Responses: /v1/responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import TextEvent
from tierkv.dbfront.http.responses.background import BackgroundResponses, error_json
from tierkv.dbfront.http.responses.kept_events import told_events
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
from tierkv.kvcore.errors import TierKVError, UserError

Order = Literal["asc", "desc"]
Number = Annotated[int, Query(ge=-1, le=1 << 53)]
Limit = Annotated[int, Query(ge=1, le=limits.MAX_ITEMS_AT_ONCE)]


def responses_router(
    services: Services, conversations: Conversations, background: BackgroundResponses
) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()
    store = conversations.store

    @router.post("/v1/responses", summary="Items in, an answer out; the turn is kept")
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponseBody)
        run = ResponseRun.of(services, conversations, body, caller_of(request))
        if body.background:
            queued = await background.begin(run, (await request.body()).decode())
            if body.stream:
                return await _follow(services, background, queued.response_id, -1)
            return JSONResponse(response_json(queued, ()))
        if body.stream:
            writer = EventWriter()
            return await open_framed(services, _events(run, writer), _framing(writer))
        return JSONResponse(await until_disconnect(services, request, _answered(run)))

    @router.post("/v1/responses/input_tokens", summary="Tokens of a request; no model runs")
    async def input_tokens(request: Request) -> dict[str, Any]:
        body = await read_body(request, ResponseBody)
        run = ResponseRun.of(services, conversations, body, caller_of(request))
        return {"object": "response.input_tokens", "input_tokens": await run.input_tokens()}

    @router.get("/v1/responses/{response_id}", summary="A kept response")
    async def retrieve(
        request: Request, response_id: str, stream: bool = False, starting_after: Number = -1
    ) -> Response:
        turn = await background.turn(caller_of(request).tenant, response_id)
        if stream:
            return await _follow(services, background, response_id, starting_after)
        if starting_after >= 0:
            raise _refused("starting_after", "needs stream=true")
        items = await conversations.run(store.turn_items, *_key(turn))
        return JSONResponse(response_json(turn, items))

    @router.delete("/v1/responses/{response_id}", summary="Delete a kept response")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        turn = await background.turn(caller_of(request).tenant, response_id)
        if not await conversations.run(store.delete_turn, *_key(turn)):
            raise unknown("Response", response_id)
        background.forget(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", summary="Stop a background response")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        turn = await background.turn(caller_of(request).tenant, response_id)
        if not turn.body["background"]:
            raise _refused("response_id", "names a response that is not a background response")
        items = await conversations.run(store.turn_items, *_key(turn))
        return response_json(await background.cancel(turn, items), items)

    @router.get("/v1/responses/{response_id}/input_items", summary="What a response was asked with")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Limit = 20,
        order: Order = "desc",
        after: str = "",
    ) -> dict[str, Any]:
        turn = await background.turn(caller_of(request).tenant, response_id)
        items = await conversations.run(store.turn_items, *_key(turn))
        asked = [item for item in items if not item.is_output]
        return page_json(_after(asked[::-1] if order == "desc" else asked, after), limit)

    return router


async def _follow(
    services: Services, background: BackgroundResponses, response_id: str, after: int
) -> Response:
    kept = background.events_of(response_id)
    return await open_framed(services, kept.after(after), _framing(kept.writer))


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
        for told in told_events(run, writer, await first):
            yield told
        async for event in events:
            for told in told_events(run, writer, event):
                yield told
        turn, items = await run.store()
        output = [item for item in items if item.is_output]
        for told in writer.ended(run.asked, output, response_json(turn, items)):
            yield told
    except (TierKVError, FieldError) as error:
        now_s = run.conversations.clock.wall()
        failed = unanswered(begun, now_s, error_json(error))
        yield writer.failed(response_json(failed, ()))


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
