"""Greedy output with every kind of reuse, and under every fault, equals output without cache."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.fix_model import answer, make_request, node_config, running_node, tiny_config
from tests.fix_pool import CorruptingPoolNode, DyingPoolNode, MemoryPoolNode
from tests.memory_store import MemoryBlockStore
from tierkv.compute.config import LoadPolicy, RandomModelSpec
from tierkv.compute.loading import load_model
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape, namespace_key

PREFIX = random.Random(5).choices(range(128), k=45)


def prompts(count: int = 6, seed: int = 7) -> list[list[int]]:
    """Prompts with a shared prefix and tails of many lengths, one ending on a block border."""
    rng = random.Random(seed)
    tails = [rng.choices(range(128), k=rng.randrange(1, 40)) for _ in range(count - 1)]
    return [PREFIX + tail for tail in [*tails, rng.choices(range(128), k=19)]]


async def oracle(asked):
    async with running_node() as node:
        return [(await answer(node, make_request(p, use_cache=False)))[0] for p in asked]


async def test_l1_reuse_one_by_one_and_together() -> None:
    asked = prompts()
    want = await oracle(asked)
    async with running_node() as node:
        for prompt, tokens in zip(asked, want, strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        again = await asyncio.gather(*(answer(node, make_request(p)) for p in asked))
    assert [tokens for tokens, _ in again] == want
    for prompt, (_, last) in zip(asked, again, strict=True):
        assert last.usage.hit_tokens.l1 == len(prompt) - 1
        assert last.usage.prompt_tokens == len(prompt) and last.usage.completion_tokens == 12


async def test_concurrent_requests_compute_a_shared_prefix_once() -> None:
    asked = prompts(12)
    want = await oracle(asked)
    async with running_node() as node:
        got = await asyncio.gather(*(answer(node, make_request(p)) for p in asked))
    assert [tokens for tokens, _ in got] == want
    assert sorted(last.usage.hit_tokens.l1 for _, last in got)[1] >= 40


async def test_no_cache_neither_reads_nor_leaves_anything() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        for _ in range(2):
            _, last = await answer(node, make_request(PREFIX, use_cache=False))
            assert last.usage.hit_tokens.total == 0 and last.usage.written_tokens == 0
        await node.flush()
        assert node.inventory() == () and not pool.sealed_keys


@pytest.mark.parametrize(("host", "tier"), [("here", "l2"), ("there", "l3")])
async def test_pool_as_the_only_source(host, tier) -> None:
    asked = prompts()
    want = await oracle(asked)
    pool = MemoryPoolNode(host=host)
    async with running_node(pool) as node:
        for prompt, tokens in zip(asked, want, strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        assert await node.flush()
        for prompt, tokens in zip(asked, want, strict=True):
            await node.flush()  # Blocks being published keep their pages.
            await node.drop_cache()
            got, last = await answer(node, make_request(prompt))
            assert got == tokens
            assert getattr(last.usage.hit_tokens, tier) == len(prompt) - 1
        await node.flush()
        await node.drop_cache()
        together = await asyncio.gather(*(answer(node, make_request(p)) for p in asked))
        assert [tokens for tokens, _ in together] == want
        assert node.report().cache_errors == ()


async def test_an_archive_gives_what_the_pool_lacks() -> None:
    pool = MemoryPoolNode()
    prompt = prompts()[0]
    async with running_node(pool) as node:
        want, _ = await answer(node, make_request(prompt))
        await node.flush()
    store = MemoryBlockStore(capacity_bytes=1 << 20)
    for key in pool.sealed_keys:
        ranges = pool.ranges(key)
        block = BlockSpec(key, ROOT_PARENT, 8, ranges=RangeShape(len(ranges[0]), len(ranges)))
        store.put(block, memoryview(b"".join(ranges)))
    async with running_node(archive=store) as node:
        got, last = await answer(node, make_request(prompt))
        assert got == want
        assert last.usage.hit_tokens.l4 == (len(prompt) - 1) // 8 * 8


@pytest.mark.parametrize("slot", [1, 3, 5])
@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_corrupt_block_is_recomputed(slot, layer) -> None:
    asked = [[*PREFIX, 1, 2, 3]]
    want = await oracle(asked)
    pool = CorruptingPoolNode(slot, layer)
    async with running_node(pool) as node:
        await answer(node, make_request(asked[0]))
        await node.flush()
        await node.drop_cache()
        got, last = await answer(node, make_request(asked[0]))
        assert got == want[0]
        assert last.usage.hit_tokens.l2 == (slot - 1) * 8
        assert dict(node.report().cache_errors)["checksum_mismatch"] >= 1
        assert (await answer(node, make_request(asked[0])))[0] == want[0]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"random_model": RandomModelSpec(tiny_config(num_hidden_layers=4), seed=3)},
        {"random_model": RandomModelSpec(tiny_config(num_key_value_heads=4), seed=3)},
    ],
)
async def test_kv_of_another_layout_is_never_read_even_under_the_same_key(other) -> None:
    asked = prompts(3)
    want = await oracle(asked)
    pool = MemoryPoolNode()
    async with running_node(pool, **other) as node:
        for prompt in asked:
            await answer(node, make_request(prompt))
        await node.flush()
    reads = pool.reads
    async with running_node(pool) as node:
        for prompt, tokens in zip(asked, want, strict=True):
            got, last = await answer(node, make_request(prompt))
            assert got == tokens and last.usage.hit_tokens.l2 == 0
        assert dict(node.report().cache_errors)["layout_mismatch"] >= 1
    assert pool.reads == reads


async def test_nodes_of_another_layout_name_their_blocks_otherwise() -> None:
    layouts = [
        load_model(node_config(**changes)).info.layout
        for changes in ({}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"block_tokens": 16})
    ]
    keys = {
        namespace_key(b"s" * 32, tenant="t", model_revision="r", layout_fingerprint=x.fingerprint())
        for x in layouts
    }
    assert len(keys) == len(layouts)


CALLS = ["lookup", "hold", "read_ranges", "release", "reserve", "write_ranges", "seal", "abort"]


@pytest.mark.parametrize("call", CALLS)
async def test_a_failing_pool_call_is_only_a_miss(call) -> None:
    asked = prompts(3)
    want = await oracle(asked)
    pool = DyingPoolNode(call)
    async with running_node(pool) as node:
        for prompt in asked:
            await answer(node, make_request(prompt))
        await node.flush()
        pool.dead = True
        await node.drop_cache()
        fresh = prompts(3, seed=9)
        for prompt, tokens in zip(asked, want, strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        for prompt, tokens in zip(fresh, await oracle(fresh), strict=True):
            assert (await answer(node, make_request(prompt)))[0] == tokens
        await node.flush()
        if call != "abort":
            assert dict(node.report().cache_errors)["transport_error"] >= 1


async def test_never_policy_does_not_touch_the_pool_for_reading() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool, load_policy=LoadPolicy.NEVER) as node:
        first, _ = await answer(node, make_request(PREFIX))
        await node.flush()
        await node.drop_cache()
        second, last = await answer(node, make_request(PREFIX))
        assert first == second and last.usage.hit_tokens.total == 0 and pool.reads == 0


@pytest.mark.parametrize("pages", [14, 17, 24])
async def test_preemption_keeps_answers(pages) -> None:
    asked = prompts(8)
    want = await oracle(asked)
    async with running_node(l1_pages=pages, max_batch_tokens=32) as node:
        got = await asyncio.gather(*(answer(node, make_request(p)) for p in asked))
        assert [tokens for tokens, _ in got] == want
        if pages == 14:
            assert node._engine.batcher.preemptions > 0


@pytest.mark.parametrize("budget", [16, 17, 40])
async def test_any_token_budget_gives_the_same_tokens(budget) -> None:
    asked = prompts()
    want = await oracle(asked)
    async with running_node(max_batch_tokens=budget) as node:
        got = await asyncio.gather(*(answer(node, make_request(p)) for p in asked))
    assert [tokens for tokens, _ in got] == want


async def test_two_tenants_share_no_block() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        await answer(node, make_request(PREFIX))
        await node.flush()
        mine = pool.sealed_keys
        _, last = await answer(node, make_request(PREFIX, namespace_key=b"o" * 32, tenant="o"))
        await node.flush()
        assert last.usage.hit_tokens.total == 0
        assert len(pool.sealed_keys) == 2 * len(mine)
