"""Tools in OpenAI's Responses over real compute nodes: calls, their results, and streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.fix_rest import openai_client, rest_cluster
from tests.fix_text import write_model_folder
from tests.integration.test_tools import SCHEMA
from tests.integration.test_tools import TOOLS as CHAT_TOOLS
from tests.tool_templates import LISTED, MARKED

pytestmark = pytest.mark.integration

TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": SCHEMA},
    {"type": "function", "name": "stop"},
]
ONE: dict[str, Any] = {"type": "function", "name": "get_weather"}
QUESTION = "How is the weather, please? " * 4


async def asked(client: openai.AsyncOpenAI, given: Any, **fields: Any) -> Any:
    usual = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_output_tokens": 200}
    return await client.responses.create(input=given, **(usual | fields))


@pytest.mark.parametrize("source", [MARKED, LISTED])
async def test_a_call_and_its_result_equal_those_of_chat(tmp_path: Path, source: str) -> None:
    folder = write_model_folder(tmp_path, chat_template=source)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        first = await asked(client, QUESTION, tool_choice=ONE)
        (call,) = first.output
        assert (first.status, call.type, call.status) == ("completed", "function_call", "completed")
        assert call.name == "get_weather" and call.call_id and call.id.startswith("fc_")
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        after = await asked(client, [result], previous_response_id=first.id, max_output_tokens=8)
        function = {"name": call.name, "arguments": call.arguments}
        talk: list[Any] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "Sunny."},
        ]  # fmt: skip
        chat = await client.chat.completions.create(
            model="tiny", messages=talk, tools=CHAT_TOOLS, temperature=0, max_tokens=8
        )
        assert after.output_text == (chat.choices[0].message.content or "")
        assert after.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
        assert await client.responses.retrieve(first.id) == first
        asked_with = (await client.responses.input_items.list(after.id)).data
        assert [item.type for item in asked_with] == ["function_call_output"]


async def test_a_streamed_call_is_the_whole_call(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        (whole,) = (await asked(client, QUESTION, tool_choice=ONE)).output
        events = [e async for e in await asked(client, QUESTION, tool_choice=ONE, stream=True)]
        kinds = [event.type.removeprefix("response.") for event in events]
        deltas = [e.delta for e in events if e.type.endswith("arguments.delta")]
        assert kinds == [
            "created", "in_progress", "output_item.added",
            *["function_call_arguments.delta"] * len(deltas),
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert len(deltas) > 3 and "".join(deltas) == whole.arguments
        assert [event.sequence_number for event in events] == list(range(len(events)))
        (item,) = events[-1].response.output
        assert (item.name, item.arguments) == (whole.name, whole.arguments)
        assert events[2].item.id == events[-2].item.id == item.id
        assert (events[2].item.status, events[2].item.arguments) == ("in_progress", "")
        assert await client.responses.retrieve(events[-1].response.id) == events[-1].response


async def test_a_conversation_goes_on_after_a_call_that_was_cut_off(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        whole = await asked(client, QUESTION, tool_choice=ONE)
        most = whole.usage.output_tokens - 8
        cut = await asked(client, QUESTION, tool_choice=ONE, max_output_tokens=most)
        (call,) = cut.output
        assert (cut.status, call.status) == ("incomplete", "incomplete")
        for follows in ([], [{"type": "function_call_output", "call_id": call.call_id,
                              "output": "Error: no JSON."}]):  # fmt: skip
            given = [*follows, {"role": "user", "content": "And?"}]
            after = await asked(
                client, given, previous_response_id=cut.id, tool_choice="none", max_output_tokens=8
            )
            assert after.status in ("completed", "incomplete")


async def test_several_calls_are_items_one_after_the_other(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        fields: dict[str, Any] = {"tool_choice": "required", "max_output_tokens": 400}
        whole = await asked(client, QUESTION, **fields)
        events = [e async for e in await asked(client, QUESTION, **fields, stream=True)]
        last = events[-1].response
        assert last.status == whole.status
        assert [(i.name, i.arguments, i.status) for i in last.output] == [
            (i.name, i.arguments, i.status) for i in whole.output
        ]
        done = [event for event in events if event.type == "response.output_item.done"]
        assert [event.output_index for event in done] == list(range(len(last.output)))
        assert [event.item for event in done] == last.output
        if whole.status == "incomplete":
            assert whole.output[-1].status == "incomplete"


async def test_a_conversation_holds_calls_and_results(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        kept = await client.conversations.create()
        first = await asked(client, QUESTION, tool_choice=ONE, conversation=kept.id)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        await client.conversations.items.create(kept.id, items=[result])  # type: ignore[list-item]
        after = await asked(client, "And?", conversation=kept.id, max_output_tokens=8)
        items = [i async for i in client.conversations.items.list(kept.id, order="asc")]
        kinds = ["message", "function_call", "function_call_output", "message", "message"]
        assert [item.type for item in items] == kinds
        assert items[1].call_id == items[2].call_id == call.call_id
        assert items[4].content[0].text == after.output_text
        queued = await asked(client, "Again?", tool_choice=ONE, background=True)
        async with asyncio.timeout(60):
            while (told := await client.responses.retrieve(queued.id)).status != "completed":
                assert told.status in ("queued", "in_progress")
        assert told.output[0].type == "function_call"
