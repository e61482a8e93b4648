"""Conversations with tools, as chat templates read them.

Pure. A template with calls gets calls in the form of Hugging Face's templates: arguments are
objects. For any other template the conversation is rewritten to plain text in the FALLBACK format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tool_calls.call_format import FALLBACK, CallFormat, CallId, Part, short_id
from tierkv.dbfront.tool_calls.tool import Tool, ToolCall
from tierkv.kvcore.errors import UdfArgumentError

_INSTRUCTION: Final = (
    "You can call these functions. Each line describes one, with the JSON Schema of its "
    "arguments:\n<tools>\n{tools}\n</tools>\n"
    "To call a function, answer with\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "and wait for its result."
)


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a conversation has calls of tools, or results of calls."""
    return any(message.tool_calls or message.tool_call_id for message in messages)


def masked(message: Message, mask: Callable[[str], str]) -> Message:
    """Apply ``mask`` to every text of a message."""
    calls = tuple(replace(call, arguments=mask(call.arguments)) for call in message.tool_calls)
    return replace(message, content=mask(message.content), tool_calls=calls)


def masked_tool(tool: Tool, mask: Callable[[str], str]) -> Tool:
    """Apply ``mask`` to a tool's texts."""
    return replace(tool, description=mask(tool.description), parameters=mask(tool.parameters))


def template_messages(messages: Sequence[Message], form: CallFormat) -> list[dict[str, Any]]:
    """Write messages for a template that knows tools.

    Raises:
        UdfArgumentError: the arguments of a call are no JSON object.
    """
    names = {call.call_id: call.name for message in messages for call in message.tool_calls}
    written = []
    for message in messages:
        value: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            value["tool_calls"] = [_call_value(call, form) for call in message.tool_calls]
        if message.tool_call_id:
            name = names.get(message.tool_call_id)
            value["tool_call_id"] = _id_of(message.tool_call_id, form)
            value |= {"name": name} if name else {}
        written.append(value)
    return written


def _call_value(call: ToolCall, form: CallFormat) -> dict[str, Any]:
    arguments = _object_of(call)
    function = {
        "name": call.name,
        "arguments": call.arguments if form.text_arguments else arguments,
    }
    return {"id": _id_of(call.call_id, form), "type": "function", "function": function}


def _id_of(call_id: str, form: CallFormat) -> str:
    return short_id(call_id) if form.has_ids else call_id


def _object_of(call: ToolCall) -> dict[str, Any]:
    value = call.parsed()
    if value is None:
        raise UdfArgumentError(
            f"the arguments of tool call {call.call_id[:80]!r} are no JSON object",
            hint="Send the call as the model gave it.",
        )
    return value


def plain_messages(
    messages: Sequence[Message], tools: Sequence[Tool], *, in_system: bool
) -> list[Message]:
    """Rewrite a conversation for a template without tools.

    Args:
        messages: the conversation.
        tools: tools to describe.
        in_system: describe them in the system message; False: in the first message.

    Raises:
        UdfArgumentError: the arguments of a call are no JSON object.
    """
    plain: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if plain and plain[-1].role == "user" and plain[-1].tool_call_id:
                joined = f"{plain[-1].content}\n{result}"
                plain[-1] = replace(plain[-1], content=joined)
            else:  # The mark is read by the line above only; templates never see it.
                plain.append(Message("user", result, tool_call_id="result"))
        elif message.tool_calls:
            calls = written_calls(message.tool_calls)
            plain.append(Message(message.role, f"{message.content}\n{calls}".lstrip("\n")))
        else:
            plain.append(message)
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool.to_json(), ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=described)
    if plain and (plain[0].role == "system" or not in_system):
        first = replace(plain[0], content=f"{plain[0].content}\n\n{instruction}".lstrip("\n"))
        return [first, *plain[1:]]
    return [Message("system", instruction), *plain]


def written_calls(calls: Sequence[ToolCall], form: CallFormat = FALLBACK) -> str:
    """Write calls as a model would."""
    pieces = [*form.head]
    for number, call in enumerate(calls):
        if number:
            pieces += form.separator or form.head
        arguments = json.dumps(
            _object_of(call),
            ensure_ascii=False,
            separators=(form.item_separator, form.key_separator),
        )
        pieces += [call.name, *form.middle, arguments]
    return "".join(_text_of(part) for part in (*pieces, *form.tail))


def _text_of(part: Part) -> str:
    return "000000000" if isinstance(part, CallId) else part
