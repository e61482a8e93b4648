"""New blocks stream to the pool behind the pass that computes them, and never half of one is seen.

The engine never waits for the pool here, but these passes wait for what the pool was told.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from tests.fix_model import answer, make_request
from tests.fix_model import layerwise_node as running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.node import ComputeNode
from tierkv.dmp.pool_node import PutGrant, RangeWrite
from tierkv.kvcore.block import Location
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.request import FinishReason

pytestmark = pytest.mark.integration
PROMPT = [i * 7 % 128 for i in range(61)]
"""Seven full blocks and a tail, and one chunk of the batch."""
DEADLINE_S = 20.0


class WatchedPoolNode(MemoryPoolNode):
    """Tells which layers were written, and whether anything was sealed or aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = [threading.Event() for _ in range(3)]
        self.aborted_slots = 0

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        super().write_ranges(writes)
        self.written[writes[0].index].set()

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        assert all(event.is_set() for event in self.written)
        return super().seal(grants)

    def abort(self, grants: Sequence[PutGrant]) -> None:
        self.aborted_slots += len(grants)
        super().abort(grants)


def before_layer(node: ComputeNode, layer: int, do: Callable[[], None]) -> None:
    """Have the decoder do something before it computes a layer of its next pass."""
    model = node._engine._model
    plain = model.layer_steps

    def steps(batch: Any) -> Generator[int, None, torch.Tensor]:
        model.layer_steps = plain  # type: ignore[method-assign]
        passing = plain(batch)
        while True:
            try:
                index = next(passing)
            except StopIteration as end:
                logits: torch.Tensor = end.value
                return logits
            if index == layer:
                do()
            yield index

    model.layer_steps = steps  # type: ignore[method-assign]


async def test_a_layer_is_saved_while_later_ones_are_computed() -> None:
    pool = WatchedPoolNode()
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        seen.append((pool.written[0].wait(DEADLINE_S), len(pool.sealed_keys)))

    async with running_node(pool) as node:
        before_layer(node, 2, look)
        tokens, last = await answer(node, make_request(PROMPT))
        assert await node.flush()
        names = {stored.key for stored in node.inventory()}
    assert seen == [(True, 0)], "layer 0 is there before layer 2 is computed, and invisible"
    assert pool.sealed_keys == names and not pool.has_open_puts
    assert last.usage is not None and last.usage.written_tokens == len(names) * 8
    async with running_node(pool) as node:
        again, last = await answer(node, make_request(PROMPT))
        assert again == tokens
        assert last.usage is not None and last.usage.hit_tokens.l2 == 56


@pytest.mark.parametrize("handoff", [False, True])
async def test_a_pass_that_fails_leaves_nothing(handoff: bool) -> None:
    pool = WatchedPoolNode()

    def fail() -> None:
        assert pool.written[0].wait(DEADLINE_S)
        raise RuntimeError("no memory")

    async with running_node(pool) as node:
        before_layer(node, 2, fail)
        with pytest.raises(TierKVError, match="no memory"):
            await answer(node, make_request(PROMPT, handoff=handoff))
        assert await node.flush()
        assert not pool.sealed_keys and not pool.has_open_puts
        assert pool.aborted_slots == (8 if handoff else 7)
        tokens, _ = await answer(node, make_request(PROMPT))
        want, _ = await answer(node, make_request(PROMPT, use_cache=False))
        assert tokens == want


async def test_logits_that_are_not_finite_take_only_their_own_blocks_along() -> None:
    pool = WatchedPoolNode()
    async with running_node(pool) as node:
        norm = node._engine._model.weights.final_norm

        def spoil() -> None:
            with torch.inference_mode():
                norm.mul_(float("nan"))

        kept = norm.clone()
        before_layer(node, 2, spoil)
        with pytest.raises(TierKVError, match="not finite"):
            await answer(node, make_request(PROMPT))
        assert await node.flush()
        assert not pool.sealed_keys and not pool.has_open_puts
        with torch.inference_mode():
            norm.copy_(kept)
        await answer(node, make_request(PROMPT))
        assert await node.flush()
        assert len(pool.sealed_keys) >= 7


class GatedPoolNode(WatchedPoolNode):
    """Holds reads of the last layer back until ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def read_ranges(self, reads: Any) -> None:
        if reads[0].index == 2:
            assert self.gate.wait(DEADLINE_S)
        super().read_ranges(reads)


@pytest.mark.parametrize("end", ["whole", "cancelled", "closed"])
async def test_saving_behind_a_load_ends_as_its_request_does(end: str) -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        await answer(node, make_request(PROMPT[:41], sampling={"max_tokens": 1}))
        assert await node.flush()
        want, _ = await answer(node, make_request(PROMPT, use_cache=False))
    first_blocks = set(pool.sealed_keys)
    for event in pool.written:
        event.clear()
    async with running_node(pool) as node:
        request = make_request(PROMPT)
        asking = asyncio.create_task(answer(node, request))
        assert await asyncio.to_thread(pool.written[1].wait, DEADLINE_S)
        assert pool.sealed_keys == first_blocks
        if end == "closed":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        elif end == "cancelled":
            await node.cancel(request.request_id)
            assert (await asking)[1].finish_reason is FinishReason.CANCELLED
        await node.check_invariants()  # The engine has heard of it.
        pool.gate.set()
        if end == "whole":
            assert (await asking)[0] == want
        assert await node.flush()
        saved = pool.sealed_keys - first_blocks
        assert bool(saved) is (end == "whole") and not pool.has_open_puts


class SlowPoolNode(WatchedPoolNode):
    """Seals nothing until ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def seal(self, grants: Sequence[PutGrant]) -> list[Location | None]:
        assert self.gate.wait(DEADLINE_S)
        return super().seal(grants)


async def test_a_prompt_of_half_a_small_l1_is_saved() -> None:
    pool = WatchedPoolNode()
    async with running_node(pool, l1_pages=16) as node:
        await answer(node, make_request(PROMPT, sampling={"max_tokens": 1}))
        assert await node.flush()
    assert len(pool.sealed_keys) == 7, "the queue's quarter of the pages would be four"


async def test_blocks_that_found_the_queue_full_are_saved_once_it_is_not() -> None:
    pool = SlowPoolNode()
    prompts = [[(token + n) % 128 for token in PROMPT] for n in range(3)]
    async with running_node(pool, l1_pages=40, publish_queue_blocks=10) as node:
        for prompt in prompts:
            await answer(node, make_request(prompt, sampling={"max_tokens": 1}))
        assert not pool.sealed_keys and node.report().tiers[0].alloc_failures > 0
        pool.gate.set()
        while len(pool.sealed_keys) < 21:
            assert await node.flush()
            await node.check_invariants()  # The engine has taken the ends of saves.
