"""Fields of OpenAI's and vLLM's APIs over real compute nodes, sent by the openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fix_rest import openai_client, rest_cluster
from tests.fix_text import byte_tokenizer, write_model_folder
from tierkv.compute.node import ComputeNode

pytestmark = pytest.mark.integration

ASK: list[Any] = [{"role": "user", "content": "How is the weather, please? " * 4}]
USUAL: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}


class Rig:
    """A client, and the nodes that answer it."""

    def __init__(self, client: openai.AsyncOpenAI, nodes: list[ComputeNode]) -> None:
        self.client, self.nodes = client, nodes

    async def chat(self, **fields: Any) -> Any:
        """Ask for a chat completion; fields of vLLM go into ``extra``."""
        extra = fields.pop("extra", {}) | {"ignore_eos": True}
        given = USUAL | {"messages": ASK, "extra_body": extra} | fields
        return await self.client.chat.completions.create(**given)

    async def streamed(self, **fields: Any) -> tuple[dict[int, str], Any]:
        """Stream a chat completion; return the text of each choice and the usage."""
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        usage = None
        stream = await self.chat(stream=True, stream_options={"include_usage": True}, **fields)
        async for chunk in stream:
            for choice in chunk.choices:
                assert choice.index not in reasons
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            usage = chunk.usage or usage
        assert reasons.keys() == texts.keys()
        return texts, usage

    async def completions(self, **fields: Any) -> Any:
        extra = fields.pop("extra", {}) | {"ignore_eos": True}
        return await self.client.completions.create(**(USUAL | {"extra_body": extra} | fields))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    folder = write_model_folder(tmp_path)
    async with rest_cluster(folder) as (generation, nodes), openai_client(generation) as client:
        yield Rig(client, nodes)


def token(letter: str) -> int:
    found = byte_tokenizer().token_to_id(letter)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"logit_bias": {"40": 12}},
        {"extra": {"repetition_penalty": 1.9}},
        {"temperature": 1.5, "seed": 3, "extra": {"top_k": 2}},
        {"temperature": 1.5, "seed": 3, "extra": {"min_p": 0.9}},
    ],
)
async def test_sampling_fields_change_answers_the_same_whole_and_streamed(
    rig: Rig, fields: dict[str, Any]
) -> None:
    shaped = await rig.chat(**fields)
    plain = {name: fields[name] for name in ("temperature", "seed") if name in fields}
    assert shaped.choices[0].message.content != (await rig.chat(**plain)).choices[0].message.content
    texts, usage = await rig.streamed(**fields)
    assert texts == {0: shaped.choices[0].message.content}
    assert usage.completion_tokens == shaped.usage.completion_tokens
    uncached = fields | {"extra": fields.get("extra", {}) | {"use_cache": False}}
    assert (await rig.chat(**uncached)).choices[0].message.content == texts[0]


async def test_a_biased_token_comes_always_or_never(rig: Rig) -> None:
    always = await rig.chat(logit_bias={str(token("w")): 100})
    assert always.choices[0].message.content == "w" * 24
    first = (await rig.completions(prompt="ab", max_tokens=8)).choices[0].text
    ids = {str(i): -100 for i in range(5, 261) if i != token("z")}
    only = await rig.completions(prompt="ab", max_tokens=8, logit_bias=ids | {"1": -100})
    assert only.choices[0].text == "zzzzzzzz" != first


async def test_an_answer_does_not_end_before_min_tokens(rig: Rig) -> None:
    """Id 1 ends answers of this model; biased, it would come at once."""
    fields: dict[str, Any] = {"messages": ASK, "logit_bias": {"1": 100}}
    at_once = await rig.client.chat.completions.create(**(USUAL | fields))
    assert at_once.choices[0].message.content == ""
    later = await rig.client.chat.completions.create(
        **(USUAL | fields), extra_body={"min_tokens": 7}
    )
    assert later.usage.completion_tokens == 7 and later.choices[0].finish_reason == "stop"


async def test_choices_have_seeds_of_their_own_and_share_the_prompt(rig: Rig) -> None:
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 5}
    three = await rig.chat(n=3, **fields)
    texts = {choice.index: choice.message.content for choice in three.choices}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
    for number in range(3):
        alone = await rig.chat(**(fields | {"seed": 5 + number}))
        assert alone.choices[0].message.content == texts[number]
        assert alone.usage.prompt_tokens == three.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * 24
    got, usage = await rig.streamed(n=3, **fields)
    assert got == texts
    assert (usage.prompt_tokens, usage.completion_tokens) == (three.usage.prompt_tokens, 72)
    unseeded = await rig.chat(n=4, temperature=1.5)
    assert len({choice.message.content for choice in unseeded.choices}) == 4


async def test_choices_of_several_prompts_stand_in_order(rig: Rig) -> None:
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 6}
    both = await rig.completions(prompt=["ab", "cd"], n=2, **fields)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(both.choices):
        prompt, seed = ["ab", "cd"][index // 2], 5 + index % 2
        alone = await rig.completions(prompt=prompt, **(fields | {"seed": seed}))
        assert alone.choices[0].text == choice.text
    texts = dict.fromkeys(range(4), "")
    async for chunk in await rig.completions(prompt=["ab", "cd"], n=2, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in both.choices]


async def test_a_client_that_leaves_ends_all_choices(rig: Rig) -> None:
    stream = await rig.chat(n=4, max_tokens=2_000, stream=True)
    seen = set()
    async for chunk in stream:
        seen |= {choice.index for choice in chunk.choices if choice.delta.content}
        if len(seen) == 4:
            break
    (node,) = rig.nodes
    assert node.report().load.requests_running
    await stream.close()
    async with asyncio.timeout(20):
        while node.report().load.requests_running:
            await asyncio.sleep(0.01)


async def test_any_json_object(rig: Rig) -> None:
    """A random model closes no brace by itself; the bias ends strings and objects early."""
    ends = {str(token(sign)): 12 for sign in '"}'}
    fields: dict[str, Any] = {"max_tokens": 400, "logit_bias": ends}
    answer = await rig.client.chat.completions.create(
        **(USUAL | {"messages": ASK, "response_format": {"type": "json_object"}} | fields)
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"999": 1}}, None, "token 999"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema"),
        ({"extra": {"best_of": 3}}, "best_of", "not supported"),
        ({"extra": {"min_tokens": 25}}, None, "min_tokens must be in"),
        (
            {"response_format": {"type": "json_object"}, "extra": {"min_tokens": 2}},
            None,
            "can't be used with a JSON schema",
        ),
    ],
)
async def test_errors_name_field_and_cure(
    rig: Rig, fields: dict[str, Any], param: str | None, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await rig.chat(**fields)
    assert caught.value.param == param
