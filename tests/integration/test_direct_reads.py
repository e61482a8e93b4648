"""KV that a device reads from the pool's memory itself; the CPU stands in for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node
from tierkv.compute.tiers.host_memory import HostMemory
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.kvcore.ids import HostId
from tierkv.kvcore.layout import KvCodec

pytestmark = pytest.mark.integration
PROMPT = [i * 7 % 128 for i in range(70)]


class StagedNode(ShmPoolNode):
    """Counts the ranges that were copied on the host."""

    staged = 0

    def read_ranges(self, reads) -> None:
        self.staged += len(reads)
        super().read_ranges(reads)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:  # noqa: F811
    return make_rig(capacity_bytes=16 << 20, extent_bytes=1 << 20)


@pytest.fixture
def pool(rig) -> Iterator[StagedNode]:
    info = rig.node.reports.info(data_address=rig.server.address)
    node = connect_pool_node(info, host=HostId("here"))
    node.__class__ = StagedNode
    assert isinstance(node, StagedNode)
    yield node
    node.close()


def driver(monkeypatch, *, code: int = 0) -> HostMemory:
    """A driver that answers every registration with a code; the next node uses it."""
    memory = HostMemory(lambda address, size: code, lambda address: 0)
    monkeypatch.setattr("tierkv.compute.node.host_memory", lambda: memory)
    return memory


async def computed(**changes: Any) -> list[int]:
    async with running_node() as node:
        return (await answer(node, make_request(PROMPT, use_cache=False, **changes)))[0]


def stored(node, tokens: int) -> torch.Tensor:
    """Return the KV of the prompt's blocks in L1."""
    pages = [node._engine.pool.lookup([key])[0] for key in list(node._stored)[: tokens // 8]]
    return node._pages.kv[:, pages].clone()


async def test_blocks_come_back_bit_for_bit_without_a_copy_on_the_host(pool, monkeypatch) -> None:
    want = await computed()
    memory = driver(monkeypatch)
    async with running_node(pool) as node:
        await answer(node, make_request(PROMPT))
        assert await node.flush()
        before = stored(node, 64)
        await node.drop_cache()
        got, last = await answer(node, make_request(PROMPT))
        assert got == want and last.usage.hit_tokens.l2 >= 64
        assert torch.equal(stored(node, 64), before)
        assert pool.staged == 0 and memory.pinned_bytes >= 1 << 20
        assert node.report().cache_errors == ()
        node.set_pool_nodes([])
    assert memory.pinned_bytes == 0


@pytest.mark.parametrize("codec", [KvCodec.FP8, KvCodec.INT8])
async def test_encoded_blocks_are_decoded_on_the_device(pool, monkeypatch, codec) -> None:
    async with running_node(pool, kv_codec=codec) as node:
        await answer(node, make_request(PROMPT))
        assert await node.flush()
    answers, staged = [], [0]
    for directly in (False, True):
        if directly:
            driver(monkeypatch)
        async with running_node(pool, kv_codec=codec) as node:
            tokens, last = await answer(node, make_request(PROMPT))
            answers.append(tokens)
            assert last.usage.hit_tokens.l2 >= 64
            assert await node.flush()
        staged.append(pool.staged)
    assert answers[0] == answers[1]
    assert 0 < staged[1] == staged[2]


async def test_memory_that_the_driver_refuses_is_copied(pool, monkeypatch) -> None:
    want = await computed()
    driver(monkeypatch, code=712)
    async with running_node(pool) as node:
        await answer(node, make_request(PROMPT))
        assert await node.flush()
        await node.drop_cache()
        got, last = await answer(node, make_request(PROMPT))
        assert got == want and last.usage.hit_tokens.l2 >= 64
    assert pool.staged > 0


async def test_a_flipped_bit_is_found_and_recomputed(rig, pool, monkeypatch) -> None:
    want = await computed()
    driver(monkeypatch)
    async with running_node(pool) as node:
        await answer(node, make_request(PROMPT))
        await node.flush()
        slot = rig.node.reports.inventory()[3].location.slot
        size = rig.node._state.table.extents.of(slot).slot_bytes
        rig.node.segment.payload(slot, size, 100, 101)[0] ^= 4
        await node.drop_cache()
        got, last = await answer(node, make_request(PROMPT))
        assert got == want and last.usage.hit_tokens.l2 < 64
        assert dict(node.report().cache_errors)["checksum_mismatch"] >= 1
        assert rig.node.reports.stats().quarantined_slots == 1
