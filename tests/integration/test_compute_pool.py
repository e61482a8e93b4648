"""A compute node over real DMP nodes and a real directory: L2 by shared memory, L3 by TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_meta import BreakableMeta
from tests.fix_model import answer, make_request, running_node
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.ids import HostId
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.reporter import MetaReporter

pytestmark = pytest.mark.integration
PROMPT = [i * 7 % 128 for i in range(70)]
MakeRig = Callable[..., Rig]


async def computed() -> list[int]:
    async with running_node() as node:
        return (await answer(node, make_request(PROMPT, use_cache=False)))[0]


def connected(rig: Rig, host: str) -> PoolNode:
    info = rig.node.reports.info(data_address=rig.server.address)
    return connect_pool_node(info, host=HostId(host))


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:  # noqa: F811
    return make_rig(capacity_bytes=16 << 20, extent_bytes=1 << 20)


@pytest.mark.parametrize(("host", "tier"), [("here", "l2"), ("elsewhere", "l3")])
async def test_a_restarted_node_loads_what_the_first_one_published(rig, host, tier) -> None:
    want = await computed()
    for life in range(2):
        pool = connected(rig, host)
        try:
            async with running_node(pool, host=host) as node:
                got, last = await answer(node, make_request(PROMPT))
                assert got == want
                assert getattr(last.usage.hit_tokens, tier) == 64 * life
                assert await node.flush()
                assert node.report().cache_errors == ()
        finally:
            pool.close()


async def test_a_flipped_bit_is_found_counted_and_recomputed(rig) -> None:
    want = await computed()
    pool = connected(rig, "here")
    try:
        async with running_node(pool) as node:
            await answer(node, make_request(PROMPT))
            await node.flush()
            slot = rig.node.reports.inventory()[3].location.slot
            size = rig.node._state.table.extents.of(slot).slot_bytes
            rig.node.segment.payload(slot, size, 100, 101)[0] ^= 4
            await node.drop_cache()
            got, last = await answer(node, make_request(PROMPT))
            assert got == want
            assert dict(node.report().cache_errors)["checksum_mismatch"] >= 1
            assert last.usage.hit_tokens.l2 < 64
            assert rig.node.reports.stats().quarantined_slots == 1
    finally:
        pool.close()


async def test_a_stopped_dmp_node_is_only_a_miss(rig) -> None:
    want = await computed()
    pool = connected(rig, "elsewhere")
    try:
        async with running_node(pool, host="elsewhere") as node:
            await answer(node, make_request(PROMPT))
            await node.flush()
            await node.drop_cache()
            rig.server.stop()
            got, last = await answer(node, make_request(PROMPT))
            assert got == want and last.usage.hit_tokens.total == 0
            assert dict(node.report().cache_errors)["transport_error"] >= 1
    finally:
        pool.close()


@asynccontextmanager
async def directory_of(rig: Rig) -> AsyncIterator[BreakableMeta]:
    """A meta server that hears of everything the DMP node holds."""
    meta = BreakableMeta()
    info = rig.node.reports.info(data_address=rig.server.address)
    reporter = MetaReporter(info.node_id, info.incarnation, rig.node.reports.inventory)
    agent = NodeAgent(meta, info, reporter, rig.node.reports.report)
    await agent.start()
    await agent.flush()
    try:
        yield meta
    finally:
        await agent.stop()
        await meta.close()


async def test_the_directory_leads_to_another_host_and_its_death_is_only_slower(rig) -> None:
    want = await computed()
    pool = connected(rig, "elsewhere")
    try:
        async with running_node(pool, host="elsewhere") as first:
            await answer(first, make_request(PROMPT))
            await first.flush()
        async with (
            directory_of(rig) as meta,
            running_node(pool, meta=meta, host="elsewhere") as node,
        ):
            got, last = await answer(node, make_request(PROMPT))
            assert got == want and last.usage.hit_tokens.l3 == 64
            await node.flush()  # Blocks being published keep their pages.
            meta.down = True
            await node.drop_cache()
            got, last = await answer(node, make_request(PROMPT))
            assert got == want and last.usage.hit_tokens.l3 == 69  # Found by rendezvous.
            assert dict(node.report().cache_errors) == {"directory_unavailable": 2}
    finally:
        pool.close()
