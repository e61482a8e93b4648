"""A call that waits for its turn finds its blocks in the pages, and leaves no lease behind."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from bench.plan_cluster import ClusterShape, PlanCluster, plan_cluster
from tests.fix_model import tiny_config
from tierkv.compute.client import LocalComputeClient
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeInfo, NodeReport
from tierkv.kvcore.request import GenerateEvent, GenerateRequest, SamplingParams
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

pytestmark = pytest.mark.integration
MODEL = tiny_config(vocab_size=4096, max_position_embeddings=1024)
SHAPE = ClusterShape(
    MODEL, 1, l1_pages=401, pool_bytes=16 << 20, extent_bytes=64 << 10, block_tokens=8
)
PROMPT = tuple(i * 7 % 4000 + 10 for i in range(400))
DEADLINE_S = 60.0


class WorthLoading(LocalComputeClient):
    """A real node that says it computes slowly: whether loading pays is not what is tested here."""

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        info, report = await super().describe()
        load = replace(report.load, prefill_token_s=0.1, l2_bytes_per_s=1e12, l2_latency_s=0.0)
        return info, replace(report, load=load)


async def make_request(
    dispatcher: Dispatcher, request_id: str, tokens: tuple[int, ...], max_tokens: int = 4
) -> GenerateRequest:
    (model,) = dispatcher.models()
    grant = await dispatcher.directory.namespace("default", model)
    return GenerateRequest(
        request_id=RequestId(request_id),
        model=model.name,
        token_ids=tokens,
        namespace_key=grant.namespace_key,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def ask(dispatcher: Dispatcher, request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in dispatcher.submit(request)]


async def one_at_a_time(cluster: PlanCluster) -> Dispatcher:
    config = SchedulerConfig(
        refresh_interval_s=0.1, max_in_flight_per_node=1, locate_timeout_s=DEADLINE_S
    )
    view = ClusterView(fixed=[WorthLoading(part.node) for part in cluster.computes])
    dispatcher = Dispatcher(view, meta=cluster.meta, config=config)
    await dispatcher.start()
    return dispatcher


async def test_the_directory_knows_what_a_node_dropped_once_it_has_settled() -> None:
    async with plan_cluster(SHAPE) as cluster, asyncio.timeout(DEADLINE_S):
        for round_no in range(20):
            await ask(
                cluster.dispatcher, await make_request(cluster.dispatcher, str(round_no), PROMPT)
            )
            await cluster.settle()
            dropped = await cluster.computes[0].node.drop_cache()
            await cluster.settle()
            counts = dict(await cluster.meta.directory_counts())
            assert dropped >= 50
            assert counts["copies"] == counts["blocks"], "a copy in the pool of each, none in L1"


@pytest.mark.parametrize("cancelled", [False, True], ids=["served", "cancelled"])
async def test_a_waiting_call_s_blocks_are_brought_up(cancelled: bool) -> None:
    async with plan_cluster(SHAPE) as cluster, asyncio.timeout(DEADLINE_S):
        cold = await ask(cluster.dispatcher, await make_request(cluster.dispatcher, "cold", PROMPT))
        await cluster.settle()
        await cluster.computes[0].node.drop_cache()
        await cluster.settle()
        front = await one_at_a_time(cluster)
        leases = cluster.meta.state.leases
        before = replace(leases.counts)
        hog = await make_request(front, "hog", tuple(range(20, 60)), max_tokens=500)
        async with aclosing(front.submit(hog)) as events:
            await anext(events)
            waiting = asyncio.create_task(ask(front, await make_request(front, "warm", PROMPT)))
            while not front.snapshot().prefetches:
                await asyncio.sleep(0.005)
            assert [w.call.request_id for w in front.waiting()] == ["warm"]
            assert len(leases) == 1
            if cancelled:
                assert await front.cancel(RequestId("warm"))
                await waiting
                assert not front.waiting()
        warm = await waiting
        while len(leases):
            await asyncio.sleep(0.005)
        assert leases.counts.granted == before.granted + 1
        if cancelled:
            assert leases.counts.aborted == before.aborted + 1
        else:
            assert [e.token_ids for e in warm] == [e.token_ids for e in cold]
            usage = warm[-1].usage
            assert usage is not None
            # What of its last block can be had comes when it is admitted.
            assert usage.hit_tokens.l1 >= 380
            assert usage.hit_tokens.total - usage.hit_tokens.l1 < 8
        front.state.check_invariants()
        assert not front.state.requests and not front.state.ahead.loading
        await front.stop()
        await cluster.computes[0].node.check_invariants()
