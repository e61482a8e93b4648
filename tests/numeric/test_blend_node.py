"""Blending in a node: with ratio 1.0 and under every fault the answer is the exact one.

And whatever the ratio, nothing approximate is ever found under the name of exact KV.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fix_blend import DOCS, HEAD, all_given_back, doc_request, exact, exact_keys, hits, known
from tests.fix_model import answer, make_request, running_node, tiny_config
from tests.fix_pool import MemoryPoolNode
from tests.memory_store import MemoryBlockStore
from tierkv.compute.config import RandomModelSpec
from tierkv.costing.blend_controller import BlendDecision
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape
from tierkv.kvcore.errors import TierKVError, UserError
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.request import Blend, BlendSelector, FinishReason

A, B, C, SHORT, TINY = DOCS
ORDERS = [(C, A, B), (B, C), (A, C, B, A), (TINY, SHORT, A), (B,)]


@pytest.mark.parametrize("selector", BlendSelector)
async def test_recomputing_all_gives_the_exact_answer(selector) -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B, C, SHORT, TINY)
        for gradual in (False, True):
            for docs in ORDERS:
                asked = doc_request(docs, ratio=1.0, selector=selector, gradual=gradual)
                got, last = await answer(node, asked)
                assert got == await exact(node, asked)
                assert last.usage.blended_tokens == 0 and last.usage.selector is selector
                reused = sum(len(doc) for doc in docs)
                assert 0 < last.usage.recomputed_tokens <= reused


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
async def test_other_families_give_the_exact_answer(family) -> None:
    spec = RandomModelSpec(tiny_config(family), seed=5)
    async with running_node(MemoryPoolNode(), random_model=spec) as node:
        assert not node.model.blend_refusal
        await known(node, A, B, C)
        for selector in BlendSelector:
            asked = doc_request([B, C, A], ratio=1.0, selector=selector)
            got, last = await answer(node, asked)
            assert got == await exact(node, asked) and last.usage.recomputed_tokens == 102


@pytest.mark.parametrize("selector", BlendSelector)
async def test_the_second_time_most_of_the_chunks_is_not_computed(selector) -> None:
    async with running_node(MemoryPoolNode()) as node:
        first = doc_request([A, B, C], selector=selector)
        want, last = await answer(node, first)
        assert want == await exact(node, first) and last.usage.selector is None
        assert last.usage.blended_tokens == 0 and last.usage.hit_tokens.total == 0
        assert await node.flush()
        computed = node._engine.computed_tokens
        _, last = await answer(node, doc_request([C, A, B], selector=selector))
        usage = last.usage
        assert usage.recomputed_tokens == 21 and usage.blended_tokens == 102 - 21
        assert hits(last) == {"l1": 81 + 8} and usage.selector is selector
        assert usage.prompt_tokens == 13 + 105 + 9 and usage.completion_tokens == 12
        assert node._engine.computed_tokens - computed == usage.prompt_tokens - 89 + 11


async def test_an_idle_engine_goes_on_at_once_where_chunks_turn_out_useless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It once slept for its check of deadlines first: 50 ms for each call with documents."""
    monkeypatch.setattr("tierkv.compute.engine.engine._IDLE_CHECK_S", 3_600.0)
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B, C)
        _, last = await answer(node, doc_request([A, B, C]))
        assert last.usage.blended_tokens > 0  # All chunks are in L1 now.
        decider = node._engine._loads._tiers.decider
        no_pass = BlendDecision(None, predicted_s=1.0, compute_s=1.0)
        monkeypatch.setattr(decider, "decide_blend", lambda *_, **__: no_pass)
        asked = doc_request([C, B, A])
        async with asyncio.timeout(60):
            got, last = await answer(node, asked)
        assert last.usage.selector is None and got == await exact(node, asked)


@pytest.mark.parametrize(("host", "tier"), [("here", "l2"), ("there", "l3")])
async def test_chunks_come_from_the_pool(host, tier) -> None:
    pool = MemoryPoolNode(host=host)
    async with running_node(pool) as node:
        await known(node, A, B, C)
    for ratio in (1.0, 0.2):
        async with running_node(pool) as node:
            asked = doc_request([B, C, A], ratio=ratio)
            got, last = await answer(node, asked)
            assert last.usage.recomputed_tokens == (102 if ratio == 1.0 else 21)
            assert hits(last) == {tier: 8 + last.usage.blended_tokens}
            assert ratio < 1.0 or got == await exact(node, asked)
            _, last = await answer(node, doc_request([C, B, A], ratio=ratio))
            assert hits(last) == {"l1": 8 + last.usage.blended_tokens}, "what was loaded stays"
            assert node.report().cache_errors == ()


async def test_chunks_come_from_an_archive() -> None:
    pool, store = MemoryPoolNode(), MemoryBlockStore(capacity_bytes=1 << 20)
    async with running_node(pool) as node:
        await known(node, A, B)
    for key in pool.sealed_keys:
        ranges = pool.ranges(key)
        block = BlockSpec(key, ROOT_PARENT, 8, ranges=RangeShape(len(ranges[0]), len(ranges)))
        store.put(block, memoryview(b"".join(ranges)))
    async with running_node(archive=store) as node:
        asked = doc_request([B, A], ratio=1.0)
        got, last = await answer(node, asked)
        assert got == await exact(node, asked) and last.usage.recomputed_tokens == 73
        assert hits(last) == {"l4": 8}
        _, last = await answer(node, doc_request([B, A]))
        assert last.usage.blended_tokens == 73 - 15


async def test_nothing_blended_is_found_as_exact() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        await known(node, A, B, C)
        asked = doc_request([C, B, A], sampling={"max_tokens": 40})
        tokens, last = await answer(node, asked)
        assert last.usage.blended_tokens > 0
        assert await node.flush()
        names = exact_keys(asked, tokens)
        there = pool.sealed_keys | {block.key for block in node.inventory()}
        assert [key in there for key in names] == [True] + [False] * (len(names) - 1)
        plain = replace(asked, blend=None)
        got, last = await answer(node, plain)
        assert got == await exact(node, asked)
        assert last.usage.hit_tokens.total == 13  # What all prompts begin with was exact.
        # Now exact KV is there, and preferred to blending.
        again, last = await answer(node, asked)
        assert again == got and last.usage.blended_tokens == 0 and last.usage.selector is None


async def test_an_exact_prefix_may_end_within_a_chunk() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B, C)
        await answer(node, make_request([*HEAD, *A[:20], 5, 6, 7]))
        for ratio in (1.0, 0.2):
            asked = doc_request([A, B], ratio=ratio)
            got, last = await answer(node, asked)
            usage = last.usage
            reused = len(A) + len(B) - (32 - 13)  # Four blocks of head and A are exact.
            assert usage.recomputed_tokens + usage.blended_tokens == reused
            assert ratio < 1.0 or got == await exact(node, asked)
            assert usage.hit_tokens.total == usage.blended_tokens + 32


async def test_a_prompt_that_is_exact_to_its_end_is_not_blended() -> None:
    """The last chunk ends behind the last whole block, in a part that L1 has as well."""
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, C)
        asked = doc_request([A, C], question=(5, 6, 7), sampling={"max_tokens": 1})
        want, _ = await answer(node, replace(asked, blend=None))
        got, last = await answer(node, asked)
        assert got == want and last.usage.selector is None
        assert hits(last) == {"l1": len(asked.token_ids) - 1}


async def test_a_chunk_that_is_there_twice_and_one_that_ends_the_prompt() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B)
        asked = doc_request([A, B, A], ratio=1.0)
        assert (await answer(node, asked))[0] == await exact(node, asked)
        ids = (*HEAD, *A, *B)
        ends = Blend(((13, 53), (53, 86)), 1.0)
        got, last = await answer(node, make_request(ids, blend=ends))
        asked = make_request(ids)
        assert got == await exact(node, asked)
        assert last.usage.recomputed_tokens == 72, "the last token is always computed"
        got, last = await answer(node, replace(asked, blend=replace(ends, recompute_ratio=0.1)))
        assert last.usage.hit_tokens.total <= last.usage.prompt_tokens - 1


async def test_namespaces_and_heads_share_no_chunks() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B)
        other = doc_request([B, A], namespace_key=NamespaceKey(b"o" * 32))
        assert hits((await answer(node, other))[1]) == {}
        assert await node.flush()
        elsewhere = doc_request([B, A], head=[*HEAD[:-1], HEAD[-1] ^ 1])
        _, last = await answer(node, elsewhere)
        assert last.usage.selector is None and last.usage.blended_tokens == 0


async def test_what_may_not_be_blended_is_computed_exactly() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B)
        asked = doc_request([B, A])
        want = await exact(node, asked)
        for changes in ({"use_cache": False}, {"handoff": True}, {"blend": Blend(())}):
            got, last = await answer(node, replace(asked, **changes))
            assert got == want[: len(got)] and last.usage.selector is None
            await node.flush()
            await node.drop_cache()
        resumed = replace(asked, token_ids=(*asked.token_ids, *want[:3]), resumed_tokens=3)
        got, last = await answer(node, resumed)
        assert want[:3] + got == want and last.usage.blended_tokens == 0
        with pytest.raises(UserError, match="behind the prompt"):
            await answer(node, make_request(HEAD, blend=Blend(((3, 14),))))


async def test_a_refused_model_computes_exactly_and_says_so() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B)
        node._engine._blends._refusal = "it leaks"
        asked = doc_request([B, A])
        for _ in range(2):
            got, last = await answer(node, asked)
            assert got == await exact(node, asked) and last.usage.selector is None
        assert dict(node.report().cache_errors) == {"blend_refused": 2}


async def test_a_crowd_of_exact_and_blended_requests() -> None:
    async with running_node(MemoryPoolNode(), max_batch_tokens=32) as node:
        await known(node, A, B, C)
        asked = [doc_request(docs, ratio=ratio) for docs in ORDERS for ratio in (1.0, 0.2)]
        plain = [replace(request, blend=None) for request in asked[::2]]
        want = [await exact(node, request) for request in plain]
        got = await asyncio.gather(*(answer(node, x) for x in [*asked, *plain]))
        tokens = [tokens for tokens, _ in got]
        assert tokens[: len(asked) : 2] == want and tokens[len(asked) :] == want
        assert all(len(some) == 12 for some in tokens)
        for _, last in got:
            assert last.usage.hit_tokens.total < last.usage.prompt_tokens
        assert await node.flush()
        await all_given_back(node)


async def test_chunks_without_a_head_and_of_partial_blocks() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, TINY, SHORT, head=())
        asked = doc_request([TINY, A, SHORT], head=(), ratio=1.0)
        got, last = await answer(node, asked)
        assert got == await exact(node, asked) and last.usage.recomputed_tokens == 51


async def test_a_preempted_blend_is_computed_exactly_the_second_time() -> None:
    async with running_node(MemoryPoolNode(), l1_pages=34) as node:
        await known(node, A, B, C)
        long = {"max_tokens": 100}
        asked = [doc_request([C, B], ratio=1.0, sampling=long) for _ in range(2)]
        asked[1] = replace(asked[1], token_ids=(*asked[1].token_ids[:-1], 3))
        want = [await exact(node, request) for request in asked]
        got = await asyncio.gather(*(answer(node, request) for request in asked))
        assert [tokens for tokens, _ in got] == want
        assert node._engine.batcher.preemptions > 0
        assert all(last.finish_reason is FinishReason.LENGTH for _, last in got)


async def test_too_few_pages_for_blending_means_exact() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        await known(node, A, B, C)
    async with running_node(pool, l1_pages=21) as node:
        asked = doc_request([C, A, B], ratio=0.2)  # 17 pages, and 14 for its chunks.
        got, last = await answer(node, asked)
        assert last.usage.selector is None and got == await exact(node, asked)
        assert await node.flush()
        await all_given_back(node)


async def test_chunks_in_isolation_give_way_to_callers() -> None:
    async with running_node(
        MemoryPoolNode(), l1_pages=34, max_batch_tokens=8, max_running=1
    ) as node:
        first = doc_request([A, B, C], sampling={"max_tokens": 1})
        want = await exact(node, first)
        assert (await answer(node, first))[0] == want
        assert not node._engine.isolation.idle.is_set()
        crowd = [make_request([i, *range(120)], sampling={"max_tokens": 60}) for i in range(4)]
        for (got, _), request in zip(
            await asyncio.gather(*(answer(node, request) for request in crowd)), crowd, strict=True
        ):
            assert got == await exact(node, request)
        assert await node.flush()
        await all_given_back(node)


async def test_a_pass_that_raises_fails_alone() -> None:
    async with running_node(MemoryPoolNode()) as node:
        await known(node, A, B)
        asked = doc_request([B, A], ratio=1.0)
        want = await exact(node, asked)
        good = node._engine._model.outputs

        def broken(hidden):
            raise RuntimeError("kernel failure")

        node._engine._model.outputs = broken
        with pytest.raises(TierKVError, match="kernel failure"):
            await answer(node, asked)
        node._engine._model.outputs = good
        assert (await answer(node, asked))[0] == want
        await all_given_back(node)
