"""Items of a conversation: OpenAI's JSON, checked, stored, and read by a model.

No other module knows the fields of items. REST (dbfront/http/responses) parses items of
clients, and dbfront/sessions/chat.py makes the items of a turn from SQL. Each kind of item has a
function to check the fields; ``to_messages`` writes items for the chat template. Reasoning is
accepted and left out, since no served model wrote the reasoning. Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.sessions.session_store import SessionItem
from tierkv.dbfront.tool_calls.tool import ToolCall
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError

Json = Mapping[str, Any]

ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")
_STATES: Final = ("in_progress", "completed", "incomplete")


class ItemError(Exception):
    """An item that can't be taken.

    Attributes:
        where: path of the field inside the item or list, for example ``[2].content``.
        error: what is wrong.
    """

    def __init__(self, where: str, error: UserError) -> None:
        super().__init__(f"{where}: {error}")
        self.where = where
        self.error = error


def new_id(prefix: str) -> str:
    """Return a fresh random id, for example ``msg_1f0c...``."""
    return f"{prefix}_{secrets.token_hex(16)}"


def parse_items(given: Any, *, response_id: str = "") -> list[SessionItem]:
    """Return the items of a client's text, or list of items; each gets a new id.

    Args:
        given: a text stands for a message of the user.
        response_id: the turn that the items come with.

    Raises:
        ItemError: an item of another kind, or with a wrong field.
    """
    if isinstance(given, str):
        return [SessionItem(new_id("msg"), message("user", given), response_id)]
    if not isinstance(given, list) or not given:
        raise ItemError("", UserError("must be text, or a list of items"))
    found = []
    for index, one in enumerate(given):
        read = _read_item(one, f"[{index}]")
        if read is not None:
            prefix, body = read
            found.append(SessionItem(new_id(prefix), body, response_id))
    if not found:
        raise ItemError("", UserError("has no item that the model reads"))
    return found


def message(
    role: str, text: str, *, status: str = "completed", logprobs: Sequence[Json] = ()
) -> dict[str, Any]:
    """Return the body of a message with a single text; ``logprobs`` are of its tokens."""
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if role == "assistant":
        told = {"annotations": [], "logprobs": list(logprobs)}
        part = {"type": "output_text", "text": text, **told}
    return {"type": "message", "role": role, "status": status, "content": [part]}


def function_call(call: ToolCall, *, status: str = "completed") -> dict[str, Any]:
    """Return the body of a call of a tool."""
    return {
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def to_messages(items: Iterable[SessionItem]) -> list[Message]:
    """Return items as messages of the chat template.

    Calls join the message of the assistant before them; ``developer`` is read as ``system``. The
    arguments of a call that ``max_output_tokens`` cut off are no JSON, so a call without an output
    is left out, and one with an output has no arguments.
    """
    items = list(items)
    answered = {i.body["call_id"] for i in items if i.body["type"] == "function_call_output"}
    messages: list[Message] = []
    for item in items:
        body = item.body
        if body["type"] == "function_call":
            call = ToolCall(body["call_id"], body["name"], body["arguments"])
            if body["status"] == "incomplete" and call.parsed() is None:
                if call.call_id not in answered:
                    continue
                call = replace(call, arguments="{}")
            if not messages or messages[-1].role != "assistant":
                messages.append(Message("assistant", ""))
            before = messages[-1]
            messages[-1] = replace(before, tool_calls=(*before.tool_calls, call))
        elif body["type"] == "function_call_output":
            messages.append(Message("tool", body["output"], tool_call_id=body["call_id"]))
        else:
            role = "system" if body["role"] == "developer" else body["role"]
            messages.append(Message(role, "".join(map(_part_text, body["content"]))))
    return messages


def turns_of(items: Sequence[SessionItem]) -> list[Sequence[SessionItem]]:
    """Cut a history before each message of a user; the oldest turns can be left out first."""
    starts = [
        index for index, item in enumerate(items) if index and item.body.get("role") == "user"
    ]
    bounds = [0, *starts, len(items)]
    return [items[a:b] for a, b in pairwise(bounds) if a < b]


def _part_text(part: Json) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _read_item(given: Any, where: str) -> tuple[str, dict[str, Any]] | None:
    """Return the prefix of the item's id and the item's body; None for an item that is left out."""
    if not isinstance(given, dict):
        raise ItemError(where, UserError("an item must be an object"))
    kind = given.get("type", "message")
    if kind == "reasoning":
        return None
    read = _KINDS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise ItemError(
            f"{where}.type",
            FeatureNotSupportedError(
                f"items of type {str(kind)[:80]!r} are not supported",
                hint=f"Supported are {', '.join(_KINDS)}; reasoning is left out.",
            ),
        )
    return read(given, where)


def _read_message(given: Json, where: str) -> tuple[str, dict[str, Any]]:
    role = given.get("role")
    if role not in ROLES:
        raise ItemError(f"{where}.role", UserError(f"role must be one of {', '.join(ROLES)}"))
    content = given.get("content")
    if isinstance(content, str):
        return "msg", message(role, content, status=_status(given, where))
    if not isinstance(content, list) or not content:
        raise ItemError(f"{where}.content", UserError("content must be text, or a list of parts"))
    parts = [_read_part(part, role, f"{where}.content[{n}]") for n, part in enumerate(content)]
    body = {"type": "message", "role": role, "status": _status(given, where), "content": parts}
    return "msg", body


def _read_part(given: Any, role: str, where: str) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _TEXT_PARTS:
        error = FeatureNotSupportedError(f"parts of type {str(kind)[:80]!r} are not text")
        raise ItemError(f"{where}.type", error)
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text(given, "refusal", where)}
    text = _text(given, "text", where)
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _read_call(given: Json, where: str) -> tuple[str, dict[str, Any]]:
    call = ToolCall(*(_text(given, name, where) for name in ("call_id", "name", "arguments")))
    return "fc", function_call(call, status=_status(given, where))


def _read_output(given: Json, where: str) -> tuple[str, dict[str, Any]]:
    output = given.get("output")
    if isinstance(output, list):
        parts = [_read_part(part, "user", f"{where}.output[{n}]") for n, part in enumerate(output)]
        output = "".join(_part_text(part) for part in parts)
    if not isinstance(output, str):
        raise ItemError(f"{where}.output", UserError("output must be text"))
    return "fco", {
        "type": "function_call_output",
        "call_id": _text(given, "call_id", where),
        "output": output,
        "status": _status(given, where),
    }


_KINDS: Final[dict[str, Callable[[Json, str], tuple[str, dict[str, Any]]]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def _text(given: Json, name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise ItemError(f"{where}.{name}", UserError(f"{name} must be text"))
    return value


def _status(given: Json, where: str) -> str:
    status = given.get("status")
    if status is None:
        return "completed"
    if status not in _STATES:
        raise ItemError(f"{where}.status", UserError(f"status must be one of {', '.join(_STATES)}"))
    return str(status)
