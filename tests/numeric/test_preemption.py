"""Requests that lose their pages: what they computed comes back from the pool, tokens stay."""

from __future__ import annotations

import asyncio

import pytest

from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.config import LoadPolicy
from tierkv.kvcore.block import ROOT_PARENT, block_keys, tail_key

BLOCK = 8
PROMPTS = [
    [(i * step + 1) % 128 for i in range(length)]
    for step, length in ((3, 27), (5, 29), (7, 31), (11, 34))
]
"""Of unequal lengths, so that not all are at the end of a block when pages run out."""
NEW = 41


class TailWatcher(MemoryPoolNode):
    """Remembers how many tokens each block was reserved for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[bytes, int] = {}

    def reserve(self, puts, *, deadline_s: float = 30.0):
        self.tokens |= {put.key: put.tokens for put in puts}
        return super().reserve(puts, deadline_s=deadline_s)


def requests() -> list:
    return [make_request(prompt, sampling={"max_tokens": NEW}) for prompt in PROMPTS]


async def crowd(*pools, **changes) -> tuple[list[list[int]], int, int]:
    """Answer all prompts at once with too few pages: tokens, computed tokens, preemptions."""
    async with running_node(*pools, l1_pages=22, **changes) as node:
        got = await asyncio.gather(*(answer(node, request) for request in requests()))
        await node.flush()
        engine = node._engine
        assert dict(node.report().cache_errors) == {}
        return [tokens for tokens, _ in got], engine.computed_tokens, engine.batcher.preemptions


async def alone() -> list[list[int]]:
    async with running_node(l1_pages=65) as node:
        return [(await answer(node, request))[0] for request in requests()]


async def test_what_a_preempted_request_computed_is_loaded_again() -> None:
    want = await alone()
    dropped, computed_again, preemptions = await crowd()
    pool = TailWatcher()
    demoted, computed, also = await crowd(pool)
    assert dropped == want and demoted == want
    assert preemptions > 0 and also > 0
    # All prompts begin with the same token, which all but the first may have from another one.
    least = sum(len(prompt) + NEW - 2 for prompt in PROMPTS) + 1
    assert least <= computed < computed_again


async def test_the_partial_last_block_is_saved_under_a_name_of_its_own() -> None:
    want = await alone()
    pool = TailWatcher()
    await crowd(pool)
    tails = {key for key, tokens in pool.tokens.items() if tokens < BLOCK}
    assert tails and tails <= pool.sealed_keys
    names = set()
    for request, tokens in zip(requests(), want, strict=True):
        ids = [*request.token_ids, *tokens]
        keys = block_keys(request.namespace_key, ids, block_tokens=BLOCK)
        for stop in range(len(request.token_ids), len(ids)):
            full = stop // BLOCK
            parent = keys[full - 1] if full else ROOT_PARENT
            names.add(tail_key(request.namespace_key, parent, ids[full * BLOCK : stop]))
    assert tails <= names


@pytest.mark.parametrize("changes", [{"publish": False}, {"load_policy": LoadPolicy.NEVER}])
async def test_nothing_is_saved_where_nothing_would_be_loaded(changes) -> None:
    pool = TailWatcher()
    got, _, preemptions = await crowd(pool, **changes)
    assert got == await alone()
    assert preemptions > 0
    assert not [tokens for tokens in pool.tokens.values() if tokens < BLOCK]


async def test_blocks_that_found_the_queue_full_are_saved_at_a_preemption() -> None:
    pool = TailWatcher()
    got, _, preemptions = await crowd(pool, publish_queue_blocks=1)
    assert got == await alone()
    assert preemptions > 0


async def test_a_pool_that_loses_what_was_saved_costs_time_only() -> None:
    class Forgetful(TailWatcher):
        def seal(self, grants):
            sealed = super().seal(grants)
            for grant in grants:
                if self.tokens[grant.block.key] < BLOCK:
                    self.forget(grant.block.key)
            return sealed

    got, _, preemptions = await crowd(Forgetful())
    assert got == await alone()
    assert preemptions > 0
