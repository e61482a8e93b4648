"""Answers with guesses equal answers without, token for token, whatever else is going on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.fix_blend import doc_request, known, some_tokens
from tests.fix_model import FAMILY_EXTRAS, answer, make_request, running_node, tiny_config
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.demo_model.data import make_probes
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.request import FinishReason, GenerateRequest
from tools.demo_model.evaluate import Answerer
from tools.demo_model.tokenizer import FOLDER

BLOCK, NEW = 8, 70
OFF: dict[str, Any] = {"speculative_tokens": 0, "l1_pages": 300}
ON: dict[str, Any] = {"speculative_tokens": 8, "l1_pages": 300}
LOOPING = RandomModelSpec(tiny_config("qwen2"), seed=2)
"""Its answers soon go in circles, so that many guesses are right."""


def prompts(count: int = 6) -> list[list[int]]:
    """Prompts of many lengths; every other one repeats its beginning."""
    rng = random.Random(3)
    drawn = [rng.choices(range(128), k=rng.randrange(5, 60)) for _ in range(count)]
    return [p if i % 2 else p + p[: len(p) // 2] for i, p in enumerate(drawn)]


def requests(**sampling: Any) -> list[GenerateRequest]:
    return [make_request(p, sampling={"max_tokens": NEW} | sampling) for p in prompts()]


async def one_by_one(node: ComputeNode, asked: list[GenerateRequest]) -> list[list[int]]:
    return [(await answer(node, request))[0] for request in asked]


async def together(node: ComputeNode, asked: list[GenerateRequest]) -> list[list[int]]:
    return [tokens for tokens, _ in await asyncio.gather(*(answer(node, r) for r in asked))]


async def plain(asked: list[GenerateRequest], **changes: Any) -> list[list[int]]:
    """Return the answers without guesses, each computed alone."""
    async with running_node(**(OFF | {"random_model": LOOPING} | changes)) as node:
        answers = await one_by_one(node, asked)
        assert node.speculation.guessed_tokens == 0
    return answers


def right(node: ComputeNode) -> int:
    return node.speculation.right_tokens


@pytest.mark.parametrize("family", FAMILY_EXTRAS)
async def test_every_family_alone_and_together(family) -> None:
    spec = RandomModelSpec(tiny_config(family), seed=2)
    want = await plain(requests(), random_model=spec)
    async with running_node(**ON, random_model=spec) as node:
        assert await one_by_one(node, requests()) == want
        assert right(node) > 10
        alone = right(node)
        assert node._engine.steps < sum(map(len, want)) + 60 - alone
        await node.drop_cache()
        assert await together(node, requests()) == want
        assert right(node) > alone


@pytest.mark.parametrize("most", [1, 3, 32])
async def test_any_length_of_guesses(most) -> None:
    want = await plain(requests())
    async with running_node(**(ON | {"speculative_tokens": most}), random_model=LOOPING) as node:
        assert await one_by_one(node, requests()) == want
        assert right(node) > 20


async def test_the_step_budget_holds_guesses_too() -> None:
    want = await plain(requests())
    changes = ON | {"max_batch_tokens": 6, "max_running": 4}
    async with running_node(**changes, random_model=LOOPING) as node:
        rows: list[int] = []
        forward = node._engine._model.compute

        def counted(batch):
            rows.append(len(batch.token_ids))
            return forward(batch)

        node._engine._model.compute = counted
        assert await together(node, requests()) == want
        assert await one_by_one(node, requests()) == want
        assert max(rows) <= 6 and right(node) > 20


async def test_every_length_ends_at_its_last_token() -> None:
    prompt = prompts()[2]
    (want,) = await plain([make_request(prompt, sampling={"max_tokens": NEW})])
    async with running_node(**ON, random_model=LOOPING) as node:
        for count in range(1, 45):
            asked = make_request(prompt, sampling={"max_tokens": count})
            tokens, last = await answer(node, asked)
            assert tokens == want[:count] and last.finish_reason is FinishReason.LENGTH
            assert last.usage.completion_tokens == count
        assert right(node) > 40


async def test_a_stop_token_inside_a_guess_ends_the_answer_there() -> None:
    prompt = prompts()[2]
    (want,) = await plain([make_request(prompt, sampling={"max_tokens": NEW})])
    async with running_node(**ON, random_model=LOOPING) as node:
        for stop in sorted(set(want)):
            sampling = {"max_tokens": NEW, "stop_token_ids": (stop,), "ignore_eos": True}
            tokens, last = await answer(node, make_request(prompt, sampling=sampling))
            assert tokens == want[: want.index(stop)]
            assert last.finish_reason is FinishReason.STOP
            assert last.usage.completion_tokens == len(tokens)
        assert right(node) > 20


async def test_sampled_answers_are_not_guessed() -> None:
    sampling = {"temperature": 0.8, "seed": 5}
    want = await plain(requests(**sampling))
    async with running_node(**ON, random_model=LOOPING) as node:
        assert await one_by_one(node, requests(**sampling)) == want
        assert await together(node, requests(**sampling)) == want
        assert node.speculation.guessed_tokens == 0


async def test_guesses_beside_prompts_and_preemptions() -> None:
    want = await plain(requests())
    long = random.Random(8).choices(range(128), k=150)
    (late,) = await plain([make_request(long)])
    changes = ON | {"l1_pages": 45, "max_batch_tokens": 24}
    async with running_node(MemoryPoolNode(), **changes, random_model=LOOPING) as node:
        for _ in range(2):
            crowd = [*requests(), make_request(long)]
            assert await together(node, crowd) == [*want, late]
            assert node._engine.batcher.preemptions > 0
        assert node.report().cache_errors == ()
        assert await one_by_one(node, requests()) == want and right(node) > 20


async def test_only_blocks_of_the_answer_are_findable_and_published() -> None:
    pool = MemoryPoolNode()
    asked = requests()
    async with running_node(pool, **ON, random_model=LOOPING) as node:
        answers = await one_by_one(node, asked)
        assert right(node) > 20 and node.speculation.guessed_tokens > right(node)
        assert await node.flush()
        want: set[bytes] = set()
        for request, tokens in zip(asked, answers, strict=True):
            ids = [*request.token_ids, *tokens[:-1]]
            want |= set(block_keys(request.namespace_key, ids, block_tokens=BLOCK))
        assert {event.key for event in node.inventory()} == want == pool.sealed_keys
    async with running_node(pool, **ON, random_model=LOOPING) as other:
        longer = [
            make_request([*r.token_ids, *a], sampling={"max_tokens": 20})
            for r, a in zip(asked, answers, strict=True)
        ]
        assert await one_by_one(other, longer) == await plain(longer)
        assert other.report().cache_errors == ()


async def test_an_answer_that_another_node_goes_on_with() -> None:
    pool = MemoryPoolNode()
    want = await plain(requests())
    async with (
        running_node(pool, **ON, random_model=LOOPING) as first,
        running_node(pool, **ON, random_model=LOOPING) as second,
    ):
        for prompt, tokens in zip(prompts(), want, strict=True):
            sampling = {"max_tokens": NEW}
            asked = make_request(prompt, handoff=True, sampling=sampling)
            head, last = await answer(first, asked)
            assert last.finish_reason is FinishReason.HANDOFF
            before = second._engine.computed_tokens
            resumed = make_request([*prompt, *head], resumed_tokens=1, sampling=sampling)
            assert head + (await answer(second, resumed))[0] == tokens
            assert second._engine.computed_tokens - before == len(tokens) - 1
        assert right(second) > 20 and right(first) == 0


async def test_blended_prompts() -> None:
    docs = [some_tokens(40), some_tokens(33)]
    sampling = {"max_tokens": NEW}
    answers = []
    for settings in (OFF, ON):
        async with running_node(MemoryPoolNode(), **settings, random_model=LOOPING) as node:
            await known(node, *docs)
            asked = doc_request(docs, sampling=sampling)
            got, last = await answer(node, asked)
            assert last.usage.blended_tokens > 0
            answers.append(got)
            guessed = node.speculation.guessed_tokens
    assert answers[0] == answers[1] and guessed > 0


async def test_the_shipped_model_copies_from_its_prompts() -> None:
    tokenizer = Answerer(FOLDER).tokenizer
    probes = make_probes(("lookup", "extract"), 6, 4)
    encoded = [
        tokenizer.apply_chat_template(
            list(probe.messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for probe in probes
    ]
    shipped = {"random_model": None, "model_folder": str(FOLDER), "block_tokens": 64}
    answers = []
    for settings in (OFF, ON):
        async with running_node(**settings, **shipped, max_batch_tokens=1_024) as node:
            asked = [
                make_request(ids, sampling={"max_tokens": 24, "ignore_eos": end})
                for ids in encoded
                for end in (False, True)
            ]
            answers += [await one_by_one(node, asked), await together(node, asked)]
            guessed = right(node)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert guessed > 0
