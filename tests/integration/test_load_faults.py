"""Loads that go wrong in the one moment in which it is easy to believe them, and engines that end.

What is computed behind a load counts only if every layer of every block came in time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import _AsyncGeneratorContextManager

import pytest

from tests.fix_model import answer, make_request
from tests.fix_model import layerwise_node as running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.node import ComputeNode
from tierkv.compute.transfers.loads import BehindLoad
from tierkv.dmp.pool_node import RangeRead
from tierkv.kvcore.errors import TierKVError, TransportError
from tierkv.kvcore.request import FinishReason

pytestmark = pytest.mark.integration
PROMPT = [i * 7 % 128 for i in range(70)]
DEADLINE_S = 20.0


class GatedPoolNode(MemoryPoolNode):
    """Holds reads of a layer back until ``gate`` opens; raises what is no CacheError if told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = -1
        self.gate = threading.Event()
        self.error: Exception | None = None

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        if reads[0].index == self.layer:
            self.gate.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
        super().read_ranges(reads)


async def published(pool: MemoryPoolNode) -> list[int]:
    async with running_node(pool) as node:
        tokens, _ = await answer(node, make_request(PROMPT))
        assert await node.flush()
    return tokens


async def begun_behind_its_load(node: ComputeNode, layer: int) -> BehindLoad:
    """Wait until a sequence is computed up to a layer that has not arrived."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for loading in node._engine._loads.behind.values():
                if loading.chunk is not None and loading._next_layer == layer:
                    return loading
            await asyncio.sleep(0.001)


async def test_a_layer_that_comes_after_it_was_given_up_does_not_count() -> None:
    pool = GatedPoolNode()
    want = await published(pool)
    pool.layer = 1
    async with running_node(pool, load_timeout_s=0.2) as node:
        asked = asyncio.create_task(answer(node, make_request(PROMPT)))
        loading = await begun_behind_its_load(node, 1)
        got, last = await asyncio.wait_for(asked, DEADLINE_S)
        assert got == want
        assert last.usage.hit_tokens.total == 0
        assert dict(node.report().cache_errors) == {"load_timeout": 1}
        pool.gate.set()
        assert await asyncio.to_thread(loading.job.ended.wait, DEADLINE_S)
        # What was computed is kept under its key: it must be right for the next one, too.
        assert (await answer(node, make_request(PROMPT)))[0] == want


async def test_a_load_that_fails_by_a_bug_counts_for_nothing() -> None:
    pool = GatedPoolNode()
    want = await published(pool)
    pool.layer, pool.error = 1, ValueError("a bug in a transport")
    released = threading.Event()
    release = pool.release

    def late_release(locations) -> None:
        released.wait(DEADLINE_S)
        release(locations)

    pool.release = late_release
    async with running_node(pool) as node:
        asked = asyncio.create_task(answer(node, make_request(PROMPT)))
        loading = await begun_behind_its_load(node, 1)
        pool.gate.set()
        async with asyncio.timeout(DEADLINE_S):  # Its end is told only after the release.
            while loading.chunk is not None:
                await asyncio.sleep(0.001)
        released.set()
        got, last = await asyncio.wait_for(asked, DEADLINE_S)
        assert got == want
        assert last.usage.hit_tokens.total == 0


async def test_a_caller_that_stops_waiting_leaves_the_engine_running() -> None:
    async with running_node() as node:
        busy, go_on = threading.Event(), threading.Event()
        node._engine.inbox.post(lambda: (busy.set(), go_on.wait(DEADLINE_S)))
        assert await asyncio.to_thread(busy.wait, DEADLINE_S)
        waiting = asyncio.create_task(node.drop_cache())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        tokens, _ = await asyncio.wait_for(answer(node, make_request(PROMPT)), DEADLINE_S)
        assert len(tokens) == 12


async def test_a_handoff_does_not_wait_for_ever_for_a_silent_pool() -> None:
    pool = GatedPoolNode()
    reserve = pool.reserve

    def silent_reserve(puts, *, deadline_s: float = 30.0):
        pool.gate.wait(DEADLINE_S)
        return reserve(puts, deadline_s=deadline_s)

    pool.reserve = silent_reserve
    async with running_node(pool, load_timeout_s=0.05) as node:
        try:
            asked = answer(node, make_request(PROMPT, handoff=True))
            tokens, last = await asyncio.wait_for(asked, DEADLINE_S / 2)
            assert not pool.gate.is_set() and len(tokens) == 1
            assert last.finish_reason is FinishReason.HANDOFF
            assert dict(node.report().cache_errors) == {"handoff_timeout": 1}
        finally:
            pool.gate.set()
        assert await node.flush()
        assert len(pool.sealed_keys) == len(PROMPT) // 8 + 1  # The partial last block too.
        assert not node._engine._handoffs.seq_ids


async def refused_request(node: ComputeNode) -> TierKVError:
    with pytest.raises(TierKVError) as caught:
        await asyncio.wait_for(answer(node, make_request(PROMPT)), DEADLINE_S)
    return caught.value


async def test_an_engine_that_breaks_answers_what_was_queued_behind_the_bug(caplog) -> None:
    node_context = running_node()
    node = await node_context.__aenter__()
    try:
        busy, go_on = threading.Event(), threading.Event()

        def bug() -> None:
            busy.set()
            go_on.wait(DEADLINE_S)
            raise ZeroDivisionError("a bug")

        node._engine.inbox.post(bug)
        assert await asyncio.to_thread(busy.wait, DEADLINE_S)
        asked = asyncio.create_task(refused_request(node))
        await asyncio.sleep(0)  # It is in the inbox now, behind the bug.
        dropped = asyncio.create_task(node.drop_cache())
        await asyncio.sleep(0)
        go_on.set()
        assert isinstance(await asked, TransportError)
        with pytest.raises(TransportError):
            await asyncio.wait_for(dropped, DEADLINE_S)
        assert isinstance(await refused_request(node), TransportError)
        assert "the engine stopped" in caplog.text
    finally:
        await node.stop()
        assert isinstance(node_context, _AsyncGeneratorContextManager)
        await node_context.gen.aclose()
