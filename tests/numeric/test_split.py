"""Prefill on one node, decode on another: equal tokens, and nothing is computed twice."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from tests.fix_model import answer, make_request, running_node
from tests.fix_pool import DyingPoolNode, MemoryPoolNode
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.errors import ChecksumError, TransportError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import FinishReason, GenerateEvent

BLOCK = 8
LENGTHS = [1, 7, 8, 9, 30, 64, 65, 100, 150]


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(128), k=length)


async def oracle(prompt: list[int], **sampling: object) -> list[int]:
    async with running_node() as node:
        request = make_request(prompt, use_cache=False, sampling=sampling)
        return (await answer(node, request))[0]


async def hand_over(
    first: ComputeNode, second: ComputeNode, prompt: list[int], **sampling: object
) -> tuple[list[int], GenerateEvent, int]:
    """Run a request on two nodes; returns tokens, last event, tokens the second computed."""
    head, last = await answer(first, make_request(prompt, handoff=True, sampling=sampling))
    assert last.finish_reason is FinishReason.HANDOFF and len(head) == 1
    before = second._engine.computed_tokens
    resumed = make_request([*prompt, *head], resumed_tokens=1, sampling=sampling)
    tail, last = await answer(second, resumed)
    return head + tail, last, second._engine.computed_tokens - before


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("host", ["here", "there"])
async def test_the_decode_node_computes_no_prompt_token(length: int, host: str) -> None:
    prompt = prompt_of(length)
    want = await oracle(prompt)
    pool = MemoryPoolNode(host=host)
    async with running_node(pool) as first, running_node(pool) as second:
        tokens, last, computed = await hand_over(first, second, prompt)
    assert tokens == want
    assert computed == len(want) - 1  # One per token it generated, the first step included.
    assert last.usage is not None
    assert last.usage.hit_tokens.total == last.usage.prompt_tokens == length
    assert last.usage.completion_tokens == 12


@pytest.mark.parametrize("codec", [KvCodec.FP8, KvCodec.INT8])
async def test_a_tail_passes_through_a_codec(codec: KvCodec) -> None:
    pool = MemoryPoolNode()
    async with (
        running_node(pool, kv_codec=codec) as first,
        running_node(pool, kv_codec=codec) as second,
    ):
        tokens, _, computed = await hand_over(first, second, prompt_of(30))
    assert len(tokens) == 12 and computed == 11


async def test_what_was_decoded_in_a_tail_becomes_a_block_of_its_own() -> None:
    """The tail's page is written on by its new owner and found only under its full name."""
    prompt = prompt_of(30)
    want = await oracle(prompt)
    pool = MemoryPoolNode()
    async with running_node(pool) as first, running_node(pool) as second:
        await hand_over(first, second, prompt)
        names = {stored.key for stored in second.inventory()}
        assert await second.flush()
        tails = pool.sealed_keys - names
        assert len(tails) == 1 and len(names) == (30 + 11) // BLOCK
        again, last = await answer(second, make_request([*prompt, *want[:11]]))
        assert last.usage is not None and last.usage.hit_tokens.l1 == 40
        assert again[0] == want[11]


async def test_two_continuations_of_one_tail_do_not_disturb_each_other() -> None:
    prompt = prompt_of(30)
    pool = MemoryPoolNode()
    async with running_node(pool) as first, running_node(pool) as second:
        head, _ = await answer(first, make_request(prompt, handoff=True))
        forks = [[*prompt, token] for token in (head[0], 5, 77)]
        for fork in [*forks, *forks]:
            want = await oracle(fork, max_tokens=11)
            tokens, _ = await answer(second, make_request(fork, resumed_tokens=1))
            assert tokens == want


async def test_a_tail_that_is_gone_is_computed_again() -> None:
    prompt = prompt_of(30)
    want = await oracle(prompt)
    pool = MemoryPoolNode()
    async with running_node(pool) as first, running_node(pool) as second:
        head, _ = await answer(first, make_request(prompt, handoff=True))
        full = {stored.key for stored in first.inventory()}
        (tail,) = pool.sealed_keys - full
        pool.forget(tail)
        tokens, last = await answer(second, make_request([*prompt, *head], resumed_tokens=1))
    assert head + tokens == want
    assert last.usage is not None and last.usage.hit_tokens.l2 == 24


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_spoilt_tail_is_computed_again(layer: int) -> None:
    prompt = prompt_of(30)
    want = await oracle(prompt)
    pool = MemoryPoolNode()
    async with running_node(pool) as first:
        head, _ = await answer(first, make_request(prompt, handoff=True))
        (tail,) = pool.sealed_keys - {stored.key for stored in first.inventory()}
    place = pool.sealed[tail]
    read = pool.read_ranges

    def spoil(reads):
        if any(r.location == place and r.index == layer for r in reads):
            raise TransportError("lost") if layer else ChecksumError("flipped bits")
        read(reads)

    pool.read_ranges = spoil  # type: ignore[method-assign]
    async with running_node(pool) as second:
        tokens, _ = await answer(second, make_request([*prompt, *head], resumed_tokens=1))
        errors = dict(second.report().cache_errors)
    assert head + tokens == want
    assert errors.get("transport_error" if layer else "checksum_mismatch", 0) >= 1


@pytest.mark.parametrize("call", ["reserve", "write_ranges", "seal", "abort", "lookup", "hold"])
async def test_a_pool_that_fails_during_the_handoff_costs_only_time(call: str) -> None:
    prompt = prompt_of(70)
    want = await oracle(prompt)
    pool = DyingPoolNode(call)
    async with running_node(pool) as first, running_node(pool) as second:
        pool.dead = True
        tokens, _, computed = await hand_over(first, second, prompt)
        assert tokens == want
        assert call == "abort" or computed > 11


async def test_the_first_token_does_not_wait_for_the_pool() -> None:
    pool = MemoryPoolNode()
    gate = threading.Event()
    seal = pool.seal

    def slow_seal(grants):
        assert gate.wait(30)
        return seal(grants)

    pool.seal = slow_seal  # type: ignore[method-assign]
    async with running_node(pool) as node:
        events = node.generate(make_request(prompt_of(30), handoff=True))
        first = await anext(events)
        assert len(first.token_ids) == 1 and first.finish_reason is None
        gate.set()
        last = await anext(events)
        assert last.finish_reason is FinishReason.HANDOFF and not last.token_ids
        await events.aclose()


async def test_an_answer_of_one_token_leaves_no_tail() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        request = make_request(prompt_of(30), handoff=True, sampling={"max_tokens": 1})
        _, last = await answer(node, request)
        assert last.finish_reason is FinishReason.LENGTH
        assert await node.flush()
        assert pool.sealed_keys == {stored.key for stored in node.inventory()}


async def test_a_prompt_without_cache_leaves_nothing() -> None:
    pool = MemoryPoolNode()
    async with running_node(pool) as node:
        await answer(node, make_request(prompt_of(30), handoff=True, use_cache=False))
        assert await node.flush()
        assert not pool.sealed_keys


def save_step_by_step(node: ComputeNode) -> None:
    """Let each step end only when its blocks are in the pool."""
    publisher = node._engine.tiers.publisher
    post_end = publisher.post_end

    def post_and_wait(*end: Any) -> None:
        post_end(*end)
        assert publisher.flush(30)

    publisher.post_end = post_and_wait  # type: ignore[method-assign]


async def test_a_decode_node_takes_blocks_while_the_prompt_is_still_computed() -> None:
    prompt = prompt_of(300)
    want = await oracle(prompt)
    pool = MemoryPoolNode(host="there")
    async with running_node(pool) as first, running_node(pool) as second:
        save_step_by_step(first)
        head: list[int] = []
        told: list[int] = []
        async for event in first.generate(make_request(prompt, handoff=True)):
            head += event.token_ids
            if event.published_tokens:
                told.append(event.published_tokens)
                assert not head and not event.token_ids and event.finish_reason is None
                early = make_request(prompt[: told[-1] + 1], resumed_tokens=1)
                assert await second.prefetch(early) == told[-1]
        assert told == [64, 128, 192, 256]  # The last step's come with the last event.
        assert second._engine.computed_tokens == 0
        resumed = make_request([*prompt, *head], resumed_tokens=1)
        tail, last = await answer(second, resumed)
        assert head + tail == want
        assert last.usage is not None
        assert last.usage.hit_tokens.l1 == told[-1]
        assert last.usage.hit_tokens.total == 300


@pytest.mark.parametrize("call", ["lookup", "hold", "read_ranges", "release"])
async def test_a_prefetch_that_fails_leaves_nothing_wrong_behind(call: str) -> None:
    prompt = prompt_of(100)
    want = await oracle(prompt)
    pool = DyingPoolNode(call)
    async with running_node(pool) as first:
        await answer(first, make_request(prompt))
        assert await first.flush()
    async with running_node(pool) as second:
        pool.dead = True
        loaded = await second.prefetch(make_request(prompt))
        assert loaded == (96 if call == "release" else 0)
        pool.dead = False
        await second.check_invariants()
        assert (await answer(second, make_request(prompt)))[0] == want


async def test_a_prefetch_takes_only_pages_to_spare() -> None:
    prompt = prompt_of(300)
    pool = MemoryPoolNode()
    async with running_node(pool, l1_pages=201) as first:
        # So many pages that none of the 37 blocks finds the publisher's queue full.
        await answer(first, make_request(prompt))
        assert await first.flush()
    async with running_node(pool, l1_pages=41) as second:
        assert await second.prefetch(make_request(prompt)) == 20 * BLOCK
        assert await second.prefetch(make_request(prompt)) > 20 * BLOCK
        await second.check_invariants()
        assert await second.prefetch(make_request(prompt, use_cache=False)) == 0


async def test_prefetching_what_somebody_is_computing_is_harmless() -> None:
    prompts = [prompt_of(length) for length in (90, 150, 210)]
    wants = [await oracle(prompt) for prompt in prompts]
    pool = MemoryPoolNode()
    async with running_node(pool) as first:
        for prompt in prompts:
            await answer(first, make_request(prompt))
        assert await first.flush()
    async with running_node(pool) as second:
        got = await asyncio.gather(
            *(second.prefetch(make_request(p)) for p in prompts * 2),
            *(answer(second, make_request(p)) for p in prompts),
        )
        assert [tokens for tokens, _ in got[6:]] == wants


async def test_a_prefetch_takes_no_tail_for_a_block() -> None:
    prompt, pool = prompt_of(4 * BLOCK), MemoryPoolNode()
    longer = [*prompt, 7]
    async with running_node(pool) as node:
        await answer(node, make_request(prompt[:-1], handoff=True))  # Leaves a tail of 7 tokens.
        assert await node.flush()
        await node.drop_cache()
        assert await node.prefetch(make_request(prompt, resumed_tokens=1)) == 3 * BLOCK
        assert (await answer(node, make_request(longer)))[0] == await oracle(longer)
