"""The endpoints of Anthropic's Messages API, and the JSON of answers, events and errors.

An answer is the same as of /v1/chat/completions. ``cache_control`` keeps the KV up to its place for
its lifetime, if there is room (``KvAction.RETAIN``); the client never waits for that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tierkv.dbfront.contracts import PreparedCall, TextAnswer, TextCall, TextEvent
from tierkv.dbfront.http.messages.schema import SHORT_S, MessagesBody, PromptBody
from tierkv.dbfront.http.services import Services, caller_of, read_body, until_disconnect
from tierkv.dbfront.http.sse import Framing, encode_line, open_framed
from tierkv.dbfront.tool_calls.tool import CallDelta
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.errors import ContextTooLongError, TierKVError
from tierkv.kvcore.request import FinishReason, Usage

_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def message_json(
    message_id: str, model: str, answer: TextAnswer, *, most: int, hour_tokens: int = 0
) -> dict[str, Any]:
    """Write a complete answer.

    Args:
        message_id: the answer's identifier.
        model: the model's name.
        answer: the answer.
        most: ``max_tokens`` of the request.
        hour_tokens: see ``usage_json``.
    """
    content: list[dict[str, Any]] = []
    if answer.text or not answer.tool_calls:
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": c.call_id, "name": c.name, "input": _input(c.arguments)}
        for c in answer.tool_calls
    ]
    calls = bool(answer.tool_calls)
    reason = stop_reason(answer.finish_reason, answer.usage, answer.stop, calls=calls, most=most)
    return {
        **envelope(message_id, model),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": answer.stop or None,
        "usage": usage_json(answer.usage, hour_tokens=hour_tokens),
    }


def envelope(message_id: str, model: str) -> dict[str, Any]:
    """Write the fields that a message has before its first token."""
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _input(arguments: str) -> dict[str, Any]:
    """Read arguments; those of an answer that was cut off are no JSON, and become empty."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def stop_reason(
    reason: FinishReason, usage: Usage, stop: str, *, calls: bool, most: int
) -> str | None:
    """Return Anthropic's reason for the end of an answer."""
    if reason is FinishReason.LENGTH:
        cut = usage.completion_tokens >= most
        return "max_tokens" if cut else "model_context_window_exceeded"
    if reason is not FinishReason.STOP:
        return None
    if stop:
        return "stop_sequence"
    return "tool_use" if calls else "end_turn"


def usage_json(usage: Usage, *, hour_tokens: int = 0) -> dict[str, Any]:
    """Write tokens; as in Anthropic's API, ``input_tokens`` are those that were not cached.

    Args:
        usage: the tokens.
        hour_tokens: tokens of the prompt up to the last mark that asks for an hour.
    """
    read = min(usage.hit_tokens.total, usage.prompt_tokens)
    written = min(usage.written_tokens, usage.prompt_tokens - read)
    hour = min(max(hour_tokens - read, 0), written)
    return {
        "input_tokens": usage.prompt_tokens - read - written,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written - hour,
            "ephemeral_1h_input_tokens": hour,
        },
        "output_tokens": usage.completion_tokens,
    }


class MessageEvents:
    """The events of one streamed answer.

    Attributes:
        calls: a call of a tool has begun.
    """

    def __init__(
        self, message_id: str, model: str, prompt_tokens: int, *, hour_tokens: int = 0
    ) -> None:
        self.calls = False
        self._hour_tokens = hour_tokens
        self._envelope = envelope(message_id, model)
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""

    def begin(self) -> dict[str, Any]:
        """Return the first event; what the cache had is known only at the end."""
        usage = usage_json(Usage(self._prompt_tokens, 0))
        message = {**self._envelope, "content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**message, "usage": usage}}

    def add(self, event: TextEvent) -> list[dict[str, Any]]:
        """Return the events of a piece of the answer."""
        events: list[dict[str, Any]] = []
        if event.text:
            if self._open != "text":
                events += self._begin({"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": event.text}))
        for delta in event.calls:
            events += self._call(delta)
        return events

    def end(self, event: TextEvent, *, most: int) -> list[dict[str, Any]]:
        """Return the last events of an answer."""
        assert event.finish_reason is not None and event.usage is not None
        events: list[dict[str, Any]] = []
        if self._index < 0:
            events += self._begin({"type": "text", "text": ""})
        reason = stop_reason(
            event.finish_reason, event.usage, event.stop, calls=self.calls, most=most
        )
        delta = {"stop_reason": reason, "stop_sequence": event.stop or None}
        usage = usage_json(event.usage, hour_tokens=self._hour_tokens)
        return [
            *events,
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def _call(self, delta: CallDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if delta.name:
            self.calls = True
            call = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
            events += self._begin(call)
        if delta.arguments:
            part = {"type": "input_json_delta", "partial_json": delta.arguments}
            events.append(self._delta(part))
        return events

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self._index += 1
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closed, start]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]


def encode_named(event: Mapping[str, Any]) -> bytes:
    """Encode an event with a name, in the form that Anthropic's clients read."""
    return f"event: {event['type']}\ndata: ".encode() + encode_line(event) + b"\n\n"


def error_json(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Convert an error in OpenAI's format."""
    told = error["error"]
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, param = told["message"], told.get("param")
    if param and param not in message:  # The format has no other place for the field's name.
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _encode_error(error: Mapping[str, Any]) -> bytes:
    kind = error["error"]["type"]
    status = {"rate_limit_error": 429, "server_error": 503}.get(kind, 400)
    return encode_named(error_json(error, status))


NAMED_EVENTS: Final[Framing[Mapping[str, Any]]] = Framing(
    media_type="text/event-stream",
    chunk=encode_named,
    error=_encode_error,
    keep_alive=b'event: ping\ndata: {"type": "ping"}\n\n',
    done=b"",
)


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
