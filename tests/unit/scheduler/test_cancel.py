"""Cancelling at every moment of a request's life: nothing is left at nodes, queues or leases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta, chain_of, make_pool_node, store_chain
from tests.fix_scheduler import FakeCompute, make_info, make_request
from tests.unit.scheduler.test_dispatcher import QUICK, Cluster, ask, long_request, running, until
from tests.unit.scheduler.test_leases import CHEAP_LOADS, two
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest
from tierkv.scheduler.events import WantedModel
from tierkv.scheduler.request_record import RequestPhase
from tierkv.scheduler.requests.job import Job

Q1, Q2 = RequestId("q1"), RequestId("q2")


def phase(cluster: Cluster, request_id: RequestId) -> RequestPhase | None:
    request = cluster.dispatcher.state.requests.get(request_id)
    return None if request is None else request.phase


async def end_of(answer: asyncio.Task[list[GenerateEvent]]) -> GenerateEvent:
    """The last event: a cancelled stream still has an end and a usage."""
    events = await answer
    assert events[-1].usage is not None
    assert [e.finish_reason for e in events if e.finish_reason] == [FinishReason.CANCELLED]
    return events[-1]


async def test_unknown_and_ended_requests_are_not_known() -> None:
    async with running(make_info("c1")) as cluster:
        assert not await cluster.dispatcher.cancel(Q1)
        await ask(cluster)
        assert not await cluster.dispatcher.cancel(Q1)


async def test_a_wait_that_is_just_ending_may_be_ended_again() -> None:
    job = Job(make_request(), WantedModel("tiny"))

    async def listen() -> None:
        async with asyncio.timeout(None) as job.timer:
            try:
                await asyncio.Event().wait()
            finally:  # As a stream that takes a while to close.
                await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    while not listening.done():
        job.interrupt()
        await asyncio.sleep(0)
    assert isinstance(listening.exception(), TimeoutError)
    job.interrupt()


async def test_while_locating() -> None:
    meta = BreakableMeta()
    async with running(*two(), meta=meta) as cluster:
        meta.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: phase(cluster, Q1) is RequestPhase.LOCATING and bool(meta.chains))
        assert await cluster.dispatcher.cancel(Q1)
        last = await end_of(answer)
        assert last.usage is not None and last.usage.completion_tokens == 0
        assert not any(node.seen for node in cluster.nodes.values())
        assert cluster.dispatcher.snapshot().cancelled == 1


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_while_waiting_for_room_it_leaves_the_queue_and_its_lease(how: str) -> None:
    meta = BreakableMeta()
    await store_chain(meta, make_pool_node(), chain_of(long_request()), [Tier.L2] * 2)
    config = replace(CHEAP_LOADS, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config, meta=meta) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        second = asyncio.create_task(ask(cluster, long_request("q2")))
        await until(lambda: phase(cluster, Q2) is RequestPhase.WAITING)
        assert meta.leases_live == 1
        (waiting,) = cluster.dispatcher.waiting()
        assert (waiting.call.request_id, waiting.tenant, waiting.model) == ("q2", "default", "tiny")
        if how == "cancel":
            assert await cluster.dispatcher.cancel(Q2)
            await end_of(second)
        else:
            second.cancel()
            await asyncio.wait([second])
        assert not cluster.dispatcher.waiting()
        await until(lambda: meta.leases.aborted == 1)
        assert (meta.leases.granted, meta.leases_live) == (1, 0)
        cluster["c1"].gate.set()
        await first
        assert [request.request_id for request in cluster["c1"].seen] == ["q1"]
        assert cluster.dispatcher.snapshot().cancelled == 1


async def test_while_its_blocks_are_loaded_ahead() -> None:
    meta = BreakableMeta()
    long = long_request("q2", token_ids=tuple(range(200)))
    await store_chain(meta, make_pool_node(), chain_of(long), [Tier.L2] * 12)
    config = replace(CHEAP_LOADS, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config, meta=meta) as cluster:
        loading, given_up = asyncio.Event(), asyncio.Event()

        async def prefetch(request: GenerateRequest) -> int:
            loading.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
            raise AssertionError

        cluster["c1"].prefetch = prefetch  # type: ignore[method-assign]
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        second = asyncio.create_task(ask(cluster, long))
        await loading.wait()
        assert cluster.dispatcher.state.ahead.loading == {"c1": 1}
        assert await cluster.dispatcher.cancel(Q2)
        await end_of(second)
        await given_up.wait()
        assert cluster.dispatcher.state.ahead.loading == {}
        cluster["c1"].gate.set()
        await first


async def test_between_two_stages() -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    config = replace(QUICK, max_in_flight_per_node=1)
    async with running(*infos, config=config) as cluster:
        cluster["d"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["d"].running))
        second = asyncio.create_task(ask(cluster, long_request("q2")))
        await until(lambda: phase(cluster, Q2) is RequestPhase.WAITING)
        assert await cluster.dispatcher.cancel(Q2)
        last = await end_of(second)
        assert last.usage is not None and last.usage.completion_tokens == 1
        cluster["d"].gate.set()
        await first
        assert len(cluster["d"].seen) == 1


async def test_while_it_waits_for_a_node_to_come() -> None:
    async with running() as cluster:
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: phase(cluster, Q1) is RequestPhase.WAITING)
        assert await cluster.dispatcher.cancel(Q1)
        await end_of(answer)


@pytest.mark.parametrize("answers", ["no", "never", "lost"])
async def test_at_a_node_that_does_not_take_it_the_stream_is_closed(
    answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.scheduler.dispatcher.CANCEL_TIMEOUT_S", 0.02)
    async with running(make_info("c1")) as cluster:
        node: FakeCompute = cluster["c1"]

        async def cancel(request_id: RequestId) -> bool:
            if answers == "never":
                await asyncio.Event().wait()
            if answers == "lost":
                node.dead = True
            return False

        node.cancel = cancel  # type: ignore[method-assign]
        node.gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(node.running))
        assert await cluster.dispatcher.cancel(Q1)
        await end_of(answer)
        assert node.cancelled == [Q1] and not node.running


async def test_a_cancelled_request_gives_its_place_to_the_next() -> None:
    config = replace(QUICK, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        second = asyncio.create_task(ask(cluster, long_request("q2")))
        await until(lambda: phase(cluster, Q2) is RequestPhase.WAITING)
        first.cancel()
        await asyncio.wait([first])
        await until(lambda: cluster["c1"].running == {Q2})
        cluster["c1"].gate.set()
        assert (await second)[-1].finish_reason is FinishReason.LENGTH
