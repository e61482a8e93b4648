"""What the scheduler says a statement would take: hits by tier, seconds, and nothing done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.fix_meta import BreakableMeta, chain_of, join, make_pool_node, store_chain
from tests.fix_scheduler import FakeCompute, make_info, make_model, make_request, tree_of
from tierkv.dbfront.contracts import PreparedCall, Prospect, TextCall
from tierkv.dbfront.explain.estimate import Estimate, announce_batch
from tierkv.dbfront.explain.rendering import assumptions
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import BlockKey, HostId, NodeId
from tierkv.kvcore.node import NodeLoad, NodeReport
from tierkv.kvcore.request import HitTokens
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.plans import forecast as forecast_module
from tierkv.scheduler.plans.forecast import Forecast, shared_before

FAST_LOADS = NodeLoad(
    prefill_tokens_per_s=100.0,
    prefill_token_s=0.01,
    decode_tokens_per_s=50.0,
    l2_bytes_per_s=1e12,
    l3_bytes_per_s=1e12,
    l4_bytes_per_s=1e12,
)


class Cluster:
    """A dispatcher over fake nodes of one speed."""

    def __init__(self, *names: str) -> None:
        infos = [make_info(name, host=HostId(name)) for name in names]
        self.meta = BreakableMeta()
        self.nodes = {info.node_id: FakeCompute(info) for info in infos}
        self.dispatcher = Dispatcher(
            ClusterView(meta=self.meta, connect=lambda info: self.nodes[info.node_id]),
            meta=self.meta,
        )

    async def forecast(self, prompts: Sequence[Sequence[int]], **changes: object) -> Forecast:
        await self.dispatcher.refresh()
        calls = [
            PreparedCall(
                TextCall(), make_model(), make_request(f"q{at}", token_ids=tuple(ids), **changes)
            )
            for at, ids in enumerate(prompts)
        ]
        found = await self.dispatcher.forecast(calls, max_in_flight=4)
        self.dispatcher.state.check_invariants()
        assert self.dispatcher.state.arrived == 0
        assert not any(node.seen or node.prefetched for node in self.nodes.values())
        return found


@asynccontextmanager
async def running(*names: str, load: NodeLoad = FAST_LOADS) -> AsyncIterator[Cluster]:
    cluster = Cluster(*names)
    for node in cluster.nodes.values():
        await join(cluster.meta, node.info, NodeReport(load=load))
    yield cluster
    await cluster.dispatcher.stop()
    await cluster.meta.close()


@pytest.fixture
async def one() -> AsyncIterator[Cluster]:
    async with running("c1") as cluster:
        yield cluster


def prompt(blocks: int, *, first: int = 0, extra: int = 3) -> list[int]:
    """Tokens of some whole blocks and a little more; prompts of equal ``first`` begin alike."""
    return [first + 2 + at for at in range(16 * blocks + extra)]


def chain_of_prompt(ids: Sequence[int]) -> list[BlockKey]:
    return chain_of(make_request(token_ids=tuple(ids)))


async def test_nothing_cached_and_nothing_shared_is_computed(one: Cluster) -> None:
    found = await one.forecast([prompt(4), prompt(2, first=500)])
    assert [call.prompt_tokens for call in found.calls] == [67, 35]
    assert [call.hits for call in found.calls] == [HitTokens(), HitTokens()]
    assert [call.node_id for call in found.calls] == ["c1", "c1"]
    assert found.calls[0].busy_s == pytest.approx(0.67, rel=0.01)
    assert found.prefill_s == pytest.approx(1.02, rel=0.01)
    assert found.decode_s(100.0) == pytest.approx(100 / 50 / 2)
    # Both are answered at once, so what is lost beside is lost once.
    assert found.beside_s == found.overhead_s > 0
    assert found.total_s(100.0) == pytest.approx(found.prefill_s + 1.0 + found.overhead_s)
    assert (found.nodes, found.measured, found.looked_up, found.wait_s) == (1, True, 2, 0.0)


async def test_what_an_earlier_call_has_is_computed_once(one: Cluster) -> None:
    whole, longer = prompt(4), [*prompt(4, extra=0), *range(900, 905)]
    found = await one.forecast([longer, whole, prompt(1, first=700)])
    shared = sorted(call.shared_tokens for call in found.calls)
    assert shared == [0, 0, 64]
    assert sum(call.hits.l1 for call in found.calls) == 64
    assert all(call.found == HitTokens() for call in found.calls)


async def test_what_is_cached_is_told_by_the_nearest_tier(one: Cluster) -> None:
    chain = chain_of_prompt(prompt(6))
    await store_chain(one.meta, one.nodes[NodeId("c1")].info, chain, [Tier.L1])
    await store_chain(one.meta, make_pool_node("c1"), chain, [Tier.L2] * 2)
    await store_chain(one.meta, make_pool_node(), chain, [None, None, Tier.L2, Tier.L4])
    (call,) = (await one.forecast([prompt(6)])).calls
    assert call.found == HitTokens(16, 16, 16, 16)
    assert call.hits == HitTokens(16, 16, 16, 16)
    assert call.busy_s == pytest.approx((99 - 64) * 0.01, rel=0.02)
    # The last token is always computed: of four full blocks without more, three can be hits.
    (call,) = (await one.forecast([prompt(4, extra=0)])).calls
    assert call.found == HitTokens(16, 16, 16, 0)


async def test_what_is_slower_to_load_than_to_compute_is_found_but_no_hit() -> None:
    slow = NodeLoad(prefill_tokens_per_s=1e6, prefill_token_s=1e-6, l3_bytes_per_s=1.0)
    async with running("c1", load=slow) as cluster:
        chain = chain_of_prompt(prompt(4))
        await store_chain(cluster.meta, make_pool_node(), chain, [Tier.L2] * 3)
        (call,) = (await cluster.forecast([prompt(4)])).calls
        assert call.found == HitTokens(l3=48)
        assert call.hits == HitTokens()


async def test_a_prompt_goes_where_its_blocks_are_and_nodes_share_the_work() -> None:
    prompts = [prompt(4), prompt(4, first=300)]
    async with running("c1", "c2") as cluster:
        for ids in prompts:
            near = cluster.nodes[NodeId("c2")].info
            await store_chain(cluster.meta, near, chain_of_prompt(ids), [Tier.L1] * 4)
        found = await cluster.forecast(prompts)
        assert [call.node_id for call in found.calls] == ["c2", "c2"]
        assert found.nodes == 2
        assert found.prefill_s == pytest.approx(sum(call.busy_s for call in found.calls) / 2)


async def test_calls_that_may_not_use_the_cache_find_nothing(one: Cluster) -> None:
    chain = chain_of_prompt(prompt(4))
    await store_chain(one.meta, make_pool_node(), chain, [Tier.L2] * 4)
    found = await one.forecast([prompt(4), prompt(4)], use_cache=False)
    assert one.meta.chains == []
    assert all(call.found.total == call.shared_tokens == 0 for call in found.calls)


async def test_without_nodes_or_directory_tokens_are_still_counted() -> None:
    async with running() as nobody:
        found = await nobody.forecast([prompt(4), prompt(4)])
        assert [call.prompt_tokens for call in found.calls] == [67, 67]
        assert sum(call.shared_tokens for call in found.calls) == 67
        assert (found.nodes, found.prefill_s, found.token_s) == (0, 0.0, 0.0)
    async with running("c1", load=NodeLoad()) as lonely:
        await lonely.dispatcher.refresh()
        lonely.meta.down = True
        found = await lonely.forecast([prompt(4)])
        assert found.calls[0].found == HitTokens()
        assert not found.measured
        assert found.calls[0].busy_s > 0


async def test_a_directory_that_does_not_answer_is_told(one: Cluster) -> None:
    known = await one.forecast([prompt(2), prompt(2, first=100)])
    assert known.unanswered == 0
    await one.dispatcher.refresh()
    one.meta.down = True
    call = PreparedCall(TextCall(), make_model(), make_request("q", token_ids=tuple(prompt(2))))
    lost = await one.dispatcher.forecast([call], max_in_flight=1)
    assert (lost.looked_up, lost.unanswered) == (1, 1)
    told = assumptions(Estimate({}, Prospect(lost, (4.0,), learned=True)))
    assert any("did not answer for 1 of 1 prompts" in text for text in told)


async def test_a_notice_tells_prompts_from_the_longest_answers_until_lengths_are_known() -> None:
    calls = (forecast_module.CallForecast(10, busy_s=0.01),) * 1_500
    found = forecast_module.Forecast(calls, nodes=1, token_s=0.3, max_in_flight=64)

    async def told(*, learned: bool) -> str:
        async def weighed() -> Estimate:
            return Estimate({}, Prospect(found, (512.0,) * 1_500, learned=learned))

        return (await announce_batch(1_500, weighed())).message

    assert (await told(learned=False)).endswith(
        "15 s for prompts, up to 60 minutes if answers are as long as max_tokens"
    )
    assert (await told(learned=True)).endswith("tokens, 60 minutes")


def test_the_fronts_own_work_goes_on_beside_nodes_that_are_not_in_its_process() -> None:
    calls = (forecast_module.CallForecast(10, busy_s=1.0),) * 2
    here = forecast_module.Forecast(calls, nodes=1, wait_s=4.0, front_s=3.0, apart=False)
    assert here.total_s(0.0) == 4.0 + 2.0 + 6.0
    there = replace(here, apart=True)
    assert there.total_s(0.0) == 4.0 + 6.0
    assert replace(there, front_s=0.5).total_s(0.0) == 4.0 + 2.0


async def test_before_anything_was_generated_a_token_takes_a_short_step() -> None:
    load = NodeLoad(prefill_token_s=0.01, prefill_step_s=0.02)
    async with running("c1", load=load) as new:
        assert (await new.forecast([prompt(4)])).token_s == pytest.approx(0.03)


async def test_of_many_prompts_some_are_looked_up(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(4, first=100 * at) for at in range(10)]
    for ids in prompts:
        chain = chain_of_prompt(ids)
        await store_chain(one.meta, make_pool_node(), chain, [Tier.L2] * 2)
    every = await one.forecast(prompts)
    one.meta.asked["locate_many"].clear()
    monkeypatch.setattr(forecast_module, "MOST_LOOKED_UP", 4)
    some = await one.forecast(prompts)
    assert len(one.meta.chains) == some.looked_up == 4
    assert [call.hits for call in some.calls] == [call.hits for call in every.calls]
    assert some.prefill_s == pytest.approx(every.prefill_s)
    assert (await one.forecast([])).calls == ()


def test_what_comes_before_is_shared_in_the_order_of_the_tree() -> None:
    prompts = [prompt(3), prompt(1, first=90), prompt(2), prompt(3, extra=9), prompt(1, first=90)]
    tree = tree_of(prompts, 16)
    shared = shared_before(tree)
    for at, index in enumerate(tree.order):
        blocks = [tuple(prompts[index][: 16 * n]) for n in range(1, len(prompts[index]) // 16 + 1)]
        before = [tuple(prompts[other]) for other in tree.order[:at]]
        known = [b for b in blocks if any(other[: len(b)] == b for other in before)]
        assert shared[at] == len(known)
