"""Blocks that memory has no room for come back from disk (L4), and the tokens stay the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_dmp import Rig, dirty_bytes, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node
from tierkv.compute.config import LoadPolicy
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block import Tier
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import HostId
from tierkv.kvcore.node import TierStats
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.reporter import MetaReporter
from tierkv.storage.l4 import L4Store

pytestmark = pytest.mark.integration
PROMPTS = [[(i * 7 + p * 13) % 128 for i in range(70)] for p in range(6)]
MakeRig = Callable[..., Rig]
HIT_TOKENS = 64


@pytest.fixture
def small_rig(make_rig: MakeRig, tmp_path: Path) -> Callable[[], Rig]:  # noqa: F811
    """A node whose memory holds two of the prompts, above a disk that holds all."""

    def make() -> Rig:
        return make_rig(
            clock=SystemClock(),
            open_lower=lambda: L4Store.open(tmp_path / "disk", capacity_bytes=16 << 20),
            capacity_bytes=16 * (64 << 10),
            extent_bytes=64 << 10,
            demote_above=0.0,
        )

    return make


async def plain_answers() -> list[list[int]]:
    async with running_node() as node:
        return [(await answer(node, make_request(p, use_cache=False)))[0] for p in PROMPTS]


class Told:
    """A directory that hears of everything the rig's node holds."""

    def __init__(self, rig: Rig) -> None:
        self.meta = LocalMeta()
        info = rig.node.reports.info(data_address=rig.server.address)
        reporter = MetaReporter(info.node_id, info.incarnation, rig.node.reports.inventory)
        self.agent = NodeAgent(self.meta, info, reporter, rig.node.reports.report)

    async def __aenter__(self) -> Told:
        await self.agent.start()
        await self.agent.flush()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.agent.stop()
        await self.meta.close()


def disk_stats(rig: Rig) -> TierStats:
    (found,) = [stats for stats in rig.node.reports.report().tiers if stats.tier is Tier.L4]
    return found


async def publish_all(rig: Rig, want: list[list[int]]) -> None:
    pool = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId("here")
    )
    try:
        async with running_node(pool) as node:
            for prompt, tokens in zip(PROMPTS, want, strict=True):
                got, _ = await answer(node, make_request(prompt))
                assert got == tokens
                assert await node.flush()
                while dirty_bytes(rig.node._state.table):  # pytest-timeout is the deadline
                    rig.node._stopping.wait(0.01)
    finally:
        pool.close()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
@pytest.mark.parametrize("with_directory", [True, False])
async def test_evicted_blocks_come_back_from_disk(small_rig, host, with_directory) -> None:
    want = await plain_answers()
    rig = small_rig()
    await publish_all(rig, want)
    assert rig.node.reports.stats().memory.evicted_blocks > 0
    pool = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId(host)
    )
    try:
        async with (
            Told(rig) as told,
            running_node(pool, meta=told.meta if with_directory else None, host=host) as node,
        ):
            from_disk = 0
            for prompt, tokens in zip(PROMPTS, want, strict=True):
                got, last = await answer(node, make_request(prompt))
                assert got == tokens
                assert last.usage.hit_tokens.total == HIT_TOKENS
                from_disk += last.usage.hit_tokens.l4
                await node.flush()
            assert from_disk >= 3 * HIT_TOKENS  # Which blocks were evicted depends on who was last.
            assert disk_stats(rig).promoted_blocks >= from_disk // 16
            (seen,) = [t for t in node.report().tiers if t.tier is Tier.L4]
            assert seen.hit_tokens == from_disk and seen.read_bytes > 0
            assert node.report().cache_errors == ()
    finally:
        pool.close()


async def test_a_lost_segment_leaves_the_disk(small_rig) -> None:
    want = await plain_answers()
    rig = small_rig()
    await publish_all(rig, want)
    rig.stop()
    rig.node.config.segment_file.unlink()
    rig = small_rig()
    assert rig.node.reports.stats().memory.blocks_used == 0
    pool = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId("here")
    )
    try:
        async with Told(rig) as told, running_node(pool, meta=told.meta) as node:
            got, last = await answer(node, make_request(PROMPTS[0]))
            assert got == want[0]
            assert last.usage.hit_tokens.l4 == HIT_TOKENS
    finally:
        pool.close()


async def test_loads_at_once_do_not_take_the_room_from_each_other(small_rig) -> None:
    """Memory has room for two prompts: each load waits for the blocks it finds no room for."""
    want = await plain_answers()
    rig = small_rig()
    await publish_all(rig, want)
    pool = connect_pool_node(
        rig.node.reports.info(data_address=rig.server.address), host=HostId("here")
    )
    try:
        async with (
            Told(rig) as told,
            running_node(pool, meta=told.meta, load_policy=LoadPolicy.ALWAYS) as node,
        ):
            for _ in range(5):
                answers = await asyncio.gather(
                    *(answer(node, make_request(prompt)) for prompt in PROMPTS)
                )
                assert [tokens for tokens, _ in answers] == want
                hits = [last.usage.hit_tokens.total for _, last in answers]
                assert min(hits) >= HIT_TOKENS, hits
                await node.drop_cache()
            assert node.report().cache_errors == ()
    finally:
        pool.close()
