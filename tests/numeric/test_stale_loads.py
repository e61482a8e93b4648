"""Loads that somebody else's pages or blocks took over meanwhile: what comes late is not believed.

The engine is driven step by step here, so that what races on a busy node comes in a fixed order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from tests.fix_blend import doc_request, some_tokens  # noqa: E402
from tests.fix_model import answer, make_request, node_config  # noqa: E402
from tests.fix_model import layerwise_node as running_node  # noqa: E402
from tests.fix_pool import MemoryPoolNode  # noqa: E402
from tierkv.compute.batching.answers import Delivery  # noqa: E402
from tierkv.compute.batching.sequence import Phase, make_sequence  # noqa: E402
from tierkv.compute.engine.engine import Engine  # noqa: E402
from tierkv.compute.node import ComputeNode  # noqa: E402
from tierkv.compute.tiers.chunk_lookup import prompt_chunks  # noqa: E402
from tierkv.kvcore.ids import Incarnation  # noqa: E402

PROMPT = some_tokens(31)
HEAD = some_tokens(16)
_WAIT_S = 20.0


class GatedPoolNode(MemoryPoolNode):
    """Lookups, and reads of some layers, wait while a gate is there and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup_gate: threading.Event | None = None
        self.read_gates: dict[int, threading.Event] = {}

    def lookup(self, keys):
        gate = self.lookup_gate
        assert gate is None or gate.wait(_WAIT_S)
        return super().lookup(keys)

    def read_ranges(self, reads):
        gate = self.read_gates.get(reads[0].index)
        assert gate is None or gate.wait(_WAIT_S)
        super().read_ranges(reads)


@contextmanager
def engine_at_rest(pool: GatedPoolNode, **changes) -> Iterator[Engine]:
    """Make a node whose engine steps only when it is told to."""
    config = node_config(load_read_bytes=0, **changes)
    node = ComputeNode(config, incarnation=Incarnation(2))
    node.set_pool_nodes([pool])
    engine = node._engine
    engine.tiers.publisher.start(engine.saved)
    try:
        with torch.inference_mode():
            yield engine
    finally:
        for gate in (pool.lookup_gate, *pool.read_gates.values()):
            if gate is not None:
                gate.set()
        engine.tiers.stop()


async def test_a_lookup_that_was_given_up_does_not_answer_a_later_one() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        tokens, _ = await answer(node, make_request(PROMPT, handoff=True))  # Leaves a tail of 7.
        assert await node.flush()
    with engine_at_rest(pool, load_timeout_s=0.01) as engine:
        batcher, loads = engine.batcher, engine._loads
        resumed = make_request([*PROMPT, *tokens], resumed_tokens=1)
        seq = make_sequence(1, resumed, arrival_s=0.0, block_tokens=8)
        batcher.add(seq)
        assert [miss.seq for miss in batcher.admit()] == [seq]
        batcher.plan(0.0, lookups=[seq])
        first = pool.lookup_gate = threading.Event()
        loads.locate(seq)
        while seq.phase is Phase.LOCATING:
            loads.check_deadlines()
        for _ in range(3):
            (chunk,) = batcher.plan(0.0).chunks
            batcher.computed(chunk, (5,), ())
        batcher.preempt(seq)
        batcher.pool.drop_unused()
        assert [miss.seq for miss in batcher.admit()] == [seq]
        batcher.plan(0.0, lookups=[seq])
        second = pool.lookup_gate = threading.Event()
        loads.locate(seq)
        first.set()  # It found three blocks and a tail, which is no fourth block any more.
        engine.inbox.run_pending(wait=True, timeout_s=_WAIT_S)
        second.set()
        while not loads.behind:
            engine.inbox.run_pending(wait=True, timeout_s=_WAIT_S)
        assert loads.behind[1].order.pages == tuple(seq.pages) and len(seq.pages) == 3
        batcher.end(seq)


async def test_a_chunk_that_gave_way_computes_no_further_behind_its_load() -> None:
    pool = GatedPoolNode()
    async with running_node(pool) as node:
        await answer(node, make_request([*HEAD, 1]))
        prompt = PROMPT[:8]
        want, _ = await answer(node, make_request(prompt, use_cache=False))
        assert await node.flush()
    pool.read_gates = {1: threading.Event(), 2: threading.Event()}
    out: list[Delivery] = []
    with engine_at_rest(pool, l1_pages=9) as engine:
        engine._deliver = out.extend
        request = doc_request([some_tokens(16)], head=HEAD)
        engine.isolation.want(request, prompt_chunks(request, block_tokens=8)[0])
        while not any(load.chunk for load in engine._loads.behind.values()):
            engine._step()
            engine.inbox.run_pending(wait=True, timeout_s=0.05)
        (loading,) = engine._loads.behind.values()
        engine.submit(1, make_request(prompt))
        engine.inbox.run_pending(wait=True, timeout_s=_WAIT_S)
        engine._step()
        pool.read_gates[1].set()
        assert loading.job.layer_ready[1].wait(_WAIT_S)
        # Too long for the pages that are left: the chunk ends, and the first one takes its pages.
        engine.submit(2, make_request(some_tokens(20)))
        while not any(one.seq_id == 1 and getattr(one.event, "usage", None) for one in out):
            engine.inbox.run_pending(wait=False, timeout_s=0.0)
            engine._step()
            engine._flush_out()
        got = [token for one in out if one.seq_id == 1 for token in one.event.token_ids]
        assert got == want
        for seq in list(engine._requests.sequences.values()):
            engine._requests.drop(seq)
