"""From text to text over fake nodes: checks, stop strings, accounts."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fix_meta import join, leave
from tests.fix_scheduler import make_info
from tests.fix_text import Front, running_front, text_call, text_model, write_model_folder
from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest
from tierkv.dbfront.contracts import EncodedAhead, Message, TextAnswer, TextCall
from tierkv.kvcore.errors import (
    ContextTooLongError,
    FeatureNotSupportedError,
    NodeLostError,
    NoNodeError,
    TierKVError,
    UdfArgumentError,
    UnknownModelError,
)
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import OPTIONAL_FIELDS, FinishReason, HitTokens
from tierkv.metaserver.client import Namespace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


async def answer(front: Front, **changes: object) -> TextAnswer:
    call = text_call(**{"prompt": "Say something", "max_tokens": 40, "ignore_eos": True} | changes)
    return await front.generation.answer(await front.generation.prepare(call))


async def test_an_answer_is_its_stream_gathered(folder: Path) -> None:
    async with running_front(folder) as front:
        whole = await answer(front)
        assert len(whole.text) == 40
        assert whole.finish_reason is FinishReason.LENGTH
        assert whole.usage.prompt_tokens == 14
        assert whole.ttft_s > 0
        prepared = await front.generation.prepare(
            text_call(prompt="Say something", max_tokens=40, ignore_eos=True)
        )
        parts = [event async for event in front.generation.stream(prepared)]
        assert "".join(part.text for part in parts) == whole.text
        assert whole.model == prepared.model.name
        assert [p.finish_reason for p in parts if p.finish_reason] == [FinishReason.LENGTH]


async def test_a_statements_call_has_the_nodes_time_to_first_token(folder: Path) -> None:
    async with running_front(folder) as front:
        assert (await answer(front)).ttft_s == 0.002  # what the node says, without the wait here
        chat = await answer(front, origin="chat.completions")
        assert chat.ttft_s > 0
        assert chat.ttft_s != 0.002


async def test_a_stop_string_cuts_the_answer_and_the_work(folder: Path) -> None:
    async with running_front(folder) as front:
        front.node.hits = HitTokens(l1=3)
        whole = await answer(front)
        stop = whole.text[10:13]
        cut = await answer(front, stop=(stop,))
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.usage.completion_tokens == whole.text.index(stop) + 3
        assert cut.usage.hit_tokens.l1 == 3
        assert not front.node.running


async def test_a_stop_string_in_the_prefill_stage_needs_no_decode_node(folder: Path) -> None:
    model = text_model(folder)
    infos = [
        make_info("p", role=NodeRole.PREFILL, models=(model,)),
        make_info("d", role=NodeRole.DECODE, models=(model,)),
    ]
    async with running_front(folder, *infos) as front:
        whole = await answer(front)
        decoded = len(front.nodes[NodeId("d")].seen)
        cut = await answer(front, stop=(whole.text[0],))
        assert (cut.text, cut.finish_reason) == ("", FinishReason.STOP)
        assert len(front.nodes[NodeId("d")].seen) == decoded


async def test_a_held_back_beginning_of_a_stop_string_comes_at_the_end(folder: Path) -> None:
    async with running_front(folder) as front:
        whole = await answer(front)
        kept = await answer(front, stop=(whole.text[-2:] + "!",))
        assert kept.text == whole.text
        assert kept.finish_reason is FinishReason.LENGTH


async def test_without_max_tokens_the_rest_of_the_context_is_used(folder: Path) -> None:
    model = text_model(folder, context_tokens=64)
    async with running_front(folder, make_info(models=(model,))) as front:
        whole = await answer(front, max_tokens=None)
        assert whole.usage.prompt_tokens + whole.usage.completion_tokens == 64


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [("x" * 60, 10, ("61", "10", "64")), ("x" * 64, None, ("65", "at least 1", "64"))],
)
async def test_too_long_is_refused_with_the_numbers(
    folder: Path, prompt: str, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    model = text_model(folder, context_tokens=64)
    async with running_front(folder, make_info(models=(model,))) as front:
        with pytest.raises(ContextTooLongError) as caught:
            await answer(front, prompt=prompt, max_tokens=max_tokens)
        assert all(number in caught.value.message for number in numbers)
        assert not front.node.seen


async def test_models_are_found_by_name_or_by_being_the_only_one(folder: Path) -> None:
    one, two = text_model(folder, "one"), text_model(folder, "two")
    async with running_front(folder, make_info(models=(one, two))) as front:
        assert (await front.generation.prepare(text_call(prompt="x", model="two"))).model == two
        with pytest.raises(UnknownModelError) as caught:
            await answer(front, model="three")
        assert caught.value.hint == "The served models are one, two."
        with pytest.raises(UnknownModelError, match="several") as ambiguous:
            await answer(front)
        assert "front.default_model" in ambiguous.value.hint


async def test_a_second_model_that_joins_changes_no_call_without_a_name(folder: Path) -> None:
    async with running_front(folder) as front:
        await join(front.meta, make_info("c2", models=(text_model(folder, "second"),)))
        await front.dispatcher.refresh()
        assert [m.name for m in await front.generation.models()] == ["second", "tiny"]
        assert (await front.generation.prepare(text_call(prompt="x"))).model.name == "tiny"


async def test_without_any_node_the_caller_may_retry(folder: Path) -> None:
    front = Front()
    with pytest.raises(NoNodeError):
        await answer(front)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": None},
        {"messages": (Message("user", "x"),)},
        {"prompt": None, "prompt_token_ids": ()},
        {"prompt": None, "prompt_token_ids": (5, 100_000)},
        {"prompt": None, "prompt_token_ids": (-1,)},
        {"temperature": 3.0},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"stop": ("x" * 257,)},
        {"tenant": "no spaces"},
        {"session_id": ""},
        {"priority": 1 << 40},
        {"top_k": 1 << 31},
        {"min_p": 1.5},
        {"presence_penalty": -2.5},
        {"frequency_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"logit_bias": ((100_000, 1.0),)},
        {"logit_bias": ((5, 101.0),)},
        {"min_tokens": 41},
        {"min_tokens": 1, "json_schema": "{}"},
    ],
)
async def test_wrong_arguments_are_refused_before_any_work(
    folder: Path, wrong: dict[str, object]
) -> None:
    async with running_front(folder) as front:
        with pytest.raises(UdfArgumentError):
            await answer(front, **wrong)
        assert not front.node.seen


async def test_sampling_reaches_the_node(folder: Path) -> None:
    asked: dict[str, Any] = {
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": ((5, 2.0), (7, -100.0)),
        "min_tokens": 3,
    }
    async with running_front(folder) as front:
        await answer(front, **asked)
        await answer(front, top_k=-1)
        first, second = (request.sampling for request in front.node.seen)
        assert {name: getattr(first, name) for name in asked} == asked
        assert not second.shapes


@pytest.mark.parametrize("field", [name for name in OPTIONAL_FIELDS if name != "logprobs"])
async def test_what_an_engine_does_not_take_is_refused_by_name(folder: Path, field: str) -> None:
    takes = tuple(name for name in OPTIONAL_FIELDS if name != field)
    value = ((5, 1.0),) if field == "logit_bias" else 1 if field.endswith(("k", "s")) else 0.5
    info = make_info("c1", models=(text_model(folder, sampling_fields=takes),))
    async with running_front(folder, info) as front:
        with pytest.raises(FeatureNotSupportedError, match=f"model tiny does not take {field}"):
            await answer(front, **{field: value})
        assert not front.node.seen
        await answer(front)


async def test_tenants_and_cache_policy_reach_the_node(folder: Path) -> None:
    async with running_front(folder) as front:
        await answer(front, tenant="one")
        await answer(front, tenant="two")
        await front.meta.put_namespace(Namespace("three", cache_enabled=False))
        await answer(front, tenant="three")
        one, two, three = front.node.seen
        assert one.namespace_key != two.namespace_key
        assert (one.use_cache, three.use_cache) == (True, False)


async def test_every_call_leaves_one_record(folder: Path) -> None:
    async with running_front(folder) as front:
        records: list[ModelRequest] = []
        front.generation.reducers.append(records.append)
        await answer(front)
        prepared = await front.generation.prepare(text_call(prompt="x", ignore_eos=True))
        async with aclosing(front.generation.stream(prepared)) as events:
            await anext(events)
            assert prepared.request.request_id in front.generation.live
        front.node.dead = True
        with pytest.raises(NodeLostError):
            await answer(front)
        assert [r.end for r in records] == [CallEnd.LENGTH, CallEnd.CANCELLED, CallEnd.FAILED]
        assert records[2].error_code == "node_lost"
        assert records[0].usage is not None


async def test_a_known_model_is_waited_for_while_its_node_restarts(folder: Path) -> None:
    async with running_front(folder) as front:
        await answer(front)
        await leave(front.meta)
        front.dispatcher.state.fleet.records.clear()
        prepared = await front.generation.prepare(text_call(prompt="x"))
        assert prepared.model.name == "tiny"


async def test_prompts_encoded_ahead_are_those_encoded_alone(folder: Path) -> None:
    texts = ["plain", "ünïcode 日本", "<eos>", "a\ud800b", "", " spaced ", "x" * 30_000, "again"]
    calls = [text_call(messages=(Message("user", text),)) for text in texts * 3]
    calls[3] = replace(calls[3], messages=(Message("system", "be brief"), *calls[3].messages))
    calls[5] = text_call(prompt="raw completion")
    calls[6] = replace(calls[6], documents=("a document",))
    calls[9] = replace(calls[9], messages=(Message("assistant", "no user"),))
    async with running_front(folder) as front:
        generation = front.generation
        ahead = await generation.encode_ahead(calls)
        assert sum(one is not None for one in ahead) > len(calls) // 2
        assert ahead[5] is None and ahead[6] is None

        async def ids(call: TextCall, one: EncodedAhead | None) -> object:
            try:
                return (await generation.prepare(call, one)).request.token_ids
            except TierKVError as error:
                return type(error), error.message

        for call, one in zip(calls, ahead, strict=True):
            assert await ids(call, one) == await ids(call, None)
        unknown = [replace(call, model="no-such-model") for call in calls]
        assert await generation.encode_ahead(unknown) == [None] * len(calls)
        assert await generation.encode_ahead([]) == []
