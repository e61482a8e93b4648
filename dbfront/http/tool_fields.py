"""Tools in OpenAI's JSON format: in a request, in messages, and in answers.

Called by dbfront/http/schema.py and the endpoints; dbfront/tool_calls has the meaning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.tool_calls.tool import CallDelta, Tool, ToolCall, ToolChoice, ToolUse
from tierkv.kvcore import limits
from tierkv.kvcore.errors import FeatureNotSupportedError, UserError
from tierkv.kvcore.request import FinishReason

_NO_PARAMETERS: Final = '{"type": "object", "properties": {}}'

FUNCTION_NAME: Final = r"^[A-Za-z0-9_.\-]{1,128}$"
FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


class FunctionField(BaseModel):
    """A function: name, description, and the JSON Schema of the arguments."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """Convert to the front's value."""
        parameters = _NO_PARAMETERS
        if self.parameters:
            check_parameters(self.name, self.parameters)
            parameters = json.dumps(self.parameters, ensure_ascii=False)
        return Tool(self.name, self.description or "", parameters, bool(self.strict))


class ToolField(BaseModel):
    """One tool; only functions are supported."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: FunctionField | None = None

    def to_tool(self, where: str) -> Tool:
        """Convert to the front's value; refuse tools that are no functions."""
        hint = 'Send {"type": "function", "function": {"name": ..., "parameters": ...}}.'
        if self.type != "function":
            message = f"{where} has type {self.type[:80]!r}; only functions are supported"
            raise FieldError(where, FeatureNotSupportedError(message, hint=hint))
        if self.function is None:
            raise FieldError(where, UserError(f"{where} has no function", hint=hint))
        return self.function.to_tool()


class CalledFunction(BaseModel):
    """The function of a call, with arguments as JSON text."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    arguments: str = "{}"


class CallField(BaseModel):
    """A call in a message of the assistant."""

    model_config = ConfigDict(extra="allow")

    id: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """Convert to the front's value."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


def tools_of(fields: Sequence[ToolField] | None) -> list[Tool]:
    """Convert the ``tools`` of a request.

    Raises:
        FieldError: a tool is no function.
    """
    return [tool.to_tool(f"tools[{i}]") for i, tool in enumerate(fields or ())]


def check_parameters(name: str, schema: dict[str, Any]) -> None:
    """Refuse a schema of arguments that are no object.

    Raises:
        FieldError: says so.
    """
    if schema.get("type", "object") not in ("object", ["object"]):
        error = UserError(
            f"the parameters of tool {name} have type {str(schema['type'])[:80]}, but arguments "
            "are an object",
            hint='Write {"type": "object", "properties": {...}}.',
        )
        raise FieldError("tools", error)


def tool_use(
    tools: Sequence[Tool], choice: str | dict[str, Any] | None, *, parallel: bool
) -> ToolUse | None:
    """Return the tools that the model may use; None if it may use none.

    Raises:
        FieldError: the choice is unknown, or names no tool of the request.
    """
    _check_tools(tools)
    if choice == "none":
        return None
    if not tools:
        if choice in (None, "auto"):
            return None
        raise FieldError("tool_choice", UserError("tool_choice needs tools", hint="Send tools."))
    names = [tool.name for tool in tools]
    if choice in (None, "auto"):
        return ToolUse(tuple(tools), parallel=parallel)
    if choice in ("required", "any"):
        return ToolUse(tuple(tools), ToolChoice.REQUIRED, parallel=parallel)
    mode, wanted = _wanted(choice)
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        message = f"tool_choice names {', '.join(unknown) or 'no tool'}"
        hint = f"The tools of the request are {', '.join(names)}."
        raise FieldError("tool_choice", UserError(message[:200], hint=hint[:400]))
    one = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(tuple(tools), mode, tuple(wanted), parallel=parallel and not one)


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > limits.MAX_TOOLS:
        message = f"{len(tools)} tools, at most {limits.MAX_TOOLS} are allowed"
        raise FieldError("tools", UserError(message))
    seen = set[str]()
    for tool in tools:
        if tool.name in seen:
            raise FieldError("tools", UserError(f"two tools are named {tool.name}"))
        seen.add(tool.name)


def _wanted(choice: str | dict[str, Any]) -> tuple[ToolChoice, list[str]]:
    """Read a choice with names of tools, in the forms of chat completions and of responses."""
    error = UserError(
        f"tool_choice={str(choice)[:80]} is not known",
        hint='Use auto, none, required or {"type": "function", "function": {"name": ...}}.',
    )
    if isinstance(choice, str):
        raise FieldError("tool_choice", error)
    try:
        if choice["type"] == "function":
            return ToolChoice.REQUIRED, [_name(choice)]
        if choice["type"] == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            return ToolChoice(allowed.get("mode", "auto")), [_name(t) for t in allowed["tools"]]
    except (KeyError, TypeError, AttributeError, ValueError) as cause:
        raise FieldError("tool_choice", error) from cause
    raise FieldError("tool_choice", error)


def _name(value: dict[str, Any]) -> str:
    return str(value.get("function", value)["name"])


def finish_reason(reason: FinishReason, *, calls: bool) -> str:
    """Return OpenAI's reason; after calls the client is to send results."""
    return "tool_calls" if calls and reason is FinishReason.STOP else reason.value


def call_json(call: ToolCall) -> dict[str, Any]:
    """Write a call of a complete answer."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def delta_json(delta: CallDelta) -> dict[str, Any]:
    """Write a piece of a call of a streamed answer."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if not delta.name:
        return {"index": delta.index, "function": function}
    function = {"name": delta.name, **function}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
