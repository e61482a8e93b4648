"""Anthropic's JSON: requests become calls, answers become messages and events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tierkv.dbfront.contracts import Message, TextAnswer, TextCall, TextEvent
from tierkv.dbfront.http.config import RestCaller
from tierkv.dbfront.http.messages.messages_router import (
    MessageEvents,
    encode_named,
    error_json,
    message_json,
    usage_json,
)
from tierkv.dbfront.http.messages.schema import MessagesBody
from tierkv.dbfront.http.services import FieldError
from tierkv.dbfront.tool_calls.tool import CallDelta, ToolCall, ToolChoice
from tierkv.kvcore.call_options import KvAction
from tierkv.kvcore.request import FinishReason, HitTokens, Usage

CALLER = RestCaller("t", "k")
TOOL = {"name": "go", "description": "Go!", "input_schema": {"type": "object"}}
ASK = [{"role": "user", "content": "hi"}]
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "Rome is big."}}
CALL = {"type": "tool_use", "id": "c1", "name": "go", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def body_of(messages: object = ASK, **fields: Any) -> MessagesBody:
    return MessagesBody.model_validate({"max_tokens": 9, "messages": messages, **fields})


def call_of(messages: object = ASK, **fields: Any) -> TextCall:
    body = body_of(messages, **fields)
    return body.to_call(CALLER, body.to_options(1.0))


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def test_a_conversation_with_calls_results_and_documents() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Rome is big."}
    document = {"type": "document", "source": source, "title": "Rome", "context": "A guide."}
    talk = [
        {"role": "user", "content": [document, text("Hi."), text("Well?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                text("Wait."),
                {"type": "tool_use", "id": "c1", "name": "go", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [text("gone")]},
                document,
            ],
        },
    ]
    call = call_of(talk, system=[text("Be"), text("kind.")], tools=[TOOL])
    assert call.documents == ("Rome\nA guide.\nRome is big.",)
    assert call.messages == (
        Message("system", "Be\n\nkind."),
        Message("user", "Hi.\n\nWell?"),
        Message("assistant", "Wait.", (ToolCall("c1", "go", '{"a": 1}'),)),
        Message("tool", "gone", tool_call_id="c1"),
        Message("user", "Rome\nA guide.\nRome is big."),
    )
    assert (call.tenant, call.key, call.origin) == ("t", "k", "messages")


def test_options_and_choices() -> None:
    call = call_of(temperature=0, top_p=0.5, top_k=3, stop_sequences=["END", " "],
                   metadata={"user_id": "a b"}, tools=[TOOL],
                   tool_choice={"type": "any", "disable_parallel_tool_use": True})  # fmt: skip
    options = call.options
    assert (options.temperature, options.top_p, options.max_tokens) == (0.0, 0.5, 9)
    assert (options.stop, options.top_k) == (("END", " "), 3) and options.hint is None
    assert options.session_id is not None and options.session_id.startswith("h-")
    use = call.tools
    assert use is not None and (use.choice, use.parallel) == (ToolChoice.REQUIRED, False)
    assert call_of(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    named = call_of(tools=[TOOL], tool_choice={"type": "tool", "name": "go"}).tools
    assert named is not None and named.only == ("go",)
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert json.loads(call_of(output_config=form).json_schema) == {"type": "object"}
    assert all(call_of(output_config={"effort": each}).json_schema == "" for each in ("low", "max"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages.0.content.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"tool_choice": {"type": "often"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "go"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"output_config": {"effort": "no"}}, "output_config.effort"),
        ({"thinking": {"type": "often"}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management"),
        ({"tools": [TOOL | {"input_examples": [{"a": 1}]}]}, "input_examples"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
         "tool_choice"),
        ({"messages": [{"role": "user", "content": [DOCUMENT | {"citations": {"enabled": True}}]}]},
         "messages.0.content.0.citations"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [text("")]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages.0.content.0.text"),
        ({"messages": [*ASK, {"role": "assistant", "content": [CALL | {"id": ""}]}, *ASK]},
         "messages.1.content.0.id"),
        ({"messages": [*ASK, {"role": "assistant", "content": [CALL]}, *ASK]},
         "messages.2.content"),
        ({"messages": [*ASK, {"role": "assistant", "content": [CALL]},
                       {"role": "user", "content": [RESULT | {"tool_use_id": "other"}]}]},
         "messages.2.content"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    messages = fields.pop("messages", ASK)
    with pytest.raises(FieldError) as caught:
        call_of(messages, **fields)
    assert caught.value.param == param


def test_marks_retain_the_prompt_up_to_the_last_one_of_each_lifetime() -> None:
    talk = [
        {"role": "user", "content": [text("a", cache_control=HOUR)]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [text("c", cache_control=MARK)]},
        {"role": "assistant", "content": "d"},
        *ASK,
    ]
    body = body_of(talk, system=[text("s", cache_control=MARK)], tools=[TOOL])
    call = body.to_call(CALLER, body.to_options(1.0))
    assert call.options.hint is not None and call.options.hint.next_turn
    kept = {one.steering.keep_s: one for one in body.retained(call) if one.steering is not None}
    assert {one.steering.action for one in kept.values() if one.steering} == {KvAction.RETAIN}
    assert [m.content for m in kept[300.0].messages or ()] == ["s", "a", "b", "c"]
    assert [m.content for m in kept[3_600.0].messages or ()] == ["s", "a"]
    assert all(one.tools == call.tools and one.tenant == "t" for one in kept.values())
    assert body_of().retained(call) == []
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("x", cache_control=MARK)]}
    assert body_of([{"role": "user", "content": [result]}]).kept_s() == 300.0
    whole = body_of(cache_control=MARK)
    assert [m.content for m in whole.retained(call)[0].messages or ()] == ["hi"]


USAGE = Usage(100, 9, HitTokens(l1=40, l3=20), written_tokens=30)


def test_an_answer_as_a_message() -> None:
    answer = TextAnswer(
        "Wait.", FinishReason.STOP, USAGE, 0.0, 0.0,
        tool_calls=(ToolCall("c1", "go", '{"a": 1}'),),
    )  # fmt: skip
    written = message_json("m", "tiny", answer, most=9)
    call = {"type": "tool_use", "id": "c1", "name": "go", "input": {"a": 1}}
    assert written["content"] == [text("Wait."), call]
    assert written["stop_reason"] == "tool_use"
    assert written["usage"] == {
        "input_tokens": 10,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 30,
        "cache_creation": {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 9,
    }
    for tokens, hour in ((50, 0), (70, 10), (100, 30)):
        told = usage_json(USAGE, hour_tokens=tokens)["cache_creation"]
        assert told == {"ephemeral_5m_input_tokens": 30 - hour, "ephemeral_1h_input_tokens": hour}
    assert usage_json(Usage(5, 0, written_tokens=64))["input_tokens"] == 0


@pytest.mark.parametrize(
    ("reason", "stop", "most", "want"),
    [
        (FinishReason.STOP, "", 9, "end_turn"),
        (FinishReason.STOP, "END", 9, "stop_sequence"),
        (FinishReason.LENGTH, "", 9, "max_tokens"),
        (FinishReason.LENGTH, "", 10, "model_context_window_exceeded"),
    ],
)
def test_reasons(reason: FinishReason, stop: str, most: int, want: str) -> None:
    answer = TextAnswer("", reason, USAGE, 0.0, 0.0, stop=stop)
    written = message_json("m", "tiny", answer, most=most)
    assert (written["stop_reason"], written["stop_sequence"]) == (want, stop or None)
    assert written["content"] == [text("")]


def test_events_of_text_and_calls() -> None:
    events = MessageEvents("m", "tiny", 100)
    told = [events.begin()]
    told += events.add(TextEvent("Wa"))
    told += events.add(TextEvent("it."))
    told += events.add(
        TextEvent(calls=(CallDelta(0, "c1", "go", "{"), CallDelta(0, arguments="}")))
    )
    told += events.end(TextEvent(finish_reason=FinishReason.STOP, usage=USAGE), most=9)
    assert [event["type"].removeprefix("content_block_") for event in told] == [
        "message_start", "start", "delta", "delta", "stop", "start", "delta", "delta", "stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in told if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert encode_named(told[-1]) == b'event: message_stop\ndata: {"type": "message_stop"}\n\n'


def test_errors() -> None:
    told = {"error": {"message": "no", "type": "x", "param": None, "code": "y"}}
    assert error_json(told, 404)["error"] == {"type": "not_found_error", "message": "no"}
    assert error_json(told, 500)["error"]["type"] == "api_error"
    assert error_json(told, 400)["error"]["type"] == "invalid_request_error"
