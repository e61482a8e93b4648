"""Chunk loads that fail, and passes that end early: the answer is right and nothing leaks.

With ratio 1.0 the answer must be the exact one, so a block that did not arrive would show.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.fix_blend import DOCS, HEAD, all_given_back, doc_request, exact, hits, known
from tests.fix_model import answer, make_request
from tests.fix_model import layerwise_node as running_node
from tests.fix_pool import MemoryPoolNode
from tierkv.compute.blend.passes import blend_steps
from tierkv.compute.blend.run import BlendRun
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.block import ChunkNamer, Location
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, TransportError
from tierkv.kvcore.request import BlendSelector, FinishReason

A, B, C, *_ = DOCS
SHORT_HEAD = HEAD[:5]
"""Shorter than a block, so that no exact prefix is loaded before the chunks."""


class FaultyPoolNode(MemoryPoolNode):
    """Reads of ``layer`` and later ones wait for ``gate``; then some blocks fail as told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = 99
        self.gate = threading.Event()
        self.bad: dict[Location, Exception] = {}

    def read_ranges(self, reads) -> None:
        late = reads[0].index >= self.layer
        if late:
            assert self.gate.wait(30)
        super().read_ranges(reads)
        for read in reads:
            if late and read.location in self.bad:
                read.destination[:] = b"\xff" * len(read.destination)  # NaN in every dtype.
                raise self.bad[read.location]

    def spoil(self, doc, block: int, error: Exception) -> None:
        keys = ChunkNamer(make_request([1]).namespace_key, SHORT_HEAD).block_keys(
            doc, block_tokens=8
        )
        self.bad[self.sealed[keys[block]]] = error


async def stocked() -> FaultyPoolNode:
    """Return a pool that has A, B and C as chunks."""
    pool = FaultyPoolNode()
    async with running_node(pool) as node:
        await known(node, A, B, C, head=SHORT_HEAD)
    return pool


def ask(*docs, **changes):
    """Return a request whose pass reads chunks from the first layer on, unless told otherwise."""
    settings = {"ratio": 1.0, "selector": BlendSelector.BOUNDARY} | changes
    return doc_request(docs, head=SHORT_HEAD, **settings)


async def begun(node: ComputeNode, layer: int) -> BlendRun:
    """Wait until a pass stands before a layer that has not arrived."""
    async with asyncio.timeout(20):
        while True:
            for run in node._engine._blends._runs.values():
                if run._next_layer >= layer and run._steps is not None and not run.can_go_on:
                    return run
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("selector", BlendSelector)
async def test_layers_are_blended_while_later_ones_load(selector) -> None:
    pool = await stocked()
    pool.layer = layer = 2 if selector is BlendSelector.HKVD else 1
    async with running_node(pool) as node:
        asked = ask(C, A, selector=selector)
        want, other = await exact(node, asked), make_request([9, 8, 7], use_cache=False)
        task = asyncio.create_task(answer(node, asked))
        await begun(node, layer)
        assert len((await answer(node, other))[0]) == 12, "others do not wait"
        assert not task.done()
        pool.gate.set()
        got, last = await task
        assert got == want and last.usage.recomputed_tokens == 69
        assert node.report().cache_errors == ()


@pytest.mark.parametrize("error", [ChecksumError, BlockNotFoundError, TransportError])
@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_a_chunk_that_fails_is_computed_and_those_before_it_stay(error, layer) -> None:
    pool = await stocked()
    pool.layer = layer
    pool.spoil(A, 2, error("flipped bits"))
    pool.gate.set()
    async with running_node(pool) as node:
        asked = ask(C, A, B)
        got, last = await answer(node, asked)
        assert got == await exact(node, asked)
        # A lost connection loses all that was to come over it.
        reused = 0 if error is TransportError else len(C)
        assert last.usage.recomputed_tokens == reused
        assert last.usage.selector is (BlendSelector.BOUNDARY if reused else None)
        pool.bad.clear()
        assert await node.flush()
        again, last = await answer(node, replace(asked, use_cache=False, blend=None))
        assert again == got
        await all_given_back(node)


@pytest.mark.parametrize("selector", BlendSelector)
async def test_a_chunk_that_fails_behind_a_pass_makes_it_begin_again(selector) -> None:
    pool = await stocked()
    pool.layer = 2
    pool.spoil(B, 0, ChecksumError("flipped bits"))
    async with running_node(pool) as node:
        want = await exact(node, ask(A, B))
        asked = ask(A, B, ratio=0.3, selector=selector)
        task = asyncio.create_task(answer(node, asked))
        await begun(node, 2)
        pool.gate.set()
        _, last = await task
        assert last.usage.recomputed_tokens == 12 and hits(last) == {"l2": 28}
        pool.bad.clear()
        assert await node.flush()
        assert (await answer(node, ask(A, B)))[0] == want
        await all_given_back(node)


async def test_a_late_load_is_given_up_and_what_is_in_l1_is_blended() -> None:
    pool = await stocked()
    async with running_node(pool, load_timeout_s=0.2) as node:
        asked = ask(C, A)
        want = await exact(node, asked)
        assert (await answer(node, ask(B, A)))[1].usage.recomputed_tokens > 0
        pool.layer = 1
        got, last = await answer(node, asked)
        assert got == want and last.usage.recomputed_tokens == len(A)
        assert dict(node.report().cache_errors) == {"load_timeout": 1}
        await node.drop_cache()
        got, last = await answer(node, asked)
        assert got == want and last.usage.selector is None and hits(last) == {}
        await node.flush()
        assert node._engine.pool.used > 0, "late loaders may still write"
        pool.gate.set()
        await all_given_back(node)


async def test_a_late_lookup_means_exact() -> None:
    pool = await stocked()
    asked, gate = ask(C, A), threading.Event()
    lookup = pool.lookup

    def late(keys):
        assert gate.wait(30)
        return lookup(keys)

    async with running_node(pool, load_timeout_s=0.1) as node:
        want = await exact(node, asked)
        pool.lookup = late
        got, last = await answer(node, asked)
        assert got == want and last.usage.selector is None
        assert dict(node.report().cache_errors)["locate_timeout"] >= 1
        gate.set()


@pytest.mark.parametrize("layer", [0, 1, 2])
async def test_cancelled_in_the_middle(layer) -> None:
    pool = await stocked()
    pool.layer = layer
    async with running_node(pool) as node:
        asked = ask(C, A)
        want = await exact(node, asked)
        task = asyncio.create_task(answer(node, asked))
        if layer:
            await begun(node, layer)
        else:
            async with asyncio.timeout(20):
                while not node._engine._blends._runs:
                    await asyncio.sleep(0.001)
        assert await node.cancel(asked.request_id)
        _, last = await asyncio.wait_for(task, 20)
        assert last.finish_reason is FinishReason.CANCELLED and last.usage.hit_tokens.total == 0
        assert node._engine.pool.used == 5 + 4, "the loader still writes there"
        pool.gate.set()
        await all_given_back(node)
        assert (await answer(node, asked))[0] == want


async def test_a_node_that_stops_ends_passes_and_chunks_in_isolation() -> None:
    pool = await stocked()
    pool.layer = 1
    async with running_node(pool) as node:
        task = asyncio.create_task(answer(node, ask(C, A)))
        await begun(node, 1)
        fresh = [tuple((t + 1) % 128 for t in doc) for doc in (A, B, C)]
        other = asyncio.create_task(answer(node, ask(*fresh, sampling={"max_tokens": 300})))
        async with asyncio.timeout(20):
            while node._engine.isolation.idle.is_set():
                await asyncio.sleep(0.001)
        stopping = asyncio.create_task(node.stop())
        ended = [last.finish_reason for _, last in await asyncio.gather(task, other)]
        pool.gate.set()
        await stopping
        assert ended == [FinishReason.CANCELLED] * 2
        assert node._engine.isolation.idle.is_set()


async def test_several_passes_wait_for_late_layers_each_behind_its_own_load() -> None:
    pool = await stocked()
    pool.layer = 2
    orders = [(C, A), (B, A), (A, B)]
    async with running_node(pool, load_threads=3, l1_pages=129) as node:
        want = [await exact(node, ask(*docs)) for docs in orders]
        tasks = [asyncio.create_task(answer(node, ask(*docs))) for docs in orders]
        async with asyncio.timeout(20):
            while len([r for r in node._engine._blends._runs.values() if r._next_layer == 2]) < 3:
                await asyncio.sleep(0.001)
        pool.gate.set()
        got = await asyncio.gather(*tasks)
        assert [tokens for tokens, _ in got] == want
        assert all(last.usage.recomputed_tokens > 0 for _, last in got)
        await all_given_back(node)


async def test_a_pass_that_fails_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await stocked()

    def short_of_memory(*args, **options):
        steps = blend_steps(*args, **options)
        yield next(steps)
        yield next(steps)
        raise RuntimeError("out of memory")

    async with running_node(pool) as node:
        asked = ask(C, A)
        want = await exact(node, asked)
        with monkeypatch.context() as patch:
            patch.setattr("tierkv.compute.blend.run.blend_steps", short_of_memory)
            got, last = await answer(node, asked)
        assert got == want and last.usage.selector is None
        assert dict(node.report().cache_errors) == {"blend_failed": 1}
        assert await node.flush()
        await all_given_back(node)
        got, last = await answer(node, replace(asked, use_cache=False, blend=None))
        assert got == want
