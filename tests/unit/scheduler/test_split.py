"""Prefill here, decode there: who goes on, who loads ahead, and who needs nobody else."""

from __future__ import annotations

import asyncio

import pytest

from tests.fix_scheduler import FakeCompute, make_info
from tests.unit.scheduler.test_dispatcher import ask, long_request, running, tokens_of
from tests.unit.scheduler.test_state import Script, dispatched
from tierkv.costing.node_cost import CachedPrefix
from tierkv.kvcore.ids import NodeId, RequestId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.scheduler.events import (
    ChainLocated,
    Dispatch,
    FirstToken,
    HandoffDone,
    Instruction,
    Locate,
    NodeLost,
    NodeRefused,
    Prefetch,
    PrefillProgress,
    RequestFinished,
    Stage,
)

Q1 = RequestId("q1")
BLOCK = 16


def split(prefill: int = 1, decode: int = 2) -> list[NodeInfo]:
    return [
        *(make_info(f"p{i}", role=NodeRole.PREFILL) for i in range(prefill)),
        *(make_info(f"d{i}", role=NodeRole.DECODE) for i in range(decode)),
    ]


def prefetched(instructions: list[Instruction]) -> list[tuple[str, int]]:
    return [(i.node_id, i.tokens) for i in instructions if isinstance(i, Prefetch)]


def test_the_next_node_loads_ahead_in_a_few_large_steps_and_goes_on() -> None:
    script = Script(*split())
    script.arrive("q1", tokens=1_600)
    asked = [
        step
        for tokens in range(BLOCK, 1_600, BLOCK)
        for step in prefetched(script.do(PrefillProgress(Q1, tokens)))
    ]
    assert 4 <= len(asked) <= 9 and len({node for node, _ in asked}) == 1
    assert [tokens for _, tokens in asked] == sorted(tokens for _, tokens in asked)
    script.do(FirstToken(Q1))
    done = script.do(HandoffDone(Q1, 1_601))
    assert dispatched(done) == [("q1", asked[0][0], Stage.DECODE)]
    costs = {
        c.node_id: c.cost.service for i in done if isinstance(i, Dispatch) for c in i.candidates
    }
    loads = sorted(cost.load_s for cost in costs.values())
    assert costs[NodeId(asked[0][0])].load_s == loads[0] < loads[1]


def test_two_prompts_prepare_different_nodes() -> None:
    script = Script(*split())
    chosen = set()
    for name in ("q1", "q2"):
        script.arrive(name, tokens=1_000)
        chosen |= {n for n, _ in prefetched(script.do(PrefillProgress(RequestId(name), 512)))}
    assert chosen == {"d0", "d1"}


def test_a_next_node_that_dies_is_replaced_and_told_everything_again() -> None:
    script = Script(*(infos := split()))
    script.arrive("q1", tokens=1_600)
    ((first, _),) = prefetched(script.do(PrefillProgress(Q1, 512)))
    script.see(*infos, **{first: "dead"})
    ((second, tokens),) = prefetched(script.do(PrefillProgress(Q1, 800)))
    assert second != first and tokens == 800
    script.see(*infos[:1])
    script.do(FirstToken(Q1))
    assert dispatched(script.do(HandoffDone(Q1, 1_601)))


def test_progress_of_anything_but_a_prefill_stage_means_nothing() -> None:
    script = Script(make_info("c1"))
    script.arrive("q1", tokens=1_600)
    assert script.do(PrefillProgress(Q1, 800)) == []
    assert script.do(PrefillProgress(RequestId("unknown"), 800)) == []


def test_a_short_prompt_is_not_loaded_ahead() -> None:
    script = Script(*split())
    script.arrive("q1", tokens=60)
    assert script.do(PrefillProgress(Q1, 48)) == []


def locate(script: Script, tokens: int, **l1_blocks: int) -> list[tuple[str, str, Stage]]:
    assert script.arrive("q1", tokens=tokens, locatable=True) == [Locate(Q1)]
    near = {NodeId(name): CachedPrefix(n, n) for name, n in l1_blocks.items()}
    pool = CachedPrefix(l3_blocks=max(l1_blocks.values(), default=0))
    return dispatched(script.do(ChainLocated(Q1, near, pool)))


def test_a_short_rest_goes_straight_to_the_decode_node_that_has_the_history() -> None:
    script = Script(*split())
    assert locate(script, 1_640, d1=100) == [("q1", "d1", Stage.WHOLE)]
    script.do(FirstToken(Q1))
    script.do(RequestFinished(Q1))


@pytest.mark.parametrize(
    ("tokens", "d1"),
    [(1_640, 0), (1_640, 40), (160, 0), (40, 1)],
    ids=["nothing cached", "too long a rest", "short but unknown", "mostly unknown"],
)
def test_decode_nodes_compute_no_long_or_unknown_prompt(tokens: int, d1: int) -> None:
    assert locate(Script(*split()), tokens, d1=d1) == [("q1", "p0", Stage.PREFILL)]


def test_a_busy_decode_node_leaves_even_a_short_rest_to_a_prefill_node() -> None:
    script = Script(*split())
    for i in range(400):
        script.arrive(f"busy{i}", tokens=100)
        script.do(HandoffDone(RequestId(f"busy{i}"), 101))
    assert locate(script, 1_640, d1=100, p0=100) == [("q1", "p0", Stage.PREFILL)]


def test_a_decode_node_that_refuses_a_short_rest_is_not_asked_again() -> None:
    script = Script(*split())
    assert locate(script, 1_640, d1=100)[0][1] == "d1"
    assert dispatched(script.do(NodeRefused(Q1)))[0][1] != "d1"


def test_losing_the_prefill_node_keeps_what_was_loaded_ahead() -> None:
    script = Script(*split(prefill=2))
    (first,) = dispatched(script.arrive("q1", tokens=1_600))
    ((node, _),) = prefetched(script.do(PrefillProgress(Q1, 512)))
    (second,) = dispatched(script.do(NodeLost(Q1, 1_600)))
    assert first[1] != second[1] and second[2] is Stage.PREFILL
    assert script.do(PrefillProgress(Q1, 512)) == []
    script.do(FirstToken(Q1))
    assert dispatched(script.do(HandoffDone(Q1, 1_601))) == [("q1", node, Stage.DECODE)]


async def test_progress_reaches_the_node_that_goes_on() -> None:
    async with running(*split(decode=1)) as cluster:
        request = long_request(token_ids=tuple(range(200)))
        cluster["p0"].progress = [32, 64, 128, 160]
        events = await ask(cluster, request)
        assert tokens_of(events) == tokens_of([e async for e in FakeCompute().generate(request)])
        ahead = cluster["d0"].prefetched
        assert ahead and all(a.token_ids == tuple(range(len(a.token_ids))) for a in ahead)
        assert {len(a.token_ids) % BLOCK for a in ahead} == {1}
        assert all(a.namespace_key == request.namespace_key and not a.handoff for a in ahead)
        assert cluster.dispatcher.snapshot().prefetches == len(ahead)


async def test_a_node_that_cannot_load_ahead_costs_nothing() -> None:
    async with running(*split(decode=2)) as cluster:
        request = long_request(token_ids=tuple(range(200)))
        cluster["p0"].progress = [128]
        broken = asyncio.Event()

        async def refuse(asked: object) -> int:
            broken.set()
            raise AssertionError("a bug")

        for name in ("d0", "d1"):
            cluster[name].prefetch = refuse  # type: ignore[method-assign]
        events = await ask(cluster, request)
        assert len(tokens_of(events)) == 12 and broken.is_set()
