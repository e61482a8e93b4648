"""A statement's plan over a whole cluster: the same answers, less to compute, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from bench.plan_cluster import ClusterShape, PlanCluster, answer_all, plan_cluster
from tests.fix_model import tiny_config
from tierkv.dbfront.calls.evaluation import CallOutcome
from tierkv.dbfront.contracts import CallDefaults, PlanSummary
from tierkv.kvcore.call_options import CallOptions
from tierkv.sql.calls.ai_call import AiCall, make_call

pytestmark = pytest.mark.integration
MODEL = tiny_config(vocab_size=4096, max_position_embeddings=1024)
SHAPE = ClusterShape(MODEL, 1, l1_pages=25, pool_bytes=1, extent_bytes=64 << 10, block_tokens=8)
"""L1 of two prompts, and about as much in the pool, where the table needs six times that."""

PLANNED = CallDefaults(max_concurrency=4)
UNPLANNED = replace(PLANNED, plan=False, prefix_order=False)
DEADLINE_S = 60.0


def table(documents: int = 16, questions: int = 3) -> list[AiCall]:
    """System text, document, question; the rows of a document lie far apart."""
    how = {"system_prompt": "Answer in one word. " * 3, "options": CallOptions(max_tokens=6)}
    return [
        make_call(
            "ai_generate",
            {"prompt": f"Note {document}: {'table ' * 25}\nQuestion {question}?", **how},
        )
        for question in range(questions)
        for document in range(documents)
    ]


class Run:
    """What came of the rows so far; ``each`` is called after every answer."""

    def __init__(self, each: Callable[[int], None] = lambda done: None) -> None:
        self.answers: dict[AiCall, str] = {}
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self._each = each

    def note(self, call: AiCall, outcome: CallOutcome) -> None:
        assert outcome.error is None, outcome
        assert call not in self.answers
        self.answers[call] = outcome.value
        (answer,) = outcome.answers
        self.hit_tokens += answer.usage.hit_tokens.total
        self.prompt_tokens += answer.usage.prompt_tokens
        self._each(len(self.answers))


async def run_table(
    cluster: PlanCluster, defaults: CallDefaults, run: Run | None = None
) -> tuple[Run, PlanSummary]:
    run = run or Run()
    summary = await answer_all(table(), cluster.generation, defaults, run.note)
    return run, summary


async def nothing_is_left(cluster: PlanCluster) -> None:
    """No lease, no hold, no request; leases of requests are ended in the background."""
    async with asyncio.timeout(DEADLINE_S):
        while len(cluster.meta.state.leases):
            await asyncio.sleep(0.01)
    cluster.dispatcher.state.check_invariants()
    assert not cluster.dispatcher.state.requests
    assert not cluster.generation.live
    counts = cluster.meta.state.leases.counts
    assert counts.granted == counts.committed + counts.aborted
    for part in cluster.computes:
        if part.node.is_running:
            await part.node.check_invariants()


async def wanted() -> dict[AiCall, str]:
    roomy = replace(SHAPE, l1_pages=2_000)
    async with plan_cluster(roomy) as cluster:
        run, _ = await run_table(
            cluster, replace(UNPLANNED, options=replace(UNPLANNED.options, cache=False))
        )
        assert run.hit_tokens == 0
        return run.answers


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_plan_changes_no_answer_and_computes_less(nodes: int) -> None:
    want = await wanted()
    shape = replace(SHAPE, nodes=nodes)
    async with plan_cluster(shape) as cluster:
        unplanned, summary = await run_table(cluster, UNPLANNED)
        assert summary == PlanSummary()
        await nothing_is_left(cluster)
    async with plan_cluster(shape) as cluster:
        planned, summary = await run_table(cluster, PLANNED)
        await nothing_is_left(cluster)
        assert cluster.meta.state.leases.counts.granted > 0
    assert unplanned.answers == want
    assert planned.answers == want
    assert summary.runs >= nodes
    assert planned.hit_tokens > unplanned.hit_tokens
    # Each node computes the system text once, nobody computes a document twice.
    assert planned.hit_tokens >= summary.shared_tokens * 0.8


async def test_a_plan_outlives_one_of_its_nodes() -> None:
    want = await wanted()
    stopping: list[asyncio.Task[None]] = []
    async with plan_cluster(replace(SHAPE, nodes=2)) as cluster:

        def stop_one(done: int) -> None:
            if done == 5:
                stopping.append(asyncio.create_task(cluster.computes[1].node.stop()))

        run, _ = await run_table(cluster, PLANNED, Run(stop_one))
        await asyncio.gather(*stopping)
        await nothing_is_left(cluster)
    assert run.answers == want


async def test_cancelling_a_statement_leaves_nothing_held() -> None:
    async with plan_cluster(SHAPE) as cluster:
        enough = asyncio.Event()
        run = Run(lambda done: enough.set() if done == 7 else None)
        statement = asyncio.create_task(run_table(cluster, PLANNED, run))
        async with asyncio.timeout(DEADLINE_S):
            await enough.wait()
        statement.cancel()
        with suppress(asyncio.CancelledError):
            await statement
        await nothing_is_left(cluster)
        assert len(run.answers) < len(table())
        want = await wanted()
        assert all(want[call] == text for call, text in run.answers.items())


async def test_without_a_directory_nothing_is_held_and_all_is_answered() -> None:
    want = await wanted()
    async with plan_cluster(replace(SHAPE, nodes=2)) as cluster:
        prepared = await cluster.generation.models()
        assert prepared
        await cluster.meta.close()
        run, summary = await run_table(cluster, PLANNED)
        assert len(cluster.meta.state.leases) == 0
    assert run.answers == want
    assert run.hit_tokens >= summary.shared_tokens * 0.8


async def test_what_an_earlier_statement_left_in_the_pool_is_loaded_ahead() -> None:
    one_by_one = replace(PLANNED, max_concurrency=1)
    # A node publishes no more at once than a quarter of its pages.
    async with plan_cluster(replace(SHAPE, l1_pages=401, pool_bytes=16 << 20)) as cluster:
        first, _ = await run_table(cluster, one_by_one)
        await cluster.settle()
        await cluster.computes[0].node.drop_cache()
        await cluster.settle()
        before = cluster.dispatcher.snapshot().prefetches
        second, _ = await run_table(cluster, one_by_one)
        assert second.answers == first.answers
        assert cluster.dispatcher.snapshot().prefetches > before
        await nothing_is_left(cluster)
