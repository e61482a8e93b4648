"""Greedy output on a device with every kind of reuse equals output without cache, in float32."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from tests.fix_blend import DOCS, doc_request, exact, known
from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import MemoryPoolNode

torch.set_num_threads(1)
HEAD = random.Random(5).choices(range(128), k=45)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [HEAD + rng.choices(range(128), k=rng.randrange(1, 40)) for _ in range(5)]


async def without_cache(device) -> list[list[int]]:
    async with running_node(device=device, dtype="float32") as node:
        return [(await answer(node, make_request(p, use_cache=False)))[0] for p in prompts()]


async def test_l1_one_by_one_and_together(device) -> None:
    want = await without_cache(device)
    async with running_node(device=device, dtype="float32") as node:
        for prompt, tokens in zip(prompts(), want, strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        again = await asyncio.gather(*(answer(node, make_request(p)) for p in prompts()))
    assert [tokens for tokens, _ in again] == want
    assert all(last.usage.hit_tokens.l1 for _, last in again)


@pytest.mark.parametrize("host", ["here", "there"])
async def test_the_pool_as_the_only_source(host, device) -> None:
    want = await without_cache(device)
    async with running_node(MemoryPoolNode(host=host), device=device, dtype="float32") as node:
        for prompt, tokens in zip(prompts(), want, strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        for prompt, tokens in zip(prompts(), want, strict=True):
            assert await node.flush()
            await node.drop_cache()
            got, last = await answer(node, make_request(prompt))
            assert got == tokens
            assert last.usage.hit_tokens.total >= (len(prompt) - 1) // 8 * 8


async def test_preemption_keeps_answers(device) -> None:
    want = await without_cache(device)
    async with running_node(
        device=device, dtype="float32", l1_pages=14, max_batch_tokens=32
    ) as node:
        got = await asyncio.gather(*(answer(node, make_request(p)) for p in prompts()))
    assert [tokens for tokens, _ in got] == want


async def test_blending_all_again_gives_the_exact_answer(device) -> None:
    async with running_node(MemoryPoolNode(), device=device, dtype="float32") as node:
        assert node.model.blend_refusal == ""
        await known(node, *DOCS[:3])
        asked = doc_request([DOCS[2], DOCS[0], DOCS[1]], ratio=1.0)
        got, last = await answer(node, asked)
        assert got == await exact(node, asked) and last.usage.recomputed_tokens > 0
