"""A prompt's KV is named and erased: from pages, and from the pool, while the node answers on."""

from __future__ import annotations

import asyncio

import torch

from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.kvcore.block import Erased
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.request import FinishReason

BLOCK = 8
PROMPT = [i * 5 % 128 for i in range(5 * BLOCK + 7)]
"""Five full blocks, and a rest."""

OTHER = [*PROMPT[: 3 * BLOCK], *(i * 7 % 128 for i in range(2 * BLOCK + 3))]
"""Shares three blocks."""


def named(node, pool: MemoryPoolNode) -> set[BlockKey]:
    return set(pool.sealed_keys) | {stored.key for stored in node.inventory()}


async def test_a_prompt_is_named_and_erased_everywhere() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        request = make_request(PROMPT, sampling={"max_tokens": 2 * BLOCK})
        before, _ = await answer(node, request)
        found = await node.find_prompt(request)
        assert len(found.chain) == 5 and len(found.ends) >= 1 and found.chunks == ()
        assert set(found.chain) <= pool.sealed_keys
        layout = node.model.layout
        assert layout.block_tokens == BLOCK
        below, _ = await node.erase([*found.chain, *found.ends], pool=False)
        assert below.page_blocks >= 6 and below.page_bytes % layout.payload_bytes == 0
        assert node.inventory() == () and not torch.any(node._pages.kv[:, 1:])
        in_pool, nodes = await node.erase(sorted(pool.sealed_keys), pool=True)
        assert in_pool.memory_blocks >= 6 and nodes == (pool.node_id,)
        assert named(node, pool) == set()
        assert (await node.find_prompt(request)).ends == ()
        again, event = await answer(node, request)
        assert again == before and event.usage is not None
        assert event.usage.hit_tokens.total == 0
        await node.check_invariants()


async def test_blocks_after_the_shared_beginning_are_told_apart() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        await answer(
            node, make_request(PROMPT[: 3 * BLOCK + 5], sampling={"max_tokens": 2 * BLOCK})
        )
        await answer(node, make_request(OTHER, sampling={"max_tokens": 2 * BLOCK}))
        found = await node.find_prompt(make_request(PROMPT[: 3 * BLOCK + 5]))
        assert len(found.chain) == 3
        assert len(found.ends) == 1 and len(found.others) == 1
        assert not set(found.ends) & set(found.others)


async def test_a_prompt_shorter_than_a_block_is_found_by_its_tokens() -> None:
    async with running_node() as node:
        request = make_request(PROMPT[:5], sampling={"max_tokens": 3})
        await answer(node, request)
        await answer(node, make_request([9, 9, *PROMPT[:5]], sampling={"max_tokens": 3}))
        found = await node.find_prompt(request)
        assert found.chain == () and len(found.ends) == 1 and len(found.others) == 1
        erased, _ = await node.erase(found.ends, pool=False)
        assert erased.page_blocks == 1
        assert (await node.find_prompt(request)).ends == ()


async def test_pages_in_use_go_with_their_last_request() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        alone, _ = await answer(node, make_request(PROMPT, sampling={"max_tokens": 40}))
        found = await node.find_prompt(make_request(PROMPT))
        pages = node._engine.pool.lookup(found.chain)
        stream = node.generate(make_request(PROMPT, sampling={"max_tokens": 40}))
        tokens = list((await anext(stream)).token_ids)
        erased, _ = await node.erase(found.chain, pool=False)
        assert erased.page_blocks >= 5
        lookup = await asyncio.wrap_future(
            node._engine.inbox.call(lambda: node._engine.pool.lookup(found.chain))
        )
        assert lookup == [], "no other request finds the pages any more"
        async for event in stream:
            tokens += event.token_ids
            reason = event.finish_reason
        assert reason is FinishReason.LENGTH and tokens == alone
        await node.flush()
        await node.drop_cache()
        await node.check_invariants()
        assert len(pages) == 5 and not torch.any(node._pages.kv[:, pages])
        second, _ = await answer(node, make_request(PROMPT, sampling={"max_tokens": 40}))
        assert second == alone


async def test_nothing_to_erase_is_no_error() -> None:
    async with running_node(MemoryPoolNode()) as node:
        assert (await node.erase([BlockKey(bytes(16))], pool=False))[0] == Erased()
        assert (await node.erase([BlockKey(bytes(16))], pool=True))[0] == Erased()
