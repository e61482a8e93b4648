"""Chunks in real DMP nodes: over shared memory and TCP, spoilt, lost, and led to by a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.fix_blend import DOCS, HEAD, doc_request, exact, exact_keys, hits, known
from tests.fix_dmp import Rig, make_rig  # noqa: F401 - a fixture
from tests.fix_model import answer, make_request, running_node
from tierkv.compute.config import LoadPolicy
from tierkv.compute.node import ComputeNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block import ChunkNamer
from tierkv.kvcore.ids import HostId
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.reporter import MetaReporter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
A, B, C, *_ = DOCS
MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:  # noqa: F811
    return make_rig(capacity_bytes=16 << 20, extent_bytes=1 << 20)


@asynccontextmanager
async def node_of(rig: Rig, host: str, meta: LocalMeta | None = None) -> AsyncIterator[ComputeNode]:
    """Start a compute node that reaches the rig from a host."""
    info = rig.node.reports.info(data_address=rig.server.address)
    pool = connect_pool_node(info, host=HostId(host))
    try:
        async with running_node(pool, meta=meta, host=host) as node:
            yield node
    finally:
        pool.close()


@pytest.mark.parametrize(("host", "tier"), [("here", "l2"), ("elsewhere", "l3")])
async def test_chunks_that_one_node_left_are_blended_by_another(rig, host, tier) -> None:
    async with node_of(rig, "here") as first:
        await known(first, A, B, C)
    for selector in BlendSelector:
        async with node_of(rig, host) as node:
            asked = doc_request([C, B, A], ratio=1.0, selector=selector)
            got, last = await answer(node, asked)
            assert got == await exact(node, asked) and last.usage.recomputed_tokens == 102
            await node.flush()
            await node.drop_cache()
            sparing = doc_request([C, B, A], ratio=0.2, selector=selector)
            tokens, last = await answer(node, sparing)
            assert hits(last) == {tier: 8 + 81} and last.usage.recomputed_tokens == 21
            assert await node.flush() and node.report().cache_errors == ()
            names = set(exact_keys(asked, tokens)[1:])
            assert not names & {block.key for block in node.inventory()}
            assert not names & {block.key for block in rig.node.reports.inventory()}


async def test_a_flipped_bit_in_a_chunk_costs_only_time(rig) -> None:
    async with node_of(rig, "here") as node:
        await known(node, A, B, C)
        asked = doc_request([B, C, A], ratio=1.0)
        prefix, key = asked.token_ids[: len(HEAD)], asked.namespace_key
        name = ChunkNamer(key, prefix).block_keys(C, block_tokens=8)[2]
        slot = next(
            block.location.slot for block in rig.node.reports.inventory() if block.key == name
        )
        size = rig.node._state.table.extents.of(slot).slot_bytes
        rig.node.segment.payload(slot, size, 5, 6)[0] ^= 4
        got, last = await answer(node, asked)
        assert got == await exact(node, asked) and last.usage.recomputed_tokens == len(B)
        assert dict(node.report().cache_errors)["checksum_mismatch"] >= 1
        assert rig.node.reports.stats().quarantined_slots == 1


async def test_a_lost_node_costs_only_time(rig) -> None:
    async with node_of(rig, "elsewhere") as node:
        await known(node, A, B)
        rig.server.stop()
        asked = doc_request([B, A], ratio=1.0)
        got, last = await answer(node, asked)
        assert got == await exact(node, asked) and last.usage.selector is None
        assert dict(node.report().cache_errors)["transport_error"] >= 1
        # It was missing, so it was computed for itself: now L1 has it.
        assert await node.flush()
        got, last = await answer(node, doc_request([A, B], ratio=1.0))
        assert got == await exact(node, doc_request([A, B])) and last.usage.recomputed_tokens == 73


async def test_the_directory_leads_to_chunks(rig) -> None:
    async with node_of(rig, "elsewhere") as first:
        await known(first, A, B, C)
    meta = LocalMeta()
    info = rig.node.reports.info(data_address=rig.server.address)
    reporter = MetaReporter(info.node_id, info.incarnation, rig.node.reports.inventory)
    agent = NodeAgent(meta, info, reporter, rig.node.reports.report)
    await agent.start()
    await agent.flush()
    try:
        async with node_of(rig, "elsewhere", meta) as node:
            unknown = make_request(DOCS[3]).token_ids
            asked = doc_request([B, unknown, C], ratio=1.0)
            got, last = await answer(node, asked)
            assert got == await exact(node, asked)
            assert last.usage.recomputed_tokens == len(B) + len(C)
            assert node.report().cache_errors == ()
    finally:
        await agent.stop()
        await meta.close()


@pytest.mark.parametrize("codec", [KvCodec.FP8, KvCodec.INT8])
async def test_chunks_pass_through_a_codec(rig, codec) -> None:
    async with node_of(rig, "here") as node:
        await known(node, A, B, kv_codec=codec)
        asked = doc_request([B, A], ratio=1.0, kv_codec=codec)
        got, last = await answer(node, asked)
        assert last.usage.recomputed_tokens == 73 and last.usage.kv_codec is codec
        await node.flush()
        await node.drop_cache()
        _, last = await answer(node, doc_request([B, A], kv_codec=codec))
        assert hits(last) == {"l2": 8 + 73 - 15}
        assert node.report().cache_errors == ()
        plain = replace(asked, blend=None)
        await node.drop_cache()
        assert (await answer(node, plain))[0] == got, "both after one block through the codec"


async def test_the_controller_may_choose_and_the_answer_stays_exact(rig, monkeypatch) -> None:
    info = rig.node.reports.info(data_address=rig.server.address)
    pool = connect_pool_node(info, host=HostId("here"))
    try:
        async with running_node(pool, load_policy=LoadPolicy.AUTO) as node:
            # Steps of this model are so short that no lookup and no load would be worth its time.
            tiers = node._engine.tiers
            tiers.figures.steps.calibrate([(1, 1, 0.05, 1), (64, 2080, 3.0, 1)])
            monkeypatch.setattr(tiers.figures.steps, "add", lambda *step: None)
            monkeypatch.setattr(tiers, "wants_locate", lambda *figures: True)
            for number, docs in enumerate(([A, B, C], [C, B, A], [B, C, A], [B, A])):
                for ratio in (0.2, 1.0):
                    asked = doc_request(docs, ratio=ratio)
                    got, last = await answer(node, asked)
                    usage = last.usage
                    assert usage.blended_tokens or got == await exact(node, asked)
                    assert usage.selector is None or usage.recomputed_tokens
                await node.flush()
                if number % 2:
                    await node.drop_cache()
            kinds = {record.kind for record in node.load_decisions()}
            assert kinds and kinds <= {"blend", "load", "part", "compute"}
    finally:
        pool.close()
