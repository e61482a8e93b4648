"""What a locate found is promised: committed, prolonged or aborted, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fix_scheduler import FakeMeta, make_info
from tests.unit.scheduler.test_dispatcher import (
    QUICK,
    ask,
    expected,
    long_request,
    running,
    tokens_of,
    until,
)
from tierkv.kvcore.block_event import NO_LEASE, LeaseId
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.ids import BlockKey, HostId
from tierkv.kvcore.node import NodeInfo
from tierkv.metaserver.client import MAX_LISTED_REPLICAS, LocateReply, NodeCoverage
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.requests.stage_runner import RequestLeases
from tierkv.scheduler.routing_stats import RoutingStats

IN_POOL = LocateReply(prefix_blocks=2, memory_blocks=2)
CHEAP_LOADS = replace(QUICK, prefill_tokens_per_s=10.0, lease_s=10.0)


class LeaseMeta(FakeMeta):
    """A directory that gives a lease with each locate that reserves.

    Attributes:
        gate: lease questions wait for it; set by default.
        live: leases that were neither ended nor refused.
        ended: how each lease ended: ``used`` or not.
        extended: leases that were prolonged, in order.
    """

    def __init__(self, *infos: NodeInfo) -> None:
        super().__init__(*infos)
        self.reply = IN_POOL
        self.gate = asyncio.Event()
        self.gate.set()
        self.live: set[LeaseId] = set()
        self.ended: dict[LeaseId, bool] = {}
        self.extended: list[LeaseId] = []
        self.reserved_s: list[float] = []

    async def locate(
        self,
        keys: Sequence[BlockKey],
        *,
        reader: HostId | None = None,
        max_replicas: int = MAX_LISTED_REPLICAS,
        reserve_s: float = 0.0,
    ) -> LocateReply:
        reply = await super().locate(keys, reader=reader, max_replicas=max_replicas)
        self.reserved_s.append(reserve_s)
        if not reserve_s or not reply.prefix_blocks:
            return reply
        lease = LeaseId(len(self.reserved_s))
        self.live.add(lease)
        return replace(reply, lease=lease)

    async def extend_lease(self, lease: LeaseId, *, ttl_s: float) -> bool:
        await self.gate.wait()
        self._check()
        self.extended.append(lease)
        return lease in self.live

    async def end_lease(self, lease: LeaseId, *, used: bool) -> bool:
        await self.gate.wait()
        self._check()
        assert lease not in self.ended
        self.ended[lease] = used
        known = lease in self.live
        self.live.discard(lease)
        return known


def two() -> tuple[NodeInfo, NodeInfo]:
    return make_info("c1"), make_info("c2")


async def test_a_lease_is_committed_at_the_first_token() -> None:
    meta = LeaseMeta()
    async with running(*two(), config=CHEAP_LOADS, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: any(node.running for node in cluster.nodes.values()))
        assert meta.reserved_s == [10.0] and meta.live and not meta.ended
        for node in cluster.nodes.values():
            node.gate.set()
        await answer
        await until(lambda: meta.ended == {1: True})
        stats = cluster.dispatcher.snapshot()
        assert (stats.leases_reserved, stats.leases_committed, stats.leases_aborted) == (1, 1, 0)


async def test_nothing_is_kept_for_who_has_it_all_or_wants_none_of_it() -> None:
    meta = LeaseMeta()
    meta.reply = replace(IN_POOL, coverage=(NodeCoverage(make_info("c2").node_id, 2, 2),))
    slow_pool = replace(CHEAP_LOADS, l3_bytes_per_s=10.0)
    async with running(*two(), config=slow_pool, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: meta.ended == {1: False})
        assert cluster["c2"].running
        for node in cluster.nodes.values():
            node.gate.set()
        await answer
        assert not meta.live


@pytest.mark.parametrize("how", ["lost", "closed"])
async def test_a_request_that_ends_before_its_first_token_aborts_its_lease(how: str) -> None:
    meta = LeaseMeta()
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
        await until(lambda: meta.ended == {1: False})
        assert not meta.live


async def test_the_lease_of_who_waits_is_prolonged() -> None:
    meta = LeaseMeta()
    config = replace(CHEAP_LOADS, lease_s=0.03, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config, meta=meta) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        second = asyncio.create_task(ask(cluster, long_request("q2")))
        await until(lambda: len(meta.extended) >= 3)
        assert set(meta.extended) == meta.live == {1}
        cluster["c1"].gate.set()
        await asyncio.gather(first, second)
        await until(lambda: meta.ended == {1: True})


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_lost_directory_delays_no_answer(hangs: bool) -> None:
    meta = LeaseMeta()
    config = replace(CHEAP_LOADS, locate_timeout_s=0.05)
    async with running(*two(), config=config, meta=meta) as cluster:
        await asyncio.gather(*(ask(cluster, long_request(f"w{at}")) for at in range(3)))
        await until(lambda: not meta.live)
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


async def test_stopping_leaves_no_lease_behind() -> None:
    meta = LeaseMeta()
    async with running(*two(), config=CHEAP_LOADS, meta=meta) as cluster:
        for node in cluster.nodes.values():
            node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(meta.live))
        await cluster.dispatcher.stop()
        assert not meta.live
        answer.cancel()
        await asyncio.wait([answer])


async def test_a_lease_that_comes_after_the_stop_runs_out_by_itself() -> None:
    stats = RoutingStats(8)
    directory = DirectoryClient(LeaseMeta(), config=QUICK, stats=stats, clock=SystemClock())
    leases = RequestLeases(directory, stats, lease_s=10.0)
    await leases.stop(timeout_s=1.0)
    leases.keep(LeaseId(7))
    leases.abort(LeaseId(7))
    assert len(leases) == 0 and len(asyncio.all_tasks()) == 1


async def test_without_a_promise_nothing_is_counted() -> None:
    meta = LeaseMeta()
    meta.reply = LocateReply()
    async with running(*two(), meta=meta) as cluster:
        await ask(cluster)
        assert cluster.dispatcher.snapshot().leases_reserved == 0
        assert NO_LEASE not in meta.ended
