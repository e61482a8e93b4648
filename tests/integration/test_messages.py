"""Anthropic's client over real compute nodes: the answers are those of chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.fix_rest import rest_cluster, rest_door
from tests.fix_text import write_model_folder
from tests.tool_templates import MARKED

pytestmark = pytest.mark.integration

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}]
ONE: Any = {"type": "tool", "name": "get_weather"}
TALK: list[Any] = [{"role": "user", "content": "How is the weather, please? " * 4}]
GREEDY = {"temperature": 0}


@asynccontextmanager
async def clients(
    folder: Path,
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, openai.AsyncOpenAI]]:
    async with (
        rest_cluster(folder) as (generation, _),
        rest_door(generation) as address,
        anthropic.AsyncAnthropic(base_url=address, api_key="any", max_retries=0) as theirs,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as others,
    ):
        yield theirs, others


async def test_an_answer_is_that_of_chat_completions(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    system: Any = [
        {"type": "text", "text": "Be kind. " * 20, "cache_control": {"type": "ephemeral"}}
    ]
    async with clients(folder) as (client, other):
        first = await client.messages.create(
            model="tiny", max_tokens=40, system=system, messages=TALK, extra_body=GREEDY
        )
        same = await other.chat.completions.create(
            model="tiny",
            max_tokens=40,
            temperature=0,
            messages=[{"role": "system", "content": system[0]["text"]}, *TALK],
            extra_body={"use_cache": False},
        )
        assert first.content[0].text == same.choices[0].message.content
        again = await client.messages.create(
            model="tiny", max_tokens=40, system=system, messages=TALK, extra_body=GREEDY
        )
        assert again.content == first.content
        usage = again.usage
        assert usage.cache_read_input_tokens and usage.cache_read_input_tokens > 200
        total = usage.input_tokens + usage.cache_read_input_tokens
        total += usage.cache_creation_input_tokens or 0
        counted = await client.messages.count_tokens(model="tiny", system=system, messages=TALK)
        assert counted.input_tokens == total == same.usage.prompt_tokens
        async with client.messages.stream(
            model="tiny", max_tokens=40, system=system, messages=TALK, extra_body=GREEDY
        ) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].text == first.content[0].text
        assert streamed.stop_reason == first.stop_reason == "max_tokens"
        assert streamed.usage.output_tokens == 40


async def test_top_k_narrows_the_sampling(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with clients(folder) as (client, _):
        fields: Any = {"model": "tiny", "max_tokens": 30, "messages": TALK}
        greedy = await client.messages.create(**fields, extra_body=GREEDY)
        one = await client.messages.create(**fields, extra_body={"top_k": 1})
        free = await client.messages.create(**fields, extra_body={"temperature": 1.0})
        assert one.content[0].text == greedy.content[0].text != free.content[0].text


async def test_a_turn_with_a_tool(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=MARKED)
    async with clients(folder) as (client, _):
        fields: Any = {"model": "tiny", "max_tokens": 9_000, "tools": TOOLS, "extra_body": GREEDY}
        asked: Any = {"messages": TALK, "tool_choice": ONE}
        whole = await client.messages.create(**fields, **asked)
        (call,) = whole.content
        assert whole.stop_reason == "tool_use" and call.type == "tool_use"
        jsonschema.validate(call.input, SCHEMA)
        async with client.messages.stream(**fields, **asked) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        talk = [
            *TALK,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        after = await client.messages.create(
            model="tiny", max_tokens=4, tools=TOOLS, messages=talk, extra_body=GREEDY
        )
        known = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert (after.usage.cache_read_input_tokens or 0) >= known + whole.usage.output_tokens - 8


async def test_errors_have_the_shape_that_the_client_expects(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    async with clients(folder) as (client, _):
        with pytest.raises(anthropic.NotFoundError, match="no model 'x' is served"):
            await client.messages.create(model="x", max_tokens=4, messages=TALK)
        with pytest.raises(anthropic.BadRequestError, match="'image' is not supported") as caught:
            content: Any = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
            await client.messages.create(
                model="tiny", max_tokens=4, messages=[{"role": "user", "content": content}]
            )
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        with pytest.raises(anthropic.BadRequestError, match=r"cache_control\.ttl"):
            mark: Any = {
                "type": "text",
                "text": "x",
                "cache_control": {"type": "ephemeral", "ttl": "2h"},
            }
            await client.messages.create(
                model="tiny", max_tokens=4, messages=[{"role": "user", "content": [mark]}]
            )
        assert caught.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="the context of model tiny"):
            too_long: Any = [{"role": "user", "content": "long " * 2_000}]
            await client.messages.create(model="tiny", max_tokens=4, messages=too_long)
