"""The endpoints of Anthropic's Messages API.

An answer is the same as of /v1/chat/completions. ``cache_control`` keeps the KV up to its place for
its lifetime, if there is room (``KvAction.RETAIN``); the client never waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import PreparedCall, TextCall
from tierkv.dbfront.http.messages.answers import NAMED_EVENTS, MessageEvents, message_json
from tierkv.dbfront.http.messages.schema import SHORT_S, MessagesBody, PromptBody
from tierkv.dbfront.http.services import Services, caller_of, read_body, until_disconnect
from tierkv.dbfront.http.sse import open_framed
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import ContextTooLongError, TierKVError

_log = logging.getLogger("tierkv.http")


def messages_router(services: Services) -> APIRouter:
    """Create the endpoints."""
    router = APIRouter()
    retaining: set[asyncio.Task[None]] = set()

    def retain(calls: Sequence[TextCall]) -> None:
        if calls:
            task = asyncio.create_task(_retain(services, calls))
            retaining.add(task)
            task.add_done_callback(retaining.discard)

    @router.post("/v1/messages", summary="A conversation in, a message out, in Anthropic's format")
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesBody)
        options = body.to_options(services.config.default_temperature)
        call = body.to_call(caller_of(request), options)
        prepared = await _prepare(services, call)
        retained = body.retained(call)
        hour_tokens = await _hour_tokens(services, prepared, retained)
        message_id = f"msg_{prepared.request.request_id}"
        if body.stream:
            most = body.max_tokens
            events = _events(services, prepared, message_id, most=most, hour_tokens=hour_tokens)

            async def streamed() -> AsyncGenerator[Mapping[str, Any], None]:
                async with aclosing(events):
                    async for event in events:
                        yield event
                retain(retained)

            return await open_framed(services, streamed(), NAMED_EVENTS)
        answer = await until_disconnect(services, request, services.generator.answer(prepared))
        retain(retained)
        name = prepared.model.name
        most = body.max_tokens
        told = message_json(message_id, name, answer, most=most, hour_tokens=hour_tokens)
        return JSONResponse(told)

    @router.post("/v1/messages/count_tokens", summary="Tokens of a conversation; no model runs")
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = await read_body(request, PromptBody)
        call = body.to_call(caller_of(request), CallOptions())
        return {"input_tokens": len(await services.generator.token_ids(call))}

    return router


async def _prepare(services: Services, call: TextCall) -> PreparedCall:
    """Prepare a call; ``max_tokens`` beyond the context means the rest of the context.

    Clients must send ``max_tokens``, and most send a constant.
    """
    try:
        return await services.generator.prepare(call)
    except ContextTooLongError:
        options = replace(call.options, max_tokens=None)
        return await services.generator.prepare(replace(call, options=options))


async def _hour_tokens(
    services: Services, prepared: PreparedCall, retained: Sequence[TextCall]
) -> int:
    """Return the tokens of the prompt up to the last mark that asks for an hour."""
    hours = [one for one in retained if one.steering and one.steering.keep_s > SHORT_S]
    if not hours:
        return 0
    if len(retained) == 1:  # What is stored beyond the mark is counted there, too.
        return len(prepared.request.token_ids)
    return len(await services.generator.token_ids(hours[0]))


async def _events(
    services: Services, prepared: PreparedCall, message_id: str, *, most: int, hour_tokens: int
) -> AsyncGenerator[Mapping[str, Any], None]:
    tokens = len(prepared.request.token_ids)
    events = MessageEvents(message_id, prepared.model.name, tokens, hour_tokens=hour_tokens)
    begun = False
    async with aclosing(services.generator.stream(prepared)) as answered:  # type: ignore[type-var]
        async for event in answered:
            if not begun:
                begun = True
                yield events.begin()
            for each in events.add(event):
                yield each
            if event.finish_reason is not None:
                for each in events.end(event, most=most):
                    yield each


async def _retain(services: Services, calls: Sequence[TextCall]) -> None:
    for call in calls:
        try:
            prepared = await services.generator.prepare(call)
            await services.generator.answer(prepared)
        except TierKVError as error:
            _log.debug("a prompt is not retained: %s", error.message)
