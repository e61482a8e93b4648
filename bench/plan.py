"""A table of prompts with a cache of a tenth of the needed blocks: row by row, sorted, and planned.

Run ``python -m bench.plan``. Every prompt is a system text, a document out of many, and a question;
the rows come in random order. The same rows are answered row by row, all at once in table order,
sorted, and by the plan of the statement. Each way runs on fresh clusters of one node and of two
nodes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

from bench.plan_cluster import MODEL, ClusterShape, Peaks, PlanCluster, answer_all, plan_cluster
from bench.report import Report, finish, parse_arguments
from tierkv.dbfront.calls.evaluation import CallOutcome
from tierkv.dbfront.calls.recipe import ask_model
from tierkv.dbfront.contracts import CallDefaults
from tierkv.kvcore.call_options import CallOptions
from tierkv.kvcore.request import HitTokens
from tierkv.scheduler.plans.plan_tree import PrefixTree, build_tree
from tierkv.sql.calls.ai_call import AiCall, make_call

BLOCK_TOKENS = 16
IN_FLIGHT = 8
SHARE = 0.1
"""Share of the table's blocks that fits into the L1 of all nodes together; the same share fits into
L2."""

WAYS: dict[str, CallDefaults] = {
    "one_by_one": CallDefaults(prefix_order=False, plan=False, max_concurrency=1),
    "table_order": CallDefaults(prefix_order=False, plan=False, max_concurrency=IN_FLIGHT),
    "sorted": CallDefaults(prefix_order=True, plan=False, max_concurrency=IN_FLIGHT),
    "plan": CallDefaults(max_concurrency=IN_FLIGHT),
}
WORDS = (
    "river", "stone", "lamp", "paper", "winter", "table", "green", "corner", "market", "window",
    "garden", "silver", "road",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Prompts in table order, and the prefix trees of the prompts: in blocks, and to the token."""

    rows: list[AiCall]
    tree: PrefixTree
    exact: PrefixTree

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.tree.tokens)

    @property
    def tree_tokens(self) -> int:
        """Tokens to compute if no token is computed twice."""
        return self.prompt_tokens - self.exact.shared_tokens

    @property
    def tree_blocks(self) -> int:
        """Blocks to keep so that no token is computed twice."""
        return (self.prompt_tokens - self.tree.shared_tokens) // BLOCK_TOKENS

    def peak_needed_blocks(self, answered: Sequence[AiCall]) -> int:
        """Return the peak number of blocks that later rows share with earlier rows.

        A cache must hold this many blocks for the given order of rows if no block is to be computed
        twice.
        """
        when = {call: time for time, call in enumerate(answered)}
        times = [when[self.rows[index]] for index in self.tree.order]
        change = [0] * (len(answered) + 1)
        for stem in self.tree.stems:
            mine = times[stem.first : stem.stop]
            change[min(mine)] += stem.blocks
            change[max(mine)] -= stem.blocks
        return max(accumulate(change))


@dataclass(slots=True)
class Result:
    """Results of one way of running the table."""

    answers: dict[AiCall, str]
    hits: HitTokens
    prompt_tokens: int
    wall_s: float
    cpu_s: float
    peaks: Peaks
    needed_blocks: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.hits.total


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    documents, questions = (40, 2) if arguments.quick else (60, 4)
    rng = random.Random(arguments.seed)
    rows = make_rows(rng, documents, questions)
    report = Report("plan")
    report.note(
        f"{len(rows)} rows: {documents} documents, {questions} questions each; L1 of all nodes and "
        f"the pool hold {SHARE:.0%} of the blocks each; {IN_FLIGHT} calls in flight"
    )
    for nodes in (1, 2):
        asyncio.run(_compare(report, rows, nodes))
    finish(report, arguments.format)


def make_rows(rng: random.Random, documents: int, questions: int) -> list[AiCall]:
    """Make a table in random order: a system text, documents, and questions about each document."""
    how = {"system_prompt": _text(rng, 60), "options": CallOptions(max_tokens=4)}
    rows = [
        make_call("ai_generate", {"prompt": f"{text}\n{_text(rng, 10)}", **how})
        for text in (_text(rng, 120) for _ in range(documents))
        for _ in range(questions)
    ]
    rng.shuffle(rows)
    return rows


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def _compare(report: Report, rows: list[AiCall], nodes: int) -> None:
    shape = ClusterShape(MODEL, nodes, l1_pages=4_096, pool_bytes=1, block_tokens=BLOCK_TOKENS)
    async with plan_cluster(replace(shape, nodes=1)) as cluster:
        table = await _table(cluster, rows)
        block_bytes = cluster.computes[0].node.model.layout.stored_bytes
    blocks = int(SHARE * table.tree_blocks / nodes)
    shape = replace(shape, l1_pages=blocks + 1, pool_bytes=blocks * block_bytes)
    if nodes == 1:
        report.add("prompt_tokens", table.prompt_tokens)
        report.add("tree_tokens", table.tree_tokens)
    report.add(f"nodes_{nodes}_l1_blocks_each", blocks)
    results: dict[str, Result] = {}
    for way, defaults in WAYS.items():
        async with plan_cluster(shape) as cluster:
            results[way] = await _run(cluster, table, defaults)
        _add(report, f"nodes_{nodes}_{way}", results[way], block_bytes)
    first = results["one_by_one"]
    if any(result.answers != first.answers for result in results.values()):
        raise AssertionError("an order changed an answer")
    plan = results["plan"]
    for way in ("one_by_one", "table_order", "sorted"):
        other = results[way]
        of = f"nodes_{nodes}_plan_of_{way}"
        report.add(f"{of}_computed_tokens", plan.computed_tokens / other.computed_tokens)
        report.add(f"{of}_cpu_s", plan.cpu_s / other.cpu_s)
        report.add(f"{of}_wall_s", plan.wall_s / other.wall_s)


async def _table(cluster: PlanCluster, rows: list[AiCall]) -> Table:
    """Return the prefixes that the prompts share, as token ids."""
    questions = [ask_model(row, CallDefaults(), row.text("prompt")) for row in rows]
    prepared = [await cluster.generation.prepare(question) for question in questions]
    prompts = [call.request for call in prepared]
    trees = [build_tree(prompts, [tokens] * len(prompts)) for tokens in (BLOCK_TOKENS, 1)]
    return Table(rows, *trees)


async def _run(cluster: PlanCluster, table: Table, defaults: CallDefaults) -> Result:
    answers: dict[AiCall, str] = {}
    hits, prompt_tokens = HitTokens(), 0

    def note(call: AiCall, outcome: CallOutcome) -> None:
        nonlocal hits, prompt_tokens
        if outcome.error is not None:
            raise outcome.error
        (answer,) = outcome.answers
        answers[call] = outcome.value
        hits += answer.usage.hit_tokens
        prompt_tokens += answer.usage.prompt_tokens

    watching = asyncio.create_task(cluster.watch())
    started, cpu_started_s = time.perf_counter(), time.process_time()
    try:
        await answer_all(table.rows, cluster.generation, defaults, note)
    finally:
        wall_s = time.perf_counter() - started
        cpu_s = time.process_time() - cpu_started_s
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    needed = table.peak_needed_blocks(list(answers))
    return Result(answers, hits, prompt_tokens, wall_s, cpu_s, cluster.peaks, needed)


def _add(report: Report, name: str, result: Result, block_bytes: int) -> None:
    report.add(f"{name}_hit_tokens", result.hits.total)
    report.add(f"{name}_hit_tokens_l1", result.hits.l1)
    report.add(f"{name}_computed_tokens", result.computed_tokens)
    report.add(f"{name}_peak_needed_blocks", result.needed_blocks)
    report.add(f"{name}_peak_running_blocks", result.peaks.running_blocks)
    report.add(f"{name}_peak_l1_blocks", round(result.peaks.l1_bytes / block_bytes))
    report.add(f"{name}_peak_l2_blocks", round(result.peaks.l2_bytes / block_bytes))
    report.add(f"{name}_cpu_s", result.cpu_s)
    report.add(f"{name}_wall_s", result.wall_s)


if __name__ == "__main__":
    main()
