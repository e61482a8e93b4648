"""The JSON format of Anthropic clients, in answers, streams of events, and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tierkv.dbfront.contracts import TextAnswer, TextEvent
from tierkv.dbfront.http.sse import Framing, encode_line
from tierkv.dbfront.tool_calls.tool import CallDelta
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
    """Encode one event with its name, as Anthropic's clients read it."""
    return f"event: {event['type']}\ndata: ".encode() + encode_line(event) + b"\n\n"


def error_json(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Convert an error in OpenAI's format."""
    told = error["error"]
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": told["message"]}}


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
