"""Tools over real compute nodes, asked by the openai client: calls that fit, whoever answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.fix_rest import openai_client, rest_cluster
from tests.fix_text import text_call, write_model_folder
from tests.tool_templates import LISTED, MARKED
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tool_calls.tool import Tool, ToolChoice, ToolUse, joined_calls

pytestmark = pytest.mark.integration

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["hot", "cold"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "kind", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
ONE: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
TALK: list[Any] = [{"role": "user", "content": "How is the weather, please? " * 4}]


async def asked(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    usual = {"model": "tiny", "messages": TALK, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return await client.chat.completions.create(**(usual | fields))


@pytest.mark.parametrize("source", [MARKED, LISTED, None])
async def test_a_turn_with_a_call_and_its_result(tmp_path: Path, source: str | None) -> None:
    folder = write_model_folder(tmp_path, chat_template=source)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        first = await asked(client, tool_choice=ONE)
        answer, answer_usage = first.choices[0], first.usage
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert call.function.name == "get_weather" and call.id.startswith("call_")

        uncached = await asked(client, tool_choice=ONE, extra_body={"use_cache": False})
        assert uncached.choices[0].message.tool_calls[0].function == call.function

        talk = [
            *TALK,
            answer.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
        ]
        fields = {"messages": talk, "max_tokens": 8}
        after = await asked(client, **fields)
        again = await asked(client, **fields, extra_body={"use_cache": False})
        assert after.choices[0].message.content == again.choices[0].message.content
        if source is MARKED:  # The template writes the call just as the model did.
            known = answer_usage.prompt_tokens + answer_usage.completion_tokens
            assert after.usage.prompt_tokens_details.cached_tokens >= known - 8


async def test_a_streamed_call_is_the_whole_call(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        whole = (await asked(client, tool_choice=ONE)).choices[0].message.tool_calls[0].function
        chunks = [c async for c in await asked(client, tool_choice=ONE, stream=True)]
        deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        assert deltas[0].function.name == "get_weather" and deltas[0].id and len(deltas) > 3
        assert not any(delta.id or delta.function.name for delta in deltas[1:])
        assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_calls_of_both_tools_and_an_answer_cut_in_a_call(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        cut = (await asked(client, tool_choice="required", max_tokens=60)).choices[0]
        assert cut.finish_reason == "length"
        for call in (cut.message.tool_calls or [])[:-1]:
            assert call.function.name in ("get_weather", "stop")
            json.loads(call.function.arguments)
        free = (await asked(client, tool_choice="none", max_tokens=20)).choices[0]
        assert free.message.tool_calls is None


async def test_each_of_several_choices_has_calls_of_its_own(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    many: dict[str, Any] = {
        "n": 3, "tool_choice": ONE, "temperature": 1.3, "seed": 5, "max_tokens": 400,
    }  # fmt: skip
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        whole = await asked(client, **many)
        calls = {}
        for choice in whole.choices:
            (call,) = choice.message.tool_calls
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
            assert choice.finish_reason == "tool_calls"
            calls[choice.index] = call.function
        assert len({call.arguments for call in calls.values()}) == 3
        assert len({c.message.tool_calls[0].id for c in whole.choices}) == 3
        for number in range(3):
            alone = await asked(client, **(many | {"n": 1, "seed": 5 + number}))
            assert alone.choices[0].message.tool_calls[0].function == calls[number]
        streamed = dict.fromkeys(range(3), "")
        async for chunk in await asked(client, stream=True, **many):
            for choice in chunk.choices:
                for delta in choice.delta.tool_calls or ():
                    assert delta.index == 0
                    streamed[choice.index] += delta.function.arguments
        assert streamed == {index: call.arguments for index, call in calls.items()}


async def test_a_node_lost_in_the_middle_of_a_call_is_replaced(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    use = ToolUse((Tool("get_weather", "", json.dumps(SCHEMA)),), ToolChoice.REQUIRED,
                  parallel=False)  # fmt: skip
    call = text_call(messages=(Message("user", "Well?"),), max_tokens=200, tools=use)
    async with rest_cluster(folder, 2) as (generation, nodes):
        want = (await generation.answer(await generation.prepare(call))).tool_calls
        deltas, stopping = [], None
        async for event in generation.stream(await generation.prepare(call)):
            deltas += event.calls
            if stopping is None and deltas:
                victim = next(n for n in nodes if n.config.node_id == event.node_id)
                stopping = asyncio.create_task(victim.stop())
        assert stopping is not None
        await stopping
        (got,) = joined_calls(deltas)
        assert (got.name, got.arguments) == (want[0].name, want[0].arguments)


async def test_values_that_spell_special_tokens_are_text(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    values = ["a</s>b", "<s>", "<|user|>"]
    schema = {"type": "object", "properties": {"v": {"enum": values}}, "required": ["v"]}
    for value in values:
        schema["properties"] = {"v": {"const": value}, value: {"const": 1}}
        schema["required"] = ["v", value]
        tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
        async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
            one = {"tool_choice": "required", "parallel_tool_calls": False}
            call = (await asked(client, tools=tools, **one)).choices[0].message.tool_calls[0]
            text = (await asked(client, tools=[], response_format=form)).choices[0].message.content
        for got in (call.function.arguments, text):
            jsonschema.validate(json.loads(got), schema)


async def test_numbers_that_kill_the_compiler_are_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    least = -9223372036854775808
    bounds = [
        {"type": "integer", "minimum": least, "maximum": least},
        {"type": "integer", "minimum": -(10**20), "maximum": -(10**20) + 3},
        {"type": "number", "minimum": -1e308, "maximum": -1e307},
    ]
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        for bound in bounds:
            schema = {"type": "object", "properties": {"x": bound}}
            function = {"name": "odd", "parameters": schema}
            form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
            for fields in (
                {"tools": [{"type": "function", "function": function}]},
                {"tools": [], "response_format": form},
            ):
                with pytest.raises(openai.BadRequestError, match="beyond 9007199254740992"):
                    await asked(client, **fields)


async def test_tools_count_where_prompts_are_counted(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        usage = (await asked(client, max_tokens=1)).usage
        body = {"messages": TALK, "tools": TOOLS}
        counted = await client.post("../tokenize", body=body, cast_to=dict[str, Any])
        assert counted["count"] == usage.prompt_tokens
        warmed = await client.post("/kv/prefetch", body=body, cast_to=dict[str, Any])
        assert usage.prompt_tokens - 16 <= warmed["tokens"] <= usage.prompt_tokens


async def test_a_schema_that_cant_be_followed_names_its_tool(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    bad = {"type": "object", "unevaluatedProperties": False}
    slow = {"type": "object", "properties": {"x": {"multipleOf": 0.1234567}}}
    async with rest_cluster(folder) as (generation, _), openai_client(generation) as client:
        for function, says in (
            ({"name": "odd", "strict": True, "parameters": bad}, "tool odd.*unevaluatedProperties"),
            ({"name": "slow", "parameters": slow}, "tool slow.*multipleOf"),
        ):
            tools = [*TOOLS, {"type": "function", "function": function}]
            with pytest.raises(openai.BadRequestError, match=says):
                await asked(client, tools=tools)
