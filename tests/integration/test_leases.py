"""What a locate reserved is still there, whatever comes: meta server, DMP node and compute node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fix_dmp import block_key, fetch, make_range, store
from tests.fix_model import answer, make_request, node_config
from tierkv.compute.node import ComputeNode
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import block_keys
from tierkv.kvcore.block_event import NO_LEASE
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NamespaceKey, NodeId
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.grpc_client import GrpcMeta
from tierkv.metaserver.rpc.server import MetaServer
from tierkv.parts.compute_part import ComputePart
from tierkv.parts.parts import DmpPart

pytestmark = pytest.mark.integration
RESERVE_S = 600.0
CHAIN = [("a", None), ("b", "a"), ("c", "b")]
CHAIN_KEYS = [block_key(name) for name, _ in CHAIN]
PROMPT = [i * 7 % 128 for i in range(65)]


class JumpingClock(SystemClock):
    """The real time, and what a test adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


@pytest.fixture
async def meta() -> AsyncIterator[MetaClient]:
    server = MetaServer(MetaConfig(address="127.0.0.1:0"))
    client = GrpcMeta(await server.start(), timeout_s=10.0)
    yield client
    await client.close()
    await server.stop()


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
async def dmp(meta: MetaClient, clock: JumpingClock, tmp_path: Path) -> AsyncIterator[DmpPart]:
    """A node with room for 20 blocks."""
    config = DmpConfig(
        node_id=NodeId("dmp-a"),
        host=HostId("here"),
        segment_path=str(tmp_path / "a.seg"),
        capacity_bytes=1 << 20,
        extent_bytes=1 << 18,
        scrub_rate_bytes_per_s=0,
        eviction_policy="leaf_lru",  # The flood goes through all that is not held.
    )
    part = DmpPart(config, meta, listen=False, clock=clock)
    await part.start()
    yield part
    part.node.check_invariants()
    await part.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():
            await asyncio.sleep(0.005)


async def chain_gone_after_flood(dmp: DmpPart, prefix: str) -> bool:
    """Store five times what fits; answers whether the chain is gone, which must be whole or not."""
    pool = InprocPoolNode(dmp.node)
    for number in range(100):
        store(pool, f"{prefix}{number}")
    places = pool.lookup(CHAIN_KEYS)
    assert len({place is None for place in places}) == 1
    for (name, _), place in zip(CHAIN, places, strict=True):
        if place is not None:
            assert fetch(pool, place) == [make_range(name, 0), make_range(name, 1)]
    return places[0] is None


async def reserve_chain(meta: MetaClient, dmp: DmpPart) -> int:
    pool = InprocPoolNode(dmp.node)
    for name, parent in CHAIN:
        store(pool, name, parent)
    await dmp.flush()
    reply = await meta.locate(CHAIN_KEYS, reserve_s=RESERVE_S)
    assert reply.prefix_blocks == 3 and reply.lease != NO_LEASE
    await until(lambda: dmp.node.reports.stats().leased_blocks == 3)
    return reply.lease


async def test_a_pool_keeps_what_was_reserved_until_the_lease_is_ended(meta, dmp) -> None:
    lease = await reserve_chain(meta, dmp)
    assert not await chain_gone_after_flood(dmp, "x")
    assert await meta.end_lease(lease, used=True)
    await until(lambda: dmp.node.reports.stats().leased_blocks == 0)
    assert await chain_gone_after_flood(dmp, "y")


async def test_a_pool_lets_go_when_the_time_is_over(meta, dmp, clock) -> None:
    lease = await reserve_chain(meta, dmp)
    clock.ahead_s += RESERVE_S - 60.0
    assert not await chain_gone_after_flood(dmp, "x")
    assert await meta.extend_lease(lease, ttl_s=RESERVE_S)
    held = dmp.node._state.table.leases._holds._leases[lease]
    await until(lambda: held.until > clock.now() + 120.0)
    clock.ahead_s += 120.0
    assert not await chain_gone_after_flood(dmp, "y")
    clock.ahead_s += RESERVE_S
    assert await chain_gone_after_flood(dmp, "z")


@pytest.fixture
async def compute(meta: MetaClient, clock: JumpingClock) -> AsyncIterator[ComputePart]:
    """A node whose L1 holds 20 blocks of 8 tokens."""
    part = ComputePart(node_config(l1_pages=21, eviction_policy="leaf_lru"), meta, clock=clock)
    await part.start()
    yield part
    await part.node.check_invariants()
    await part.stop()


async def hits_after_flood(node: ComputeNode, first: int) -> int:
    """Answer prompts that need L1 several times over, then the reserved one; its hit tokens."""
    for number in range(first, first + 8):
        await answer(node, make_request([number, *PROMPT]))
    want, _ = await answer(node, make_request(PROMPT, use_cache=False))
    got, last = await answer(node, make_request(PROMPT))
    assert got == want and last.usage is not None
    return last.usage.hit_tokens.l1


async def reserve_prompt(meta: MetaClient, part: ComputePart) -> int:
    await answer(part.node, make_request(PROMPT))
    await part.flush()
    keys: list[BlockKey] = block_keys(NamespaceKey(b"n" * 32), PROMPT[:64], block_tokens=8)
    reply = await meta.locate(keys, reserve_s=RESERVE_S)
    assert reply.lease != NO_LEASE and reply.coverage[0].l1_blocks == 8
    pool = part.node._engine.pool
    await until(lambda: pool.holds.held == 8)
    return reply.lease


async def test_a_compute_node_keeps_what_was_reserved_until_the_lease_is_ended(
    meta, compute
) -> None:
    lease = await reserve_prompt(meta, compute)
    assert await hits_after_flood(compute.node, 10) == 64
    assert await meta.end_lease(lease, used=False)
    await until(lambda: compute.node._engine.pool.holds.held == 0)
    assert await hits_after_flood(compute.node, 30) == 0


async def test_a_compute_node_lets_go_when_the_time_is_over(meta, compute, clock) -> None:
    await reserve_prompt(meta, compute)
    clock.ahead_s += RESERVE_S - 60.0
    assert await hits_after_flood(compute.node, 10) == 64
    clock.ahead_s += 120.0
    assert await hits_after_flood(compute.node, 30) == 0


async def test_requests_that_need_all_pages_win_over_a_lease(meta, compute) -> None:
    await reserve_prompt(meta, compute)
    long_prompt = [3, *PROMPT, *PROMPT]  # 17 blocks and the answer's.
    want, _ = await answer(compute.node, make_request(long_prompt, use_cache=False))
    got, _ = await answer(compute.node, make_request(long_prompt))
    assert got == want
