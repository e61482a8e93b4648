"""Items of conversations as clients send them, as they are stored, and as a model reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.contracts import Message, TextAnswer
from tierkv.dbfront.sessions.items import ItemError, parse_items, to_messages, turns_of
from tierkv.dbfront.sessions.session_store import SessionItem, TurnStatus
from tierkv.dbfront.sessions.turn_events import EventWriter
from tierkv.dbfront.sessions.turn_form import AskedTurn, response_json
from tierkv.dbfront.tool_calls.tool import CallDelta, ToolCall, joined_calls
from tierkv.kvcore.request import FinishReason, Usage

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_text_is_a_message_of_the_user() -> None:
    (item,) = parse_items("Hello", response_id="r")
    assert item.item_id.startswith("msg_") and item.response_id == "r" and not item.is_output
    assert item.to_wire() == {
        "id": item.item_id, "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "Hello"}],
    }  # fmt: skip
    assert to_messages([item]) == [Message("user", "Hello")]


def test_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [
        {"role": "developer", "content": parts},
        {"type": "message", "role": "assistant", "status": "incomplete", "id": "msg_of_client",
         "content": [{"type": "output_text", "text": "c", "annotations": [1]},
                     {"type": "refusal", "refusal": "d"}]},
    ]  # fmt: skip
    items = parse_items(said)
    assert to_messages(items) == [Message("system", "ab"), Message("assistant", "cd")]
    assert items[1].body["status"] == "incomplete" and items[1].item_id != "msg_of_client"


def test_calls_join_the_assistant_before_them() -> None:
    said = [
        user("q"),
        {"role": "assistant", "content": "Let me see."},
        CALL,
        CALL | {"call_id": "c2"},
        RESULT,
        {"type": "reasoning", "summary": []},
        CALL | {"call_id": "c3"},
        RESULT | {"call_id": "c3", "output": [{"type": "input_text", "text": "7"}]},
    ]
    one, two, three = (ToolCall(name, "f", "{}") for name in ("c1", "c2", "c3"))
    assert to_messages(parse_items(said)) == [
        Message("user", "q"),
        Message("assistant", "Let me see.", (one, two)),
        Message("tool", "42", tool_call_id="c1"),
        Message("assistant", "", (three,)),
        Message("tool", "7", tool_call_id="c3"),
    ]


def test_a_call_that_was_cut_off_does_not_end_its_conversation() -> None:
    cut = CALL | {"arguments": '{"a": "b', "status": "incomplete"}
    said = [user("q"), cut | {"call_id": "c2"}, cut, RESULT, user("And?")]
    assert to_messages(parse_items(said)) == [
        Message("user", "q"),
        Message("assistant", "", (ToolCall("c1", "f", "{}"),)),
        Message("tool", "42", tool_call_id="c1"),
        Message("user", "And?"),
    ]
    whole = CALL | {"arguments": '{"a": 1}', "status": "incomplete"}
    assert to_messages(parse_items([user("q"), whole]))[1].tool_calls[0].arguments == '{"a": 1}'
    assert ToolCall("c1", "f", "").parsed() == {} and ToolCall("c1", "f", "[]").parsed() is None


@pytest.mark.parametrize(
    ("given_items", "where"),
    [
        (None, ""),
        ({}, ""),
        ([], ""),
        (["x"], "[0]"),
        ([{"type": "reasoning"}], ""),
        ([user("a"), {"type": "web_search_call"}], "[1].type"),
        ([{"role": "tool", "content": "a"}], "[0].role"),
        ([{"role": "user", "content": None}], "[0].content"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "[0].content[0].type"),
        ([user("a") | {"status": "odd"}], "[0].status"),
        ([CALL | {"arguments": {}}], "[0].arguments"),
        ([RESULT | {"output": 5}], "[0].output"),
    ],
)
def test_what_is_no_item_is_refused_with_its_place(given_items: Any, where: str) -> None:
    with pytest.raises(ItemError) as caught:
        parse_items(given_items)
    assert caught.value.where == where and caught.value.error.message


@given(st.lists(st.sampled_from(["user", "assistant", "system", "call"])))
def test_turns_are_the_history_cut_before_users(roles: list[str]) -> None:
    said = [CALL if role == "call" else {"role": role, "content": role} for role in roles]
    items = parse_items(said) if said else []
    turns = turns_of(items)
    assert [item for turn in turns for item in turn] == items
    assert all(turn for turn in turns)
    for turn in turns[1:]:
        assert turn[0].body.get("role") == "user"
        assert all(item.body.get("role") != "user" for item in turn[1:])


class Follower:
    """Rebuilds the output from events, as a client does, and checks their order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.open = False
        self.last: dict[str, Any] = {}
        self.count = 0

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        assert event["sequence_number"] == self.count
        self.count += 1
        self.last = event
        json.dumps(event)
        if kind == "output_item.added":
            assert not self.open and event["output_index"] == len(self.items)
            self.items.append(dict(event["item"]))
            self.open = True
        elif kind == "output_item.done":
            assert self.open and event["output_index"] == len(self.items) - 1
            rebuilt = self.items[-1] | {"status": event["item"]["status"]}
            assert rebuilt == event["item"]
            self.open = False
        elif kind == "content_part.added":
            self.items[-1]["content"] = [dict(event["part"])]
        elif kind == "output_text.delta":
            self.items[-1]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            self.items[-1]["arguments"] += event["delta"]
        if "item_id" in event:
            assert event["item_id"] == self.items[-1]["id"]


@given(
    texts=st.lists(st.text(min_size=1)),
    calls=st.lists(st.lists(st.text(min_size=1), max_size=3), max_size=3),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_events_rebuild_the_response(
    texts: list[str], calls: list[list[str]], reason: FinishReason
) -> None:
    asked = AskedTurn("t", "s", [SessionItem("msg_q", {"type": "message"})], 5.0, "m")
    deltas = [
        delta
        for index, pieces in enumerate(calls)
        for delta in (
            CallDelta(index, f"c{index}", "f"),
            *(CallDelta(index, arguments=piece) for piece in pieces),
        )
    ]
    answer = TextAnswer(
        "".join(texts), reason, Usage(3, 2), 0.0, 0.0, tool_calls=joined_calls(deltas)
    )
    turn, items = asked.answered(answer, 6.0), asked.items(answer)
    response = response_json(turn, items)
    writer, follower = EventWriter(), Follower()
    begun = response_json(asked.open(TurnStatus.IN_PROGRESS, 5.0), ())
    for event in writer.begun(begun):
        follower.take(event)
    for text in texts:
        for event in writer.text(asked, text):
            follower.take(event)
    for delta in deltas:
        for event in writer.call(asked, delta):
            follower.take(event)
    output = [item for item in items if item.is_output]
    for event in writer.ended(asked, output, response):
        follower.take(event)
    statuses = [item["status"] for item in response["output"]]
    assert [item | {"status": s} for item, s in zip(follower.items, statuses, strict=True)] == (
        response["output"]
    )
    assert follower.last["response"] == response and not follower.open
    complete = reason is FinishReason.STOP
    assert follower.last["type"] == f"response.{'completed' if complete else 'incomplete'}"
    assert statuses[-1] == ("completed" if complete else "incomplete")
    assert set(statuses[:-1]) <= {"completed"}
    assert len({item.item_id for item in items}) == len(items)
