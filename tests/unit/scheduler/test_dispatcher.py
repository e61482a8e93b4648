"""Requests through the dispatcher over fake nodes: failover, handoff, waiting, cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta, chain_of, join, store_chain
from tests.fix_scheduler import FakeCompute, make_info, make_model, make_request
from tierkv.kvcore.block import Tier
from tierkv.kvcore.errors import NodeLostError, NoNodeError, OverloadedError, UdfArgumentError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvcore.request import (
    Blend,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    HitTokens,
    SamplingParams,
)
from tierkv.metaserver.config import MetaConfig
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

QUICK = SchedulerConfig(
    refresh_interval_s=0.02,
    backoff_initial_s=0.01,
    backoff_max_s=0.02,
    node_wait_s=0.3,
    locate_timeout_s=5.0,
)


class Cluster:
    """Fake nodes behind a directory."""

    def __init__(
        self, *infos: NodeInfo, config: SchedulerConfig = QUICK, meta: BreakableMeta | None = None
    ) -> None:
        self.meta = meta or BreakableMeta()
        self.nodes = {info.node_id: FakeCompute(info) for info in infos}
        view = ClusterView(meta=self.meta, connect=lambda info: self.nodes[info.node_id])
        self.dispatcher = Dispatcher(view, meta=self.meta, config=config)

    def __getitem__(self, node_id: str) -> FakeCompute:
        return self.nodes[NodeId(node_id)]


@asynccontextmanager
async def running(
    *infos: NodeInfo, config: SchedulerConfig = QUICK, meta: BreakableMeta | None = None
) -> AsyncIterator[Cluster]:
    cluster = Cluster(*infos, config=config, meta=meta)
    for info in infos:
        await join(cluster.meta, info)
    await cluster.dispatcher.start()
    try:
        yield cluster
        cluster.dispatcher.state.check_invariants()
        assert not cluster.dispatcher.state.requests
    finally:
        await cluster.dispatcher.stop()
        await cluster.meta.close()


async def ask(cluster: Cluster, request: GenerateRequest | None = None) -> list[GenerateEvent]:
    request = request or long_request()
    return [event async for event in cluster.dispatcher.submit(request)]


def long_request(request_id: str = "q1", **changes: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    return make_request(request_id, **{"sampling": sampling, **changes})


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def expected(request: GenerateRequest | None = None) -> list[int]:
    node = FakeCompute()
    return tokens_of([e async for e in node.generate(request or long_request())])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_one_node_answers_and_ends_once() -> None:
    async with running(make_info()) as cluster:
        events = await ask(cluster)
        assert tokens_of(events) == await expected()
        assert [e.finish_reason for e in events if e.finish_reason] == [FinishReason.LENGTH]
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 12
        stats = cluster.dispatcher.snapshot()
        assert (stats.finished, stats.failed, stats.cancelled) == (1, 0, 0)


async def test_fixed_clients_need_no_directory() -> None:
    node = FakeCompute()
    dispatcher = Dispatcher(ClusterView(fixed=[node]))
    await dispatcher.start()
    events = [e async for e in dispatcher.submit(long_request())]
    await dispatcher.stop()
    assert tokens_of(events) == await expected()
    assert not node.closed


@pytest.mark.parametrize("lost_after", [0, 1, 5, 11, 12])
async def test_a_node_that_dies_is_replaced_without_losing_or_doubling_a_token(
    lost_after: int,
) -> None:
    async with running(make_info("c1"), make_info("c2", host=HostId("h2"))) as cluster:
        cluster["c1"].die_after = lost_after
        cluster["c2"].die_after = None
        events = await ask(cluster)
        if not cluster["c1"].seen:  # the tie went the other way: make it die this time
            pytest.fail("the first request goes to the first node")
        assert tokens_of(events) == await expected()
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert events[-1].usage is not None
        assert events[-1].usage.prompt_tokens == 40
        assert events[-1].usage.completion_tokens == 12
        if lost_after < 12:
            assert cluster["c2"].seen[0].resumed_tokens == lost_after
        assert dict(cluster.dispatcher.snapshot().cache_errors) == {"transport_error": 1}


async def test_sampled_answer_keeps_its_seed_over_a_loss() -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0)
    async with running(make_info("c1"), make_info("c2")) as cluster:
        cluster["c1"].die_after = 4
        tokens = tokens_of(await ask(cluster, long_request(sampling=sampling)))
        seeds = {request.sampling.seed for node in ["c1", "c2"] for request in cluster[node].seen}
        assert len(seeds) == 1
        whole = replace(sampling, seed=seeds.pop())
        assert tokens == await expected(long_request(sampling=whole))


async def test_the_only_node_restarts_and_goes_on() -> None:
    async with running(make_info("c1")) as cluster:
        old = cluster["c1"]
        old.die_after, old.stays_dead = 3, True
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: old.dead)
        info = make_info("c1", incarnation=Incarnation(2))
        cluster.nodes[info.node_id] = FakeCompute(info)
        await join(cluster.meta, info)
        events = await answer
        assert tokens_of(events) == await expected()
        assert cluster["c1"].seen[0].resumed_tokens == 3


async def test_a_node_that_never_comes_back_is_an_error_after_the_wait() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].dead = True
        with pytest.raises(NodeLostError, match="could not be replaced"):
            await ask(cluster)
        assert cluster.dispatcher.snapshot().failed == 1


async def test_a_node_that_loses_every_stream_is_given_up() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].die_after = 1
        with pytest.raises(NodeLostError, match="5 nodes were lost"):
            await ask(cluster)


async def test_no_node_serves_the_model() -> None:
    async with running(make_info("c1", models=(make_model("other"),))) as cluster:
        with pytest.raises(NoNodeError, match="tiny"):
            await ask(cluster)


async def test_a_request_waits_for_the_first_node() -> None:
    async with running() as cluster:
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster.dispatcher.state.requests))
        info = make_info("late")
        cluster.nodes[info.node_id] = FakeCompute(info)
        await join(cluster.meta, info)
        assert tokens_of(await answer) == await expected()


async def test_other_weights_of_the_same_name_are_never_used() -> None:
    new = make_info("new", models=(make_model(revision="r2"),))
    async with running(new) as cluster:
        with pytest.raises(NoNodeError):
            async for _ in cluster.dispatcher.submit(long_request(), model=make_model()):
                pass
        assert not cluster["new"].seen


async def test_a_full_queue_sends_the_request_to_the_other_node() -> None:
    async with running(make_info("c1"), make_info("c2")) as cluster:
        cluster["c1"].queue_limit = 0
        assert tokens_of(await ask(cluster)) == await expected()
        cluster["c2"].queue_limit = 0
        with pytest.raises(OverloadedError):
            await ask(cluster)
        assert not cluster.dispatcher.snapshot().nodes_suspended


async def test_too_many_requests_are_refused_at_once() -> None:
    config = replace(QUICK, max_requests=1)
    async with running(make_info("c1"), config=config) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        with pytest.raises(OverloadedError):
            await ask(cluster, long_request("q2"))
        cluster["c1"].gate.set()
        await first


async def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].gate.clear()
        first = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        with pytest.raises(UdfArgumentError, match="in use"):
            await ask(cluster)
        cluster["c1"].gate.set()
        assert tokens_of(await first) == await expected()


async def test_closing_the_iterator_cancels_at_the_node() -> None:
    async with running(make_info("c1")) as cluster:
        async with aclosing(cluster.dispatcher.submit(long_request())) as events:
            await anext(events)
        assert cluster["c1"].cancelled == ["q1"]
        assert cluster.dispatcher.snapshot().cancelled == 1


async def test_a_cancelled_task_cancels_at_the_node() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert cluster["c1"].cancelled == ["q1"]


async def test_cancel_ends_the_stream_with_a_usage() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].hits = HitTokens(l2=16)
        events = []
        async for event in cluster.dispatcher.submit(long_request()):
            events.append(event)
            if len(events) == 2:
                assert await cluster.dispatcher.cancel(long_request().request_id)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].usage is not None
        assert events[-1].usage.hit_tokens.l2 == 16
        assert cluster.dispatcher.snapshot().finished == 1


async def test_prefill_and_decode_are_different_nodes() -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    async with running(*infos) as cluster:
        cluster["p"].hits = HitTokens(l3=16)
        cluster["d"].hits = HitTokens(l2=32)
        events = await ask(cluster)
        assert tokens_of(events) == await expected()
        assert cluster["p"].seen[0].handoff
        assert not cluster["d"].seen[0].handoff
        assert cluster["d"].seen[0].resumed_tokens == 1
        usage = events[-1].usage
        assert usage is not None
        assert usage.hit_tokens == HitTokens(l3=16)
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 12)
        assert cluster.dispatcher.snapshot().handoffs == 1


async def test_a_blended_request_is_not_handed_over() -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    async with running(*infos) as cluster:
        request = long_request(blend=Blend(chunks=((4, 20),), recompute_ratio=1.0))
        assert tokens_of(await ask(cluster, request)) == await expected(request)
        assert not cluster["p"].seen[0].handoff
        assert cluster["p"].seen[0].blend == request.blend
        assert not cluster["d"].seen


@pytest.mark.parametrize("form", [{"score_token_ids": (5, 7)}, {"embed": True}])
async def test_a_question_about_a_prompt_is_answered_whole_by_one_node(form) -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    async with running(*infos) as cluster:
        (last,) = await ask(cluster, long_request(**form))
        assert bool(last.scores) != bool(last.embedding)
        assert last.finish_reason is FinishReason.STOP and last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (40, 0)
        assert not cluster["p"].seen[0].handoff and not cluster["d"].seen
        assert cluster.dispatcher.snapshot().finished == 1


async def test_a_question_about_a_prompt_survives_losing_its_node() -> None:
    async with running(make_info("c1"), make_info("c2")) as cluster:
        cluster["c1"].dead = True
        for number in range(4):
            (last,) = await ask(cluster, long_request(f"q{number}", score_token_ids=(5, 7)))
            assert len(last.scores) == 2 and last.node_id == "c2"


async def test_a_handoff_of_the_only_token_needs_no_decode_node() -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    async with running(*infos) as cluster:
        request = long_request(sampling=SamplingParams(max_tokens=1, ignore_eos=True))
        events = await ask(cluster, request)
        assert tokens_of(events) == await expected(request)
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert not cluster["d"].seen


@pytest.mark.parametrize("victim", ["p", "d"])
async def test_a_split_cluster_survives_losing_one_side(victim: str) -> None:
    infos = (make_info("p", role=NodeRole.PREFILL), make_info("d", role=NodeRole.DECODE))
    async with running(*infos) as cluster:
        cluster[victim].die_after = 0 if victim == "p" else 4
        assert tokens_of(await ask(cluster)) == await expected()


async def test_a_stream_on_a_superseded_life_is_abandoned() -> None:
    async with running(make_info("c1")) as cluster:
        old = cluster["c1"]
        old.gate.clear()  # frozen: it neither answers nor hangs up
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(old.running))
        info = make_info("c1", incarnation=Incarnation(2))
        cluster.nodes[info.node_id] = FakeCompute(info)
        await join(cluster.meta, info)
        assert tokens_of(await answer) == await expected()
        assert old.cancelled == ["q1"]


async def test_a_dead_node_is_left_for_a_live_one_but_not_for_nobody() -> None:
    async with running(make_info("c1")) as cluster:
        cluster["c1"].gate.clear()
        answer = asyncio.create_task(ask(cluster))
        await until(lambda: bool(cluster["c1"].running))
        cluster.meta.clock.advance(MetaConfig().dead_after_s)
        await cluster.dispatcher.refresh()
        assert [node.state for node in cluster.dispatcher.view.nodes] == ["dead"]
        assert cluster["c1"].running
        info = make_info("c2")
        cluster.nodes[info.node_id] = FakeCompute(info)
        await join(cluster.meta, info)
        assert tokens_of(await answer) == await expected()
        assert cluster["c2"].seen


async def test_a_channel_closed_under_a_stream_is_a_lost_node_not_a_cancelled_task() -> None:
    async with running(make_info("c1"), make_info("c2")) as cluster:
        healthy = cluster["c1"].generate

        async def closed_channel(request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
            async with aclosing(healthy(request)) as events:
                yield await anext(events)
                raise asyncio.CancelledError

        cluster["c1"].generate = closed_channel
        assert tokens_of(await ask(cluster)) == await expected()
        assert cluster["c2"].seen[0].resumed_tokens == 1


async def test_requests_follow_the_cached_prefix() -> None:
    async with running(make_info("c1"), make_info("c2", host=HostId("h2"))) as cluster:
        await store_chain(cluster.meta, cluster["c2"].info, chain_of(long_request()), [Tier.L1] * 2)
        await ask(cluster)
        assert cluster["c2"].seen
        assert not cluster["c1"].seen
        (decision,) = cluster.dispatcher.stats.decisions()
        assert [c.node_id for c in decision.candidates] == ["c2", "c1"]
        assert decision.actual_ttft_s is not None
        assert cluster.meta.chains == [chain_of(long_request())]
        counts = cluster.dispatcher.affinity.counts()["tiny"]
        assert (counts["decisions"], counts["affinity_hit"], counts["queued"]) == (1, 1, 0)
        assert counts["matched_tokens"] == counts["predicted_tokens"] == 32


async def test_without_directory_requests_still_run_and_it_is_counted() -> None:
    async with running(make_info("c1"), make_info("c2")) as cluster:
        cluster.meta.down = True
        assert tokens_of(await ask(cluster)) == await expected()
        assert dict(cluster.dispatcher.snapshot().cache_errors)["directory_unavailable"] >= 1


async def test_use_cache_false_never_asks_the_directory() -> None:
    async with running(make_info("c1"), make_info("c2")) as cluster:
        await ask(cluster, long_request(use_cache=False))
        assert not cluster.meta.chains


async def test_namespace_keys_differ_by_tenant_and_survive_the_directory() -> None:
    async with running(make_info("c1")) as cluster:
        model = make_model()
        one = await cluster.dispatcher.directory.namespace("one", model)
        cluster.meta.down = True
        assert await cluster.dispatcher.directory.namespace("one", model) == one
        two = await cluster.dispatcher.directory.namespace("two", model)
        assert two.namespace_key != one.namespace_key
        assert await cluster.dispatcher.directory.namespace("two", model) == two


async def test_who_waits_goes_by_the_priority_its_caller_gave() -> None:
    config = replace(QUICK, max_in_flight_per_node=1)
    async with running(make_info("c1"), config=config) as cluster:
        cluster["c1"].gate.clear()
        answers = [asyncio.create_task(ask(cluster))]
        await until(lambda: len(cluster["c1"].seen) == 1)
        for waiting, (name, priority) in enumerate([("late", 50), ("soon", -50)], start=1):
            request = long_request(name, priority=priority)
            answers.append(asyncio.create_task(ask(cluster, request)))
            await until(lambda: cluster.dispatcher.snapshot().waiting == waiting)  # noqa: B023
        cluster["c1"].gate.set()
        await asyncio.gather(*answers)
        assert [request.request_id for request in cluster["c1"].seen] == ["q1", "soon", "late"]
