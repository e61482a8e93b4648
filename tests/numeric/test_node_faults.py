"""A node under stress: cancellation, broken weights, late loads, refusals; it always lives on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from tests.fix_model import answer, make_request, write_calibration
from tests.fix_model import layerwise_node as running_node
from tests.fix_pool import DyingPoolNode, GatedPoolNode, MemoryPoolNode
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    ContextTooLongError,
    OverloadedError,
    RowLevelError,
    TierKVError,
    TransportError,
    UnknownModelError,
    UserError,
)
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import FinishReason

PROMPT = [i * 5 % 128 for i in range(61)]


class SteppedPoolNode(MemoryPoolNode):
    """Reads of layer l wait for ``gates[l]``."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(layers)]

    def read_ranges(self, reads) -> None:
        assert self.gates[reads[0].index].wait(30)
        super().read_ranges(reads)


class LosingPoolNode(MemoryPoolNode):
    """Loses a block between two layers: reads wait for ``gate``, then the block is gone."""

    def __init__(self, number: int, layer: int) -> None:
        super().__init__()
        self.gate = threading.Event()
        self._lost = (number, layer)

    def read_ranges(self, reads) -> None:
        number, layer = self._lost
        if reads[0].index >= layer:
            assert self.gate.wait(30)
            if any(self.number_of(read.location) == number for read in reads):
                raise BlockNotFoundError("evicted")
        super().read_ranges(reads)


async def published(node) -> list[int]:
    tokens, _ = await answer(node, make_request(PROMPT))
    await node.flush()
    await node.drop_cache()
    return tokens


async def pages_in_use(node, count: int) -> None:
    async with asyncio.timeout(10):
        while node._engine.pool.used != count:
            await asyncio.sleep(0.001)


async def test_layers_compute_while_later_layers_load() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        want = await published(node)
        begun = asyncio.create_task(answer(node, make_request(PROMPT)))
        await stopped_behind_layer(node, 1)  # Until layer 0 is computed, layer 1 can't arrive.
        pool.gate.set()
        got, last = await begun
        assert got == want and last.usage.hit_tokens.l2 == 60


async def stopped_behind_layer(node, layer: int, *, count: int = 1) -> None:
    """Wait until ``count`` sequences are computed up to a layer that has not arrived."""
    async with asyncio.timeout(10):
        while True:
            begun = [x for x in node._engine._loads.behind.values() if x.chunk is not None]
            if len(begun) == count and all(x._next_layer == layer for x in begun):
                return
            await asyncio.sleep(0.001)


async def test_others_are_answered_while_one_waits_for_a_late_layer() -> None:
    pool = GatedPoolNode()
    others = [[(t + 1) % 128 for t in PROMPT[:n]] for n in (5, 30, 47)]
    async with running_node(pool) as node:
        want = await published(node)
        want_others = [(await answer(node, make_request(p, use_cache=False)))[0] for p in others]
        begun = asyncio.create_task(answer(node, make_request(PROMPT)))
        await stopped_behind_layer(node, 1)
        got = await asyncio.gather(
            *(answer(node, make_request(p, use_cache=False)) for p in others)
        )
        assert [tokens for tokens, _ in got] == want_others
        assert not pool.gate.is_set() and not begun.done()
        pool.gate.set()
        tokens, last = await begun
        assert tokens == want and last.usage.hit_tokens.l2 == 60


async def test_what_waits_for_a_late_layer_is_cancelled_at_once() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        want = await published(node)
        request = make_request(PROMPT)
        begun = asyncio.create_task(answer(node, request))
        await stopped_behind_layer(node, 1)
        assert await node.cancel(request.request_id)
        _, last = await asyncio.wait_for(begun, 10)
        assert last.finish_reason is FinishReason.CANCELLED
        assert not pool.gate.is_set() and not node._engine._loads.behind
        assert node._engine.pool.used == 8  # The loader still writes there.
        pool.gate.set()
        await pages_in_use(node, 0)
        assert (await answer(node, make_request(PROMPT)))[0] == want


async def test_several_wait_for_late_layers_each_behind_its_own_load() -> None:
    pool = GatedPoolNode()
    prompts = [PROMPT, [(t + 1) % 128 for t in PROMPT]]
    async with running_node(pool, load_threads=2) as node:
        want = [(await answer(node, make_request(p)))[0] for p in prompts]
        await node.flush()
        await node.drop_cache()
        begun = [asyncio.create_task(answer(node, make_request(p))) for p in prompts]
        await stopped_behind_layer(node, 1, count=2)
        pool.gate.set()
        got = await asyncio.gather(*begun)
        assert [tokens for tokens, _ in got] == want
        assert [last.usage.hit_tokens.l2 for _, last in got] == [60, 60]


async def test_layers_that_come_between_the_answers_of_others_give_the_same_tokens() -> None:
    pool = SteppedPoolNode(layers=3)
    loaded = [PROMPT, [(t + 1) % 128 for t in PROMPT], [*PROMPT, 9, 9]]
    others = [[(t + 2) % 128 for t in PROMPT[:n]] for n in (33, 60)]
    async with running_node(pool) as node:
        want = [(await answer(node, make_request(p)))[0] for p in [*loaded, *others]]
        await node.flush()
    async with running_node(pool, load_threads=3) as node:
        begun = [asyncio.create_task(answer(node, make_request(p))) for p in loaded]
        got = []
        pool.gates[0].set()
        for layer, prompt in enumerate(others, start=1):
            await stopped_behind_layer(node, layer, count=2)  # The third waits for the first.
            # Nothing of it is in L1, and its own load would wait for the gates, too.
            got.append((await answer(node, make_request(prompt, use_cache=False)))[0])
            pool.gates[layer].set()
        first = [tokens for tokens, _ in await asyncio.gather(*begun)]
        assert first + got == want
        assert node._engine.steps > 0 and node.report().cache_errors == ()


@pytest.mark.parametrize("layer", [1, 2])
async def test_a_load_that_turns_out_short_keeps_its_good_blocks(layer) -> None:
    pool = LosingPoolNode(number=4, layer=layer)
    async with running_node(pool) as node:
        want = await published(node)
        begun = asyncio.create_task(answer(node, make_request(PROMPT)))
        await stopped_behind_layer(node, layer)
        pool.gate.set()
        got, last = await begun
        assert got == want and last.usage.hit_tokens.l2 == 3 * 8


async def test_a_late_load_is_given_up_and_its_pages_stay_out_of_use() -> None:
    pool = GatedPoolNode()
    async with running_node(pool, load_timeout_s=0.2, l1_pages=40) as node:
        want = await published(node)
        got, last = await answer(node, make_request(PROMPT))
        assert got == want and last.usage.hit_tokens.total == 0
        assert dict(node.report().cache_errors)["load_timeout"] == 1
        await node.flush()
        await pages_in_use(node, 8)  # The late loader may still write there.
        pool.gate.set()
        await pages_in_use(node, 0)


async def test_who_finds_no_page_waits_until_a_late_loader_gives_them_back() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        want = await published(node)
    async with running_node(pool, load_timeout_s=0.1, l1_pages=12) as node:
        asked = asyncio.create_task(answer(node, make_request(PROMPT)))
        async with asyncio.timeout(10):
            while node._engine.batcher.preemptions == 0:
                await asyncio.sleep(0.001)
        assert not asked.done() and node._engine.pool.used == 7
        pool.gate.set()
        got, last = await asked
        assert got == want and last.usage.hit_tokens.total == 0


async def test_cancel_while_loading_and_while_running() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        await published(node)
        request = make_request(PROMPT, sampling={"max_tokens": 300})
        task = asyncio.create_task(answer(node, request))
        async with asyncio.timeout(10):
            while not node._engine._loads.behind:
                await asyncio.sleep(0.001)
        pool.gate.set()
        assert await node.cancel(request.request_id)
        _, last = await task
        assert last.finish_reason is FinishReason.CANCELLED
        async with aclosing(node.generate(make_request(PROMPT))) as events:
            await anext(events)
        async with asyncio.timeout(10):
            while node._engine._requests.sequences or node._engine.pool.used:
                await asyncio.sleep(0.001)
        assert not await node.cancel(request.request_id)


async def test_broken_logits_fail_their_request_only() -> None:
    async with running_node() as node:
        want, _ = await answer(node, make_request(PROMPT))
        embedding = node._engine._model.weights.embedding
        good = embedding[77].clone()
        embedding[77] = float("nan")
        bad = asyncio.create_task(answer(node, make_request([77, 1, 2, 3])))
        others = [t for t in PROMPT if t != 77]
        fine, _ = await answer(node, make_request(others, sampling={"max_tokens": 1}))
        assert len(fine) == 1
        with pytest.raises(RowLevelError, match="not finite"):
            await bad
        embedding[77] = good
        await node.drop_cache()
        # Pages that held NaN are used again without a trace of it.
        again = await asyncio.gather(*(answer(node, make_request(PROMPT)) for _ in range(9)))
        assert all(tokens == want for tokens, _ in again)


@pytest.mark.parametrize("broken", ["kernel", "weights"])
async def test_what_fails_behind_a_load_fails_alone(broken) -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        want = await published(node)
        attention, weights = node._engine._model.attention, node._engine._model.weights
        attend, norm = attention.attend, weights.final_norm.clone()

        def failing(layer, batch, q):
            raise RuntimeError("kernel failure")

        asked = asyncio.create_task(answer(node, make_request(PROMPT)))
        await stopped_behind_layer(node, 1)
        if broken == "kernel":
            attention.attend = failing
        else:
            weights.final_norm.fill_(float("nan"))
        pool.gate.set()
        with pytest.raises(TierKVError, match=r"kernel failure|not finite"):
            await asked
        attention.attend = attend
        weights.final_norm.copy_(norm)
        await pages_in_use(node, 0)
        assert (await answer(node, make_request(PROMPT)))[0] == want


async def test_stop_ids_and_eos_end_an_answer_and_are_not_in_it() -> None:
    async with running_node() as node:
        tokens, _ = await answer(node, make_request(PROMPT))
        stop = tokens[5]
        cut, last = await answer(node, make_request(PROMPT, sampling={"stop_token_ids": (stop,)}))
        assert cut == tokens[: tokens.index(stop)]
        assert last.finish_reason is FinishReason.STOP
        assert last.usage.completion_tokens == len(cut)


async def test_a_seed_repeats_alone_and_in_a_crowd() -> None:
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 4}
    async with running_node() as node:
        alone, _ = await answer(node, make_request(PROMPT, sampling=sampled))
        crowd = [make_request(PROMPT, sampling=sampled | {"seed": s}) for s in (4, 5, 6, 7)]
        got = [tokens for tokens, _ in await asyncio.gather(*(answer(node, r) for r in crowd))]
        assert got[0] == alone and any(tokens != alone for tokens in got[1:])


async def test_impossible_requests_are_refused_with_reasons() -> None:
    async with running_node(l1_pages=9) as node:
        assert node.model.context_tokens == 64
        for changes, kind in [
            ({"model": "other"}, UnknownModelError),
            ({"resumed_tokens": 61}, UserError),
            ({"sampling": {"max_tokens": 4}}, ContextTooLongError),
        ]:
            with pytest.raises(kind):
                await answer(node, make_request(PROMPT, **changes))
        for tokens in ([], [128], [-1]):
            with pytest.raises(UserError):
                await answer(node, make_request(tokens))
        fitting = make_request(PROMPT, sampling={"max_tokens": 3})
        assert len((await answer(node, fitting))[0]) == 3


async def test_a_resumed_request_at_its_limit_ends_at_once() -> None:
    async with running_node() as node:
        request = make_request(PROMPT, resumed_tokens=12)
        tokens, last = await answer(node, request)
        assert tokens == [] and last.finish_reason is FinishReason.LENGTH
        assert last.usage.prompt_tokens == 49 and last.usage.completion_tokens == 12


async def test_a_full_queue_refuses_and_a_stopped_node_is_lost() -> None:
    async with running_node(max_waiting=1, max_running=1) as node:
        long = [make_request(PROMPT, sampling={"max_tokens": 200}) for _ in range(2)]
        streams = [node.generate(request) for request in long]
        first = [asyncio.create_task(anext(stream)) for stream in streams]
        await first[0]
        with pytest.raises(OverloadedError):
            await answer(node, make_request(PROMPT))
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
    with pytest.raises(TransportError):
        await answer(node, make_request(PROMPT))


async def test_a_step_that_raises_fails_its_requests_and_the_node_lives() -> None:
    async with running_node() as node:
        forward = node._engine._model.compute

        def broken(batch):
            raise RuntimeError("kernel failure")

        node._engine._model.compute = broken
        with pytest.raises(Exception, match="kernel failure"):
            await answer(node, make_request(PROMPT))
        node._engine._model.compute = forward
        assert len((await answer(node, make_request(PROMPT)))[0]) == 12
    assert torch.is_inference_mode_enabled() is False


async def test_a_load_that_nobody_waits_for_is_not_read_to_its_end() -> None:
    pool = SteppedPoolNode(layers=3)
    async with running_node(pool) as node:
        await published(node)
        request = make_request(PROMPT)
        begun = asyncio.create_task(answer(node, request))
        pool.gates[0].set()
        await stopped_behind_layer(node, 1)
        job = next(iter(node._engine._loads.behind.values())).job
        assert await node.cancel(request.request_id)
        await begun
        reads = pool.reads
        pool.gates[1].set()
        await pages_in_use(node, 0)  # The last gate is shut: nobody reads behind it.
        assert job.given_up and job.ended.is_set() and pool.reads == reads + 1


@pytest.mark.parametrize(
    ("call", "codec"),
    [
        ("reserve", KvCodec.NONE),
        ("write_ranges", KvCodec.NONE),
        ("seal", KvCodec.NONE),
        ("seal", KvCodec.ENTROPY_FINE),
    ],
)
async def test_what_the_pool_could_not_take_is_saved_when_its_nodes_change(
    call: str, codec: KvCodec, tmp_path: Path
) -> None:
    pool = DyingPoolNode(call)
    pool.dead = True
    tables = "" if codec is KvCodec.NONE else write_calibration(tmp_path)
    async with running_node(pool, kv_codec=codec, kv_calibration=tables) as node:
        await answer(node, make_request(PROMPT))
        assert await node.flush()
        assert not pool.sealed_keys
        pool.dead = False
        node.set_pool_nodes((pool,))
        await saved_again(node, pool)


async def test_what_was_computed_before_there_was_a_pool_is_saved_when_there_is_one() -> None:
    pool = MemoryPoolNode()
    async with running_node() as node:
        await answer(node, make_request(PROMPT))
        node.set_pool_nodes((pool,))
        await saved_again(node, pool)


async def saved_again(node: ComputeNode, pool: MemoryPoolNode) -> None:
    """Wait until the pool has what L1 has; another node then computes only the last token."""
    wanted = {stored.key for stored in node.inventory()}
    assert len(wanted) == 9
    while not wanted <= pool.sealed_keys:  # Not all at once: new blocks find room in the queue.
        assert await node.flush()
    await node.drop_cache()
    _, last = await answer(node, make_request(PROMPT))
    assert last.usage is not None and last.usage.hit_tokens.l2 == 60


async def test_a_failure_is_no_reason_to_try_again_at_once() -> None:
    pool = DyingPoolNode("reserve")
    async with running_node(pool) as node:
        pool.dead = True
        await answer(node, make_request(PROMPT))
        assert await node.flush()
        pool.dead = False
        await answer(node, make_request(PROMPT[1:]))
        assert await node.flush()
        await node.check_invariants()
        assert await node.flush()
        assert len(pool.sealed_keys) == 8, "only those of the second prompt"
