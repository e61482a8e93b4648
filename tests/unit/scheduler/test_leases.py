"""What a locate found is promised: committed, prolonged or aborted, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta, chain_of, make_pool_node, store_chain
from tests.fix_scheduler import make_info
from tests.unit.scheduler.test_dispatcher import (
    QUICK,
    ask,
    expected,
    long_request,
    running,
    tokens_of,
    until,
)
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.node import NodeInfo
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.requests.stage_runner import RequestLeases
from tierkv.scheduler.routing_stats import RoutingStats

CHEAP_LOADS = replace(QUICK, prefill_tokens_per_s=10.0, lease_s=10.0)


@pytest.fixture
async def meta() -> AsyncIterator[BreakableMeta]:
    """A directory that knows two blocks of ``long_request`` in the memory of a far pool node."""
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), chain_of(long_request()), [Tier.L2] * 2)
    yield meta
    assert meta.leases.unknown == meta.leases.expired, "a lease was ended twice"
    await meta.close()


async def order_of_pool_node(meta: BreakableMeta) -> HoldOrder:
    node = make_pool_node()
    async with aclosing(meta.holds(node.node_id, node.incarnation)) as orders:
        return await anext(orders)


def two() -> tuple[NodeInfo, NodeInfo]:
    return make_info("c1"), make_info("c2")


async def test_a_lease_is_committed_at_the_first_token(meta: BreakableMeta) -> None:
    async with running(*two(), config=CHEAP_LOADS, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: any(node.running for node in cluster.nodes.values()))
        order = await order_of_pool_node(meta)
        assert (list(order.keys), order.ttl_s) == (chain_of(long_request()), 10.0)
        for node in cluster.nodes.values():
            node.gate.set()
        await answer
        await until(lambda: meta.leases.committed == 1)
        assert (meta.leases.granted, meta.leases_live) == (1, 0)
        stats = cluster.dispatcher.snapshot()
        assert (stats.leases_reserved, stats.leases_committed, stats.leases_aborted) == (1, 1, 0)


async def test_nothing_is_kept_for_who_has_it_all_or_wants_none_of_it(
    meta: BreakableMeta,
) -> None:
    await store_chain(meta, make_info("c2"), chain_of(long_request()), [Tier.L1] * 2)
    slow_pool = replace(CHEAP_LOADS, l3_bytes_per_s=10.0)
    async with running(*two(), config=slow_pool, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: meta.leases.aborted == 1)
        assert cluster["c2"].running
        for node in cluster.nodes.values():
            node.gate.set()
        await answer
        assert (meta.leases.granted, meta.leases_live) == (1, 0)


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_a_request_that_ends_before_its_first_token_aborts_its_lease(
    meta: BreakableMeta, how: str
) -> None:
    async with running(*two(), config=CHEAP_LOADS, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: any(node.running for node in cluster.nodes.values()))
        if how == "lost":
            for node in cluster.nodes.values():
                node.die_after, node.stays_dead = 0, True
                node.gate.set()
        else:
            answer.cancel()
        await asyncio.wait([answer])
        assert answer.cancelled() is (how == "closed")
        if how == "lost":
            assert isinstance(answer.exception(), NodeLostError)
        await until(lambda: meta.leases.aborted == 1)
        assert (meta.leases.granted, meta.leases_live) == (1, 0)


async def test_the_lease_of_who_waits_is_prolonged(meta: BreakableMeta) -> None:
    config = replace(CHEAP_LOADS, lease_s=0.03, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config, meta=meta) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        second = asyncio.create_task(ask(cluster, long_request("q2")))
        await until(lambda: meta.leases.extended >= 3)
        assert (meta.leases.granted, meta.leases_live) == (1, 1)
        cluster["c1"].gate.set()
        await asyncio.gather(first, second)
        await until(lambda: meta.leases.committed == 1)


async def test_a_lease_that_ran_out_is_forgotten_and_the_answer_still_comes(
    meta: BreakableMeta,
) -> None:
    config = replace(CHEAP_LOADS, lease_s=0.03)
    async with running(*two(), config=config, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: meta.leases.extended >= 1)
        meta.clock.advance(1.0)
        await until(lambda: cluster.dispatcher.snapshot().leases_lost == 1)
        assert (meta.leases.expired, meta.leases_live) == (1, 0)
        for node in cluster.nodes.values():
            node.gate.set()
        assert tokens_of(await answer) == await expected()
    assert not meta.asked["end_lease"]


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_lost_directory_delays_no_answer(meta: BreakableMeta, hangs: bool) -> None:
    config = replace(CHEAP_LOADS, locate_timeout_s=0.05)
    async with running(*two(), config=config, meta=meta) as cluster:
        await asyncio.gather(*(ask(cluster, long_request(f"w{at}")) for at in range(3)))
        await until(lambda: not meta.leases_live)
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: any(node.running for node in cluster.nodes.values()))
        if hangs:
            meta.gate.clear()
        else:
            meta.down = True
        for node in cluster.nodes.values():
            node.gate.set()
        assert tokens_of(await answer) == await expected()
        await until(lambda: cluster.dispatcher.snapshot().leases_lost == 1)
        errors = dict(cluster.dispatcher.snapshot().cache_errors)
        assert errors["directory_unavailable"] >= 1


async def test_stopping_leaves_no_lease_behind(meta: BreakableMeta) -> None:
    async with running(*two(), config=CHEAP_LOADS, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: meta.leases_live == 1)
        await cluster.dispatcher.stop()
        assert not meta.leases_live
        answer.cancel()
        await asyncio.wait([answer])


async def test_a_lease_that_comes_after_the_stop_runs_out_by_itself(
    meta: BreakableMeta,
) -> None:
    stats = RoutingStats(8)
    directory = DirectoryClient(meta, config=QUICK, stats=stats, clock=SystemClock())
    leases = RequestLeases(directory, stats, lease_s=10.0)
    await leases.stop(timeout_s=1.0)
    leases.keep(LeaseId(7))
    leases.abort(LeaseId(7))
    assert len(leases) == 0 and len(asyncio.all_tasks()) == 1


async def test_without_a_promise_nothing_is_counted() -> None:
    async with running(*two()) as cluster:
        await ask(cluster)
        assert cluster.dispatcher.snapshot().leases_reserved == 0
        assert not cluster.meta.asked["end_lease"]
