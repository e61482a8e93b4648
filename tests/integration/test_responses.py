"""OpenAI's Responses and Conversations at the real HTTP server, asked by the openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fix_text import byte_tokenizer, write_model_folder
from tests.integration.test_http import Door, open_door, until
from tierkv.kvcore import limits
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.request import HitTokens

pytestmark = pytest.mark.integration

SHORT = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "name": "f"}
LONG_ANSWER = {"extra_body": {"ignore_eos": True}}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(write_model_folder(tmp_path)) as door:
        yield door


async def refused(asked: Any) -> tuple[int, str | None, str]:
    """Status, code and message of a refusal."""
    with pytest.raises(openai.APIStatusError) as caught:
        await asked
    error = caught.value
    return error.status_code, error.code, error.message


async def test_a_response_has_openais_form(door: Door) -> None:
    door.front.node.hits = HitTokens(l1=2, l3=3)
    told = await door.client.responses.create(
        input="Tell me",
        instructions="Be brief",
        metadata={"a": "b"},
        user="u",
        **SHORT,
        **LONG_ANSWER,
    )
    assert (told.object, told.status, told.model) == ("response", "incomplete", "tiny")
    assert told.incomplete_details is not None
    assert told.incomplete_details.reason == "max_output_tokens"
    assert told.output_text and told.instructions == "Be brief" and told.metadata == {"a": "b"}
    (item,) = told.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert told.usage is not None and told.usage.output_tokens == 12
    assert told.usage.input_tokens_details.cached_tokens == 5
    assert told.usage.total_tokens == told.usage.input_tokens + 12
    again = await door.client.responses.retrieve(told.id)
    assert again == told
    asked = await door.client.responses.input_items.list(told.id)
    assert [each.content[0].text for each in asked.data] == ["Tell me"]


async def test_a_following_response_equals_a_chat_with_the_whole_history(door: Door) -> None:
    history: list[Any] = [{"role": "system", "content": "Be brief"}]
    previous = None
    for question in ("Tell me", "And then?", "Why?"):
        told = await door.client.responses.create(
            input=question, instructions="Be brief", previous_response_id=previous, **SHORT,
            **LONG_ANSWER,
        )  # fmt: skip
        history.append({"role": "user", "content": question})
        prompt = door.front.node.seen[-1].token_ids
        chat = await door.client.chat.completions.create(
            model="tiny", messages=history, max_tokens=12, temperature=0, **LONG_ANSWER
        )
        assert door.front.node.seen[-1].token_ids == prompt
        assert chat.choices[0].message.content == told.output_text
        assert told.usage is not None and chat.usage is not None
        assert told.usage.input_tokens == chat.usage.prompt_tokens
        history.append({"role": "assistant", "content": told.output_text})
        previous = told.id
    assert told.previous_response_id is not None


async def test_two_responses_may_follow_one(door: Door) -> None:
    create = door.client.responses.create
    first = await create(input="Tell me", **SHORT)
    one, other = await asyncio.gather(
        *(create(input=text, previous_response_id=first.id, **SHORT) for text in ("A?", "B?"))
    )
    third = await create(input="C?", previous_response_id=other.id, **SHORT)
    prompt = prompt_of(door)
    assert "B?" in prompt and "A?" not in prompt and first.output_text in prompt
    assert {one.previous_response_id, other.previous_response_id} == {first.id}
    assert third.previous_response_id == other.id


def prompt_of(door: Door) -> str:
    """Text of the last prompt; one token is one byte."""
    tokens = list(door.front.node.seen[-1].token_ids)
    return byte_tokenizer().decode(tokens, skip_special_tokens=False)


async def test_instructions_are_not_carried_over(door: Door) -> None:
    first = await door.client.responses.create(input="a", instructions="SYS1", **SHORT)
    await door.client.responses.create(
        input=[{"role": "developer", "content": "DEV"}, {"role": "user", "content": "b"}],
        previous_response_id=first.id, instructions="SYS2", **SHORT,
    )  # fmt: skip
    assert "SYS2" in prompt_of(door) and "SYS1" not in prompt_of(door)


async def test_a_stream_has_openais_events_and_the_same_answer(door: Door) -> None:
    whole = await door.client.responses.create(input="Tell me", **SHORT, **LONG_ANSWER)
    events = []
    stream = await door.client.responses.create(
        input="Tell me", stream=True, **SHORT, **LONG_ANSWER
    )
    async for event in stream:
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    assert events[0].response.status == "in_progress" and events[0].response.id == last.id
    assert await door.client.responses.retrieve(last.id) == last
    stop = {"extra_body": {"stop": [whole.output_text[4:6]]}}
    async with door.client.responses.stream(input="Tell me", **SHORT, **stop) as helper:
        final = await helper.get_final_response()
    assert final.status == "completed" and final.completed_at is not None
    assert whole.output_text.startswith(final.output_text)


async def test_a_stream_of_a_reply_that_breaks_says_so(door: Door) -> None:
    door.front.node.die_after, door.front.node.stays_dead = 3, True
    kinds = []
    stream = await door.client.responses.create(
        input="Tell me", stream=True, **SHORT, **LONG_ANSWER
    )
    async for event in stream:
        kinds.append(event.type)
    assert kinds[-1] == "response.failed"
    assert event.response.error.code == "server_error"
    assert (await refused(door.client.responses.retrieve(event.response.id)))[0] == 404


async def test_a_client_that_closes_its_stream_leaves_nothing(door: Door) -> None:
    conversation = await door.client.conversations.create()
    door.front.node.gate.clear()
    stream = await door.client.responses.create(
        input="Tell me", stream=True, conversation=conversation.id, **SHORT, **LONG_ANSWER
    )
    async for event in stream:
        if event.type == "response.created":
            break
    await stream.close()
    await until(lambda: bool(door.front.node.cancelled))
    door.front.node.gate.set()
    items = await door.client.conversations.items.list(conversation.id)
    assert items.data == []
    told = await door.client.responses.create(input="b", conversation=conversation.id, **SHORT)
    assert told.status == "completed" or told.status == "incomplete"


async def test_json_of_a_schema(door: Door) -> None:
    told = await door.client.responses.create(
        input="x",
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        **SHORT,
    )
    assert json.loads(door.front.node.seen[-1].guide) == {"type": "object"}
    assert told.text is not None and told.text.format is not None
    assert told.text.format.type == "json_schema"


async def test_what_is_not_stored_is_not_found(door: Door) -> None:
    first = await door.client.responses.create(input="a", **SHORT)
    told = await door.client.responses.create(
        input="b", store=False, previous_response_id=first.id, **SHORT
    )
    assert "a\n" in prompt_of(door)
    status, code, message = await refused(door.client.responses.retrieve(told.id))
    assert (status, code) == (404, "not_found") and told.id in message
    follow = door.client.responses.create(input="c", previous_response_id=told.id, **SHORT)
    assert (await refused(follow))[0] == 404


async def test_a_deleted_response_and_what_follows_it(door: Door) -> None:
    first = await door.client.responses.create(input="a", **SHORT)
    second = await door.client.responses.create(input="b", previous_response_id=first.id, **SHORT)
    await door.client.responses.delete(first.id)
    assert (await refused(door.client.responses.retrieve(first.id)))[0] == 404
    assert (await refused(door.client.responses.delete(first.id)))[0] == 404
    assert (await door.client.responses.retrieve(second.id)).id == second.id
    follow = door.client.responses.create(input="c", previous_response_id=second.id, **SHORT)
    status, _, message = await refused(follow)
    assert status == 404 and "not whole" in message


async def test_a_conversation_is_continued(door: Door) -> None:
    client = door.client
    conversation = await client.conversations.create(
        metadata={"topic": "kettles"},
        items=[{"type": "message", "role": "user", "content": "I like tea"}],
    )
    assert conversation.id.startswith("conv_") and conversation.metadata == {"topic": "kettles"}
    told = await client.responses.create(input="Why?", conversation=conversation.id, **SHORT)
    assert told.conversation is not None and told.conversation.id == conversation.id
    await client.responses.create(input="And?", conversation={"id": conversation.id}, **SHORT)
    assert prompt_of(door).index("I like tea") < prompt_of(door).index("Why?")
    items = [
        item
        async for item in client.conversations.items.list(conversation.id, order="asc", limit=2)
    ]
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert [item.content[0].text for item in items[:2]] == ["I like tea", "Why?"]
    one = await client.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)
    assert one == items[1]
    newest = await client.conversations.items.list(conversation.id, limit=1)
    assert newest.data == [items[-1]] and newest.has_more
    await client.conversations.items.delete(items[1].id, conversation_id=conversation.id)
    gone = client.conversations.items.retrieve(items[1].id, conversation_id=conversation.id)
    assert (await refused(gone))[0] == 404
    added = await client.conversations.items.create(
        conversation.id, items=[{"role": "user", "content": "Last"}]
    )
    assert added.data[0].content[0].text == "Last"
    changed = await client.conversations.update(conversation.id, metadata={"topic": "pots"})
    assert changed.metadata == {"topic": "pots"}
    branch = await client.responses.create(input="Else?", previous_response_id=told.id, **SHORT)
    assert "And?" not in prompt_of(door) and "I like tea" in prompt_of(door)
    deleted = await client.conversations.delete(conversation.id)
    assert deleted.deleted and deleted.object == "conversation.deleted"
    assert (await refused(client.conversations.retrieve(conversation.id)))[0] == 404
    assert (await refused(client.responses.retrieve(told.id)))[0] == 404
    follow = client.responses.create(input="c", previous_response_id=branch.id, **SHORT)
    assert (await refused(follow))[0] == 404


async def test_turns_of_one_conversation_do_not_overlap(door: Door) -> None:
    conversation = await door.client.conversations.create()
    texts = [f"Q{number}" for number in range(6)]
    await asyncio.gather(
        *(
            door.client.responses.create(input=text, conversation=conversation.id, **SHORT)
            for text in texts
        )
    )
    items = await door.client.conversations.items.list(conversation.id, order="asc", limit=100)
    assert [item.role for item in items.data] == ["user", "assistant"] * 6
    assert sorted(item.content[0].text for item in items.data[::2]) == texts
    prompt = prompt_of(door)
    assert [prompt.count(text) for text in texts] == [1] * 6  # The last one has read all others.


async def test_conversations_are_found_by_metadata(door: Door) -> None:
    for number in range(3):
        await door.client.conversations.create(metadata={"n": str(number), "kind": "x"})
    found = (await door.raw("GET", "/v1/conversations?metadata[kind]=x&limit=2")).json()
    assert [each["metadata"]["n"] for each in found["data"]] == ["2", "1"] and found["has_more"]
    more = (await door.raw("GET", f"/v1/conversations?after={found['last_id']}")).json()
    assert [each["metadata"]["n"] for each in more["data"]] == ["0"] and not more["has_more"]
    none = (await door.raw("GET", "/v1/conversations?metadata[kind]=y")).json()
    assert none["data"] == []
    for query in ("after=nope", "limit=0", "limit=x"):
        refusal = await door.raw("GET", f"/v1/conversations?{query}")
        assert refusal.status == (404 if query.startswith("after") else 400)


async def test_a_background_response_is_polled(door: Door) -> None:
    door.front.node.gate.clear()
    queued = await door.client.responses.create(input="Tell me", background=True, **SHORT)
    assert queued.status == "queued" and queued.background and queued.output == []
    told = queued
    async with asyncio.timeout(10):
        while told.status != "in_progress":
            told = await door.client.responses.retrieve(queued.id)
        door.front.node.gate.set()
        while told.status == "in_progress":
            told = await door.client.responses.retrieve(queued.id)
    assert told.status in ("completed", "incomplete") and told.output_text
    assert told.created_at == queued.created_at
    assert told == await door.client.responses.cancel(queued.id)
    follow = await door.client.responses.create(input="b", previous_response_id=told.id, **SHORT)
    assert follow.usage is not None and told.usage is not None
    assert follow.usage.input_tokens > told.usage.input_tokens


async def test_a_background_response_is_cancelled(door: Door) -> None:
    conversation = await door.client.conversations.create()
    door.front.node.gate.clear()
    queued = await door.client.responses.create(
        input="Tell me", background=True, conversation=conversation.id, **SHORT
    )
    ended = await door.client.responses.cancel(queued.id)
    assert ended.status == "cancelled" and ended.error is None
    door.front.node.gate.set()
    await until(lambda: not door.front.generation.live)
    assert (await door.client.responses.retrieve(queued.id)).status == "cancelled"
    assert (await door.client.conversations.items.list(conversation.id)).data == []
    follow = door.client.responses.create(input="b", previous_response_id=queued.id, **SHORT)
    assert (await refused(follow))[0] == 400
    deleted = await door.client.responses.create(input="x", background=True, **SHORT)
    await door.client.responses.delete(deleted.id)
    plain = await door.client.responses.create(input="y", **SHORT)
    status, _, message = await refused(door.client.responses.cancel(plain.id))
    assert status == 400 and "background" in message


async def test_a_broken_stream_of_a_background_response_is_resumed(door: Door) -> None:
    fields: dict[str, Any] = {"input": "Tell me", "background": True, **SHORT, **LONG_ANSWER}
    whole = await door.client.responses.create(input="Tell me", **SHORT, **LONG_ANSWER)
    door.front.node.gate.clear()
    stream = await door.client.responses.create(stream=True, **fields)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 2:
            await stream.close()  # The connection breaks; the answer goes on.
            break
    response_id = seen[0].response.id
    resumed = await door.client.responses.retrieve(
        response_id, stream=True, starting_after=seen[-1].sequence_number
    )
    door.front.node.gate.set()
    seen += [event async for event in resumed]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.incomplete"
    assert seen[-1].response.output_text == whole.output_text
    told = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert told == whole.output_text
    again = [e async for e in await door.client.responses.retrieve(response_id, stream=True)]
    assert again == seen
    last = len(seen) - 2
    (end,) = [
        e async for e in await door.client.responses.retrieve(
            response_id, stream=True, starting_after=last
        )
    ]  # fmt: skip
    assert end == seen[-1]
    for behind in (len(seen) - 1, len(seen) + 7):
        reply = await door.raw(
            "GET", f"/v1/responses/{response_id}?stream=true&starting_after={behind}"
        )
        assert reply.status == 200 and b"data:" not in reply.body
    assert await door.client.responses.retrieve(response_id) == end.response
    silent = await door.client.responses.create(**fields)
    for asked in (silent.id, whole.id):
        status, _, message = await refused(door.client.responses.retrieve(asked, stream=True))
        assert status == 400 and "background and stream" in message
    reply = await door.raw("GET", f"/v1/responses/{response_id}?starting_after=3")
    assert reply.status == 400 and "needs stream" in reply.json()["error"]["message"]
    reply = await door.raw("GET", f"/v1/responses/{response_id}?stream=true&starting_after=-5")
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, "starting_after")
    assert error["message"].startswith("starting_after: Input should be greater")
    await door.client.responses.delete(response_id)
    status, _, _ = await refused(door.client.responses.retrieve(response_id, stream=True))
    assert status == 404


async def test_a_stream_of_a_cancelled_response_ends(door: Door) -> None:
    door.front.node.gate.clear()
    stream = await door.client.responses.create(
        input="Tell me", background=True, stream=True, **SHORT
    )
    kinds = []
    async for event in stream:
        kinds.append(event.type)
        if event.type == "response.in_progress":
            await door.client.responses.cancel(event.response.id)
    assert kinds[-1] == "response.cancelled"


async def test_a_background_response_that_breaks_has_failed(door: Door) -> None:
    door.front.node.die_after, door.front.node.stays_dead = 1, True
    told = await door.client.responses.create(input="Tell me", background=True, **SHORT)
    async with asyncio.timeout(20):
        while told.status in ("queued", "in_progress"):
            told = await door.client.responses.retrieve(told.id)
    assert told.status == "failed"
    assert told.error is not None and told.error.code == "server_error"


async def test_a_history_that_does_not_fit(door: Door) -> None:
    conversation = await door.client.conversations.create()
    most = door.front.node.info.models[0].context_tokens
    for number in range(20):
        await door.client.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": f"<{number}>" + "x" * (most // 8)}]
        )
    asked = {"input": "Why?", "conversation": conversation.id} | SHORT
    status, code, _ = await refused(door.client.responses.create(**asked))
    assert (status, code) == (400, "context_length_exceeded")
    told = await door.client.responses.create(truncation="auto", **asked)
    assert told.truncation == "auto"
    kept = [number for number in range(20) if f"<{number}>" in prompt_of(door)]
    assert kept == list(range(kept[0], 20)) and len(kept) >= 5
    too_long = {"input": "x" * most, "truncation": "auto"} | SHORT
    assert (await refused(door.client.responses.create(**too_long)))[1] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools"),
        ({"input": "x", "tools": [TOOL], "tool_choice": TOOL | {"name": "g"}}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "include": ["all"]}, "include"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata"),
        ({"input": "x", "metadata": {"a" * 65: "b"}}, "metadata"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "x", "metadata": []}, "metadata"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "conversation": "a", "previous_response_id": "b"}, "previous_response_id"),
        ({"input": "x", "conversation": "a", "store": False}, "store"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "conversation": "a b"}, "conversation.id"),
        ({"input": "x", "conversation": {"id": 5}}, "conversation.id"),
        ({"input": "x", "conversation": 5}, "conversation"),
        ({"input": "x", "max_tool_calls": 0}, "max_tool_calls"),
        ({"input": "x", "max_tool_calls": "two"}, "max_tool_calls"),
        ({"input": "x", "service_tier": "odd"}, "service_tier"),
        ({"input": "x", "messages": [{"role": "user", "content": "y"}]}, "messages"),
        ({"input": "x", "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"input": "x", "stop": [""]}, "stop"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a",
                                            "schema": {"not": {}}}}}, "text.format"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
         "input"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_name(
    door: Door, given: dict[str, Any], field: str
) -> None:
    reply = await door.raw("POST", "/v1/responses", json.dumps(given).encode())
    error = reply.json()["error"]
    assert reply.status == 400 and field in (error["param"] or error["message"]), error
    assert error["type"] == "invalid_request_error"
    assert not door.front.node.seen


async def test_neutral_values_are_accepted(door: Door) -> None:
    told = await door.client.responses.create(
        input="x", tools=[], tool_choice="auto", parallel_tool_calls=False, reasoning={},
        include=["reasoning.encrypted_content"], top_logprobs=0, service_tier="auto", **SHORT,
    )  # fmt: skip
    assert told.status in ("completed", "incomplete")


async def test_a_request_is_counted_without_a_model(door: Door) -> None:
    first = await door.client.responses.create(input="Tell me", **SHORT)
    fields = {"previous_response_id": first.id, "instructions": "Be brief.", "input": "And then?"}
    counted = await door.client.responses.input_tokens.count(model=SHORT["model"], **fields)
    asked = len(door.front.node.seen)
    told = await door.client.responses.create(**fields, **SHORT)
    assert told.usage is not None and counted.input_tokens == told.usage.input_tokens
    assert len(door.front.node.seen) == asked + 1
    again = await door.client.responses.create(input="x", max_tool_calls=3, **SHORT)
    assert again.max_tool_calls == 3


async def test_an_unknown_conversation_is_named(door: Door) -> None:
    body = json.dumps({"input": "x", "conversation": "conv_x"}).encode()
    reply = await door.raw("POST", "/v1/responses", body)
    assert (reply.status, reply.json()["error"]["param"]) == (404, "conversation")


async def test_unknown_ids_are_not_found(door: Door) -> None:
    client = door.client
    for asked in (
        client.responses.retrieve("resp_x"),
        client.responses.delete("resp_x"),
        client.responses.cancel("resp_x"),
        client.conversations.retrieve("conv_x"),
        client.conversations.delete("conv_x"),
        client.conversations.update("conv_x", metadata={}),
        client.responses.create(input="x", conversation="conv_x", **SHORT),
        client.responses.create(input="x", previous_response_id="resp_x", **SHORT),
        client.responses.create(input="x", background=True, conversation="conv_x", **SHORT),
    ):
        status, code, _ = await refused(asked)
        assert (status, code) == (404, "not_found")
    first = await client.responses.create(input="x", **SHORT)
    session = "sess_"  # The session of a response is no conversation.
    assert first.conversation is None
    assert (await refused(client.conversations.retrieve(session)))[0] == 404


async def test_another_tenants_ids_are_unknown(tmp_path: Path) -> None:
    keys = {"key-1": "one", "key-2": "two"}
    async with open_door(write_model_folder(tmp_path), api_keys=keys) as door:
        other = door.client.with_options(api_key="key-2")
        told = await door.client.responses.create(input="x", background=True, **SHORT)
        kept = await door.client.conversations.create(items=[{"role": "user", "content": "x"}])
        (item,) = (await door.client.conversations.items.list(kept.id)).data
        for asked in (
            other.responses.retrieve(told.id),
            other.responses.cancel(told.id),
            other.responses.delete(told.id),
            other.responses.create(input="x", previous_response_id=told.id, **SHORT),
            other.responses.create(input="x", conversation=kept.id, **SHORT),
            other.conversations.retrieve(kept.id),
            other.conversations.delete(kept.id),
            other.conversations.items.retrieve(item.id, conversation_id=kept.id),
            other.conversations.items.create(kept.id, items=[{"role": "user", "content": "x"}]),
        ):
            assert (await refused(asked))[:2] == (404, "not_found")
        mine = await other.conversations.create()
        foreign = other.conversations.items.retrieve(item.id, conversation_id=mine.id)
        assert (await refused(foreign))[0] == 404
        assert (await door.client.conversations.items.list(kept.id)).data == [item]


async def test_an_expired_conversation_is_gone(door: Door) -> None:
    body = json.dumps({"ttl_s": 1.0}).encode()
    made = (await door.raw("POST", "/v1/conversations", body)).json()
    assert made["expires_at"] is not None
    path = f"/v1/conversations/{made['id']}"
    async with asyncio.timeout(10):
        while (await door.raw("GET", path)).status == 200:
            pass
    assert (await refused(door.client.conversations.retrieve(made["id"])))[0] == 404
    ask = door.client.responses.create(input="x", conversation=made["id"], **SHORT)
    assert (await refused(ask))[0] == 404


async def test_bounds(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSION_ITEMS", 3)
    monkeypatch.setattr(limits, "MAX_QUEUE_ENTRIES", 0)
    full = await door.client.conversations.create(items=[{"role": "user", "content": "x"}] * 2)
    ask = door.client.responses.create(input="x", conversation=full.id, **SHORT)
    assert (await refused(ask))[:2] == (400, "session_full")
    many = door.client.conversations.items.create(
        full.id, items=[{"role": "user", "content": "x"}] * 21
    )
    assert (await refused(many))[0] == 400
    later = door.client.responses.create(input="x", background=True, **SHORT)
    assert (await refused(later))[0] == 429


async def test_the_conversation_is_the_affinity_of_its_turns(door: Door) -> None:
    conversation = await door.client.conversations.create()
    await door.client.responses.create(input="x", conversation=conversation.id, **SHORT)
    request = door.front.node.seen[-1]
    assert request.session_id == conversation.id
    assert request.hint is not None and request.hint.next_turn
    first = await door.client.responses.create(input="x", **SHORT)
    named = door.front.node.seen[-1].session_id
    assert door.front.node.seen[-1].hint is None and str(named).startswith("sess_")
    await door.client.responses.create(input="y", previous_response_id=first.id, **SHORT)
    assert door.front.node.seen[-1].session_id == named
    assert RequestId(request.request_id)
