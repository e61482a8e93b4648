"""Tools in OpenAI's JSON: what a request may say, and how calls are written."""

from __future__ import annotations

from typing import Any

import pytest

from tierkv.dbfront.contracts import Message, TextCall
from tierkv.dbfront.http.completion_bodies import ChatBody
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.http.tool_fields import call_json, delta_json, finish_reason
from tierkv.dbfront.tool_calls.tool import CallDelta, ToolCall, ToolChoice, joined_calls
from tierkv.kvcore import limits
from tierkv.kvcore.request import FinishReason

CALLER = RestCaller("t")
STOP = {"type": "function", "function": {"name": "stop"}}
GO = {"type": "function", "function": {"name": "go", "description": "Go!", "strict": True}}


def call_of(messages: list[dict[str, Any]] | None = None, **fields: Any) -> TextCall:
    messages = messages or [{"role": "user", "content": "hi"}]
    return ChatBody.model_validate({"messages": messages, **fields}).to_call(CALLER, 1.0)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        (None, (ToolChoice.AUTO, (), True)),
        ("auto", (ToolChoice.AUTO, (), True)),
        ("required", (ToolChoice.REQUIRED, (), True)),
        (named("go"), (ToolChoice.REQUIRED, ("go",), False)),
        ({"type": "function", "name": "go"}, (ToolChoice.REQUIRED, ("go",), False)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("go")]}},
            (ToolChoice.AUTO, ("go",), True),
        ),
    ],
)
def test_choices(choice: object, want: tuple[object, ...]) -> None:
    use = call_of(tools=[STOP, GO], tool_choice=choice).tools
    assert use is not None and (use.choice, use.only, use.parallel) == want
    assert [tool.name for tool in use.callable] == list(want[1] or ("stop", "go"))
    assert use.tools[0].to_json()["function"]["parameters"] == {"type": "object", "properties": {}}
    assert use.tools[1].strict and use.tools[1].description == "Go!"


def test_no_tools_and_none() -> None:
    assert call_of(tools=[STOP], tool_choice="none").tools is None
    assert call_of(tools=[], tool_choice="auto").tools is None
    single = call_of(tools=[STOP], parallel_tool_calls=False).tools
    assert single is not None and not single.parallel


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [STOP, STOP]}, "tools", "two tools are named stop"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0]", "has no function"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "string"}},
                    }
                ]
            },
            "tools",
            "arguments are an object",
        ),
        ({"tools": [named(f"t{i}") for i in range(limits.MAX_TOOLS + 1)]}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [STOP], "tool_choice": "often"}, "tool_choice", "often"),
        ({"tools": [STOP], "tool_choice": named("go")}, "tool_choice", "names go"),
        ({"tools": [STOP], "tool_choice": {"type": "function"}}, "tool_choice", "not known"),
        ({"tools": [STOP], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "not known"),
        ({"tools": [STOP], "tool_choice": {"x": []}}, "tool_choice", "not known"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(FieldError) as caught:
        call_of(**fields)
    assert caught.value.param == param
    assert says in str(caught.value.error)


def test_messages_with_calls_and_results() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "gone"}]},
    ]
    assert call_of(talk).messages == (
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("c1", "go", '{"a": 1}'),)),
        Message("tool", "gone", tool_call_id="c1"),
    )
    with pytest.raises(FieldError, match="only the assistant"):
        call_of([{"role": "user", "content": "", "tool_calls": [called]}])


def test_calls_as_json() -> None:
    deltas = [
        CallDelta(0, "c1", "go"),
        CallDelta(0, arguments="{"),
        CallDelta(1, "c2", "stop", "{}"),
        CallDelta(0, arguments="}"),
    ]
    assert joined_calls(deltas) == (ToolCall("c1", "go", "{}"), ToolCall("c2", "stop", "{}"))
    assert call_json(ToolCall("c1", "go", "{}")) == {
        "id": "c1",
        "type": "function",
        "function": {"name": "go", "arguments": "{}"},
    }
    assert delta_json(deltas[1]) == {"index": 0, "function": {"arguments": "{"}}
    assert delta_json(deltas[0])["id"] == "c1"
    assert finish_reason(FinishReason.STOP, calls=True) == "tool_calls"
    assert finish_reason(FinishReason.LENGTH, calls=True) == "length"
