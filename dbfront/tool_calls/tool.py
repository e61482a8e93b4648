"""The values of tool calling: tools, the caller's choice of tools, calls, and pieces of calls.

A call is handed back to the client and never executed here. Arguments and schemas are JSON text as
written by client or model, so all values are hashable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        description: what the function does; empty if the client says nothing.
        parameters: JSON Schema of the arguments' object, as JSON text.
        strict: refuse a schema with unsupported keywords; else such keywords are ignored.
    """

    name: str
    description: str
    parameters: str
    strict: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, for chat templates."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {
            "type": "function",
            "function": function | {"parameters": json.loads(self.parameters)},
        }


class ToolChoice(StrEnum):
    """Whether the model calls: if it wants to, or in any case."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call of a model.

    Attributes:
        tools: all tools shown to the model, at least one.
        choice: whether the model has to call.
        only: names of the tools that may be called; empty: all.
        parallel: whether one answer may hold several calls.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    only: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if not self.only or tool.name in self.only)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call made by the model; ``arguments`` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """Return the arguments; None if they are no JSON object, as after a cut."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call, in the order of the model's text.

    Attributes:
        index: position of the call in its answer, from 0.
        call_id: set in the first piece of a call only.
        name: set in the first piece of a call only.
        arguments: the next part of the arguments' JSON text.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


def joined_calls(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Put the pieces of an answer's calls together."""
    begun: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        begun.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(
        ToolCall(first.call_id, first.name, "".join(arguments[index]))
        for index, first in begun.items()
    )
