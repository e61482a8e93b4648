"""A plan carried out: turns, hints, keys of what is held, and its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.fix_meta import BreakableMeta, chain_of, join, make_pool_node, store_chain
from tests.fix_scheduler import (
    LAYOUT,
    NAMESPACE,
    FakeCompute,
    make_info,
    make_model,
    make_request,
)
from tierkv.dbfront.contracts import PreparedCall, TextCall
from tierkv.kvcore.block import Tier, block_keys
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.request import GenerateRequest, ReuseHint
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.directory_client import DirectoryClient
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.scheduler.plans.hold_keeper import HoldKeeper
from tierkv.scheduler.plans.plan_events import PlanNode
from tierkv.scheduler.plans.statement_run import StatementRun
from tierkv.scheduler.routing_stats import RoutingStats

MODEL = make_model()
TOKENS = LAYOUT.block_tokens


def prompt(document: int, question: int) -> tuple[int, ...]:
    return (7,) * TOKENS + (document,) * (2 * TOKENS) + (question,) * 3


def calls_of(documents: int = 2, questions: int = 2, **changes: object) -> list[PreparedCall]:
    """Question by question, so that the rows of a document are not neighbours."""
    return [
        PreparedCall(
            TextCall(),
            MODEL,
            make_request(
                f"q{question}d{document}", token_ids=prompt(document, question), **changes
            ),
        )
        for question in range(questions)
        for document in range(documents)
    ]


async def order_of(run: StatementRun) -> list[tuple[int, NodeId | None, ReuseHint | None]]:
    """Run every call to its end, one by one."""
    turns = []
    while (turn := await run.take()) is not None:
        wish = turn.preferred_node
        turns.append((turn.index, wish and wish.node_id, turn.request.hint))
        run.prefilled(turn.index)
        run.ended(turn.index, answered=True)
    assert await run.take() is None
    return turns


async def test_turns_come_depth_first_with_hints_and_a_node() -> None:
    node = NodeId("c1")
    run = StatementRun(calls_of(), max_in_flight=1, nodes=lambda: (PlanNode(node),))
    turns = await order_of(run)
    await run.close()
    assert [(call, where) for call, where, _ in turns] == [
        (0, node),
        (2, node),
        (1, node),
        (3, node),
    ]
    assert [hint for _, _, hint in turns] == [
        ReuseHint(pending_calls=1, pending_tokens=3 * TOKENS),
        ReuseHint(pending_calls=2, pending_tokens=TOKENS),
        ReuseHint(pending_calls=1, pending_tokens=3 * TOKENS),
        ReuseHint(pending_calls=0, pending_tokens=TOKENS),
    ]
    assert run.runs >= 1
    assert run.shared_tokens == 3 * TOKENS + 2 * 2 * TOKENS


async def test_a_call_that_shares_nothing_has_no_hint() -> None:
    alone = [PreparedCall(TextCall(), MODEL, make_request("q", token_ids=tuple(range(40))))]
    uncached = calls_of(use_cache=False)
    for calls in (alone, uncached):
        run = StatementRun(calls, max_in_flight=4)
        assert {hint for _, _, hint in await order_of(run)} == {None}
        await run.close()


async def test_tenants_share_nothing_in_a_plan() -> None:
    other = calls_of(namespace_key=bytes(31) + b"x")
    run = StatementRun([*calls_of(), *other], max_in_flight=1)
    assert run.shared_tokens == 2 * (3 * TOKENS + 2 * 2 * TOKENS)
    await run.close()


async def test_what_pending_calls_share_is_leased_and_let_go_of() -> None:
    meta = BreakableMeta()
    for call in calls_of():
        await store_chain(meta, make_pool_node(), chain_of(call.request), [Tier.L2] * 3)
    clock = SystemClock()
    config, stats = SchedulerConfig(locate_timeout_s=20.0), RoutingStats(1)
    directory = DirectoryClient(meta, config=config, stats=stats, clock=clock)
    keeper = HoldKeeper(directory, clock)
    run = StatementRun(calls_of(), max_in_flight=1, keeper=keeper)
    turn = await run.take()
    assert turn is not None
    run.prefilled(turn.index)
    async with asyncio.timeout(20):
        while meta.leases.granted < 2:
            await asyncio.sleep(0)
    chain = block_keys(NAMESPACE, prompt(0, 0)[: 3 * TOKENS], block_tokens=TOKENS)
    assert {tuple(chain), tuple(chain[:1])} == set(map(tuple, meta.chains))
    await run.close()
    assert (meta.leases.granted, meta.leases_live) == (2, 0)
    await meta.close()


async def test_the_dispatcher_plans_for_its_nodes_and_loads_ahead() -> None:
    infos = [make_info("c1"), make_info("c2")]
    meta = BreakableMeta()
    for info in infos:
        await join(meta, info)
    documents = [chain_of(call.request) for call in calls_of(documents=4)]
    for chain in documents:  # When the plan begins no node has any.
        await store_chain(meta, make_pool_node(), chain, [Tier.L2] * 3)
    nodes = {info.node_id: FakeCompute(info) for info in infos}
    dispatcher = Dispatcher(
        ClusterView(meta=meta, connect=lambda info: nodes[info.node_id]),
        meta=meta,
        config=SchedulerConfig(refresh_interval_s=0.05),
    )
    await dispatcher.start()
    try:
        run = dispatcher.planner.open(calls_of(documents=4, questions=4), max_in_flight=2)
        where: dict[int, NodeId | None] = {}
        while (turn := await run.take()) is not None:
            if not where:
                for chain in documents:
                    await store_chain(meta, infos[1], chain, [Tier.L1] * 3)
            where[turn.index % 4] = turn.preferred_node.node_id  # The document.
            answered = dispatcher.submit(
                turn.request, model=MODEL, preferred_node=turn.preferred_node
            )
            assert [event async for event in answered][-1].finish_reason is not None
            run.ended(turn.index, answered=True)
        async with asyncio.timeout(20):
            while not nodes["c1"].prefetched:  # type: ignore[index]
                await asyncio.sleep(0)
        await run.close()
        assert where == {0: "c1", 1: "c1", 2: "c2", 3: "c2"}
        # The second node has what it would load.
        assert [len(r.token_ids) for r in nodes["c1"].prefetched] == [3 * TOKENS + 1]  # type: ignore[index]
        assert nodes["c2"].prefetched == []  # type: ignore[index]
    finally:
        await dispatcher.stop()
        await meta.close()


async def test_calls_go_where_their_kv_is_and_an_idle_node_takes_some_over() -> None:
    calls = calls_of(documents=4, questions=4)
    homes = {call: NodeId("c2") for call in range(len(calls)) if call % 4 in (0, 3)}

    async def find_homes(requests: Mapping[int, GenerateRequest]) -> Mapping[int, NodeId]:
        assert sorted(requests) == list(range(len(calls)))
        return homes

    nodes = (PlanNode(NodeId("c1")), PlanNode(NodeId("c2")))
    run = StatementRun(calls, max_in_flight=16, nodes=lambda: nodes, find_homes=find_homes)
    where: dict[int, set[NodeId]] = {}
    while (turn := await run.take()) is not None:
        assert turn.preferred_node is not None
        assert turn.preferred_node.tokens == len(turn.request.token_ids)
        where.setdefault(turn.index % 4, set()).add(turn.preferred_node.node_id)
        run.prefilled(turn.index)
    assert where == {0: {"c2"}, 1: {"c1"}, 2: {"c1"}, 3: {"c2"}}
    homes = dict.fromkeys(range(len(calls)), NodeId("c2"))
    run = StatementRun(calls, max_in_flight=4, nodes=lambda: nodes, find_homes=find_homes)
    taken = Counter[NodeId]()
    while taken.total() < 4:
        turn = await run.take()
        assert turn is not None and turn.preferred_node is not None
        taken[turn.preferred_node.node_id] += 1
        run.prefilled(turn.index)
    assert taken == {"c1": 2, "c2": 2}
    await run.close()


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_closing_early_ends_the_statement(taken: int) -> None:
    run = StatementRun(calls_of(), max_in_flight=4, prefetch=_never)
    for _ in range(taken):
        turn = await run.take()
        assert turn is not None
        run.prefilled(turn.index)
    await run.close()
    assert run.state.over


async def _never(request: GenerateRequest, node_id: NodeId) -> None:
    await asyncio.Event().wait()
