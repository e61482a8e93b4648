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
UNHELD = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
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
    ids = {str(i): -100 for i in range(261) if i != token("z")}
    only = await rig.completions(prompt="ab", max_tokens=8, logit_bias=ids)
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
    ends = {str(token('"')): 100, str(token("}")): 50}
    fields: dict[str, Any] = {"max_tokens": 400, "logit_bias": ends}
    answer = await rig.client.chat.completions.create(
        **(USUAL | {"messages": ASK, "response_format": {"type": "json_object"}} | fields)
    )
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].message.content
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


async def test_logprobs_of_a_chat_whole_and_streamed(rig: Rig) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    whole = await rig.chat(**fields)
    choice = whole.choices[0]
    content = choice.logprobs.content
    assert len(content) == whole.usage.completion_tokens == 24
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == (
        choice.message.content
    )
    for one in content:
        assert len(one.top_logprobs) == 3
        best = one.top_logprobs[0]  # Greedy answers take the most likely token.
        assert (best.token, best.logprob, best.bytes) == (one.token, one.logprob, one.bytes)
        numbers = [other.logprob for other in one.top_logprobs]
        assert numbers == sorted(numbers, reverse=True) and numbers[0] < 0
    told = []
    async for chunk in await rig.chat(stream=True, **fields):
        for part in chunk.choices:
            told += part.logprobs.content if part.logprobs else []
    assert [one.token for one in told] == [one.token for one in content]
    got = [other.logprob for one in told for other in one.top_logprobs]
    want = [other.logprob for one in content for other in one.top_logprobs]
    assert got == pytest.approx(want, abs=1e-4)
    plain = await rig.chat()
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.content == choice.message.content


async def test_logprobs_of_a_response_are_those_of_a_chat(rig: Rig) -> None:
    chat = (await rig.chat(logprobs=True, top_logprobs=3)).choices[0]
    fields: dict[str, Any] = {
        "model": "tiny", "temperature": 0, "max_output_tokens": 24, "input": ASK, "top_logprobs": 3,
        "include": ["message.output_text.logprobs"], "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = await rig.client.responses.create(**fields)
    (part,) = whole.output[0].content
    assert part.text == chat.message.content and whole.top_logprobs == 3
    assert [one.bytes for one in part.logprobs] == [one.bytes for one in chat.logprobs.content]
    assert {len(one.top_logprobs) for one in part.logprobs} == {3}
    kept = await rig.client.responses.retrieve(whole.id)
    assert kept.output == whole.output
    told: list[str] = []
    async for event in await rig.client.responses.create(stream=True, **fields):
        if event.type == "response.output_text.delta":
            told += [one.token for one in event.logprobs]
        if event.type == "response.output_text.done":
            assert [one.token for one in event.logprobs] == told
    assert told == [one.token for one in part.logprobs]
    follows = await rig.client.responses.create(
        model="tiny", input="And?", previous_response_id=whole.id, max_output_tokens=4
    )
    assert follows.output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="needs 'message"):
        await rig.client.responses.create(**(fields | {"include": []}))


async def test_logprobs_are_of_the_model_not_of_the_sampling(rig: Rig) -> None:
    bias = {str(token("w")): 100}
    forced = await rig.chat(logprobs=True, top_logprobs=1, logit_bias=bias, max_tokens=1)
    free = await rig.chat(logprobs=True, top_logprobs=20, max_tokens=1)
    (one,), (other,) = (answer.choices[0].logprobs.content for answer in (forced, free))
    assert (one.token, one.bytes) == ("w", [ord("w")])
    assert one.top_logprobs[0].token == other.token != "w"
    assert one.top_logprobs[0].logprob == pytest.approx(other.logprob, abs=1e-4)
    assert one.logprob < other.logprob


async def test_logprobs_of_completions_have_columns_and_offsets(rig: Rig) -> None:
    fields: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2, "logprobs": 2, "max_tokens": 8}
    whole = await rig.completions(**fields)
    for choice in whole.choices:
        told = choice.logprobs
        lengths = set(map(len, (told.tokens, told.token_logprobs, told.top_logprobs)))
        assert lengths == {len(told.text_offset)} == {8}
        for text, offset in zip(told.tokens, told.text_offset, strict=True):
            assert text[:1] in ("\ufffd", choice.text[offset : offset + 1])
        assert told.text_offset == sorted(told.text_offset)
        for text, own, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert top[text] == own and len(top) <= 3
    columns: dict[int, list[Any]] = {index: [] for index in range(4)}
    async for chunk in await rig.completions(stream=True, **fields):
        for choice in chunk.choices:
            if choice.logprobs:
                columns[choice.index] += zip(
                    choice.logprobs.tokens, choice.logprobs.text_offset, strict=True
                )
    for choice in whole.choices:
        told = choice.logprobs
        assert columns[choice.index] == list(zip(told.tokens, told.text_offset, strict=True))
    chosen = await rig.completions(prompt="ab", logprobs=0, max_tokens=3)
    assert [len(top) for top in chosen.choices[0].logprobs.top_logprobs] == [1, 1, 1]


async def test_logprobs_are_never_answers_of_earlier_calls(rig: Rig) -> None:
    kept: dict[str, Any] = {"extra": {"answer_cache": "tenant"}}
    for _ in range(2):
        last = await rig.chat(**kept)
    assert last.usage.prompt_tokens_details.model_extra["cached_answers"] == 1
    told = await rig.chat(logprobs=True, **kept)
    assert "cached_answers" not in told.usage.prompt_tokens_details.model_extra
    assert len(told.choices[0].logprobs.content) == 24
    shaped = await rig.chat(presence_penalty=2.0, **kept)
    assert "cached_answers" not in shaped.usage.prompt_tokens_details.model_extra


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "token 999"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids as keys"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"extra": {"best_of": 3}}, "best_of", "not supported"),
        ({"extra": {"min_tokens": 25}}, "min_tokens", "min_tokens must be in"),
        (
            {"response_format": {"type": "json_object"}, "extra": {"min_tokens": 2}},
            "min_tokens",
            "can't be used with a JSON schema",
        ),
        ({"stop": [""]}, "stop", "must have 1 to 256 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 are allowed"),
        ({"stop": ["a"], "response_format": {"type": "json_object"}}, "stop", "JSON schema"),
        ({"response_format": UNHELD}, "response_format", "can't be held"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"service_tier": 5}, "service_tier", "'auto', 'default'"),
        ({"extra": {"instructions": "Be brief."}}, "instructions", "not supported"),
        ({"extra": {"previous_response_id": "resp_a"}}, "previous_response_id", "not supported"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "has no content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "has no content"),
        (
            {"messages": [*ASK, {"role": "tool", "content": "x"}]},
            "messages[1].tool_call_id",
            "no tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages.0.name", "string"),
    ],
)
async def test_errors_name_field_and_cure(
    rig: Rig, fields: dict[str, Any], param: str | None, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await rig.chat(**fields)
    assert caught.value.param == param
