"""Greedy output on a device with every kind of reuse equals output without cache, in float32."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from tests.fix_blend import DOCS, doc_request, exact, known
from tests.fix_blend import HEAD as TOP
from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.blend.passes import CausalSpans

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


async def test_a_blending_pass_of_65_tokens_gives_the_exact_answer(device) -> None:
    """The last of 65 queries is alone in a block of a fused kernel."""
    async with running_node(MemoryPoolNode(), device=device, dtype="float32") as node:
        await known(node, *DOCS[:3])
        await answer(node, make_request([*TOP, *DOCS[0][:20], 5, 6, 7]))
        asked = doc_request(DOCS[:2], ratio=1.0)
        got, last = await answer(node, asked)
        assert len(asked.token_ids) - last.usage.hit_tokens.total == 65
        assert got == await exact(node, asked) and last.usage.recomputed_tokens == 54


@pytest.mark.parametrize("queries", [1, 63, 64, 65, 66, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_of_any_span_is_that_of_the_cpu(device, queries, kv_heads) -> None:
    drawn = torch.Generator().manual_seed(queries)
    q = torch.randn(queries, 4, 16, generator=drawn)
    keys, values = torch.randn(2, 130, kv_heads, 16, generator=drawn)
    positions = torch.arange(130 - queries, 130)
    scores = torch.einsum("qhd,nhd->hqn", q, keys.repeat_interleave(4 // kv_heads, 1)) / 4
    scores.masked_fill_(torch.arange(130) > positions[:, None], -torch.inf)
    want = torch.einsum(
        "hqn,nhd->qhd", scores.softmax(-1), values.repeat_interleave(4 // kv_heads, 1)
    )
    spans = CausalSpans(positions.to(device), 130)
    got = spans.attend(q.to(device), keys.to(device), values.to(device))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
