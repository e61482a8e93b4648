"""Load or compute, for a statement's batch: policy ``auto`` beside ``always`` and ``never``.

Run ``python -m bench.load_choice``. The rows of a table are asked one question after another; what
is known of their KV lies in a tier below L1. Nodes that are alike but for their policy share the
pool and take turns in random order; two nodes have policy ``always``, to show the noise of the
machine. A cell is a tier, a model, how many calls are in flight, and how much of the rows' KV fits
L1. Tokens must be the same with every policy.

Printed are a question's seconds with ``auto`` as a multiple of the better of the other two, the
same multiple for the two equal nodes, and the error of the predicted times to the first token. The
first rounds, in which a node learns its costs, do not count.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.compute_node import MODEL, NAMESPACE, THERE
from bench.load_choice_pool import HOST, open_pool
from bench.report import Report, finish, make_parser
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import Incarnation, NodeId, new_request_id
from tierkv.kvcore.request import GenerateRequest, SamplingParams

SMALL: Final[dict[str, Any]] = MODEL | {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}
MODELS: Final = {"small": SMALL, "large": MODEL}
BLOCK_TOKENS: Final = 64
ROW_TOKENS: Final = 3 * BLOCK_TOKENS
QUESTION_TOKENS: Final = 20
AUTO: Final = "auto"
ALWAYS: Final = "always"
AGAIN: Final = "always again"
NEVER: Final = "never"
NODES: Final = {
    AUTO: LoadPolicy.AUTO,
    ALWAYS: LoadPolicy.ALWAYS,
    AGAIN: LoadPolicy.ALWAYS,
    NEVER: LoadPolicy.NEVER,
}
_COLD_ROUNDS: Final = 3
_LEAST_ROUNDS: Final = 4
_MOST_ROUNDS: Final = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One case.

    Attributes:
        tier: where blocks are that L1 lacks.
        model: which of MODELS.
        calls: calls in flight.
        in_l1: share of the rows' KV that fits L1.
    """

    tier: Tier
    model: str
    calls: int
    in_l1: float

    @property
    def name(self) -> str:
        """Return its metrics' prefix."""
        return f"{str(self.tier).lower()}_{self.model}_{self.calls}_calls_{self.in_l1:.0%}_in_l1"

    @property
    def rows(self) -> int:
        """Rows of its table: some for each place in flight, so that a node is in its stride."""
        return max(12, self.calls) if self.model == "small" else max(4, min(self.calls, 24))

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        shape = MODELS[self.model]
        heads = shape["num_key_value_heads"] * shape["head_dim"]
        return int(2 * 4 * heads * shape["num_hidden_layers"] * BLOCK_TOKENS)

    @property
    def l1_blocks(self) -> int:
        """Room of L1: for all that is in flight, or for so much of the rows' KV."""
        row = ROW_TOKENS // BLOCK_TOKENS
        if not self.in_l1:
            return (row + 2) * min(self.rows, self.calls) + row * self.rows
        return max(row + 2, int(self.in_l1 * row * self.rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    arguments = parser.parse_args(argv)
    cells = [
        cell
        for parts in itertools.product(
            (Tier.L2, Tier.L3) if arguments.quick else (Tier.L2, Tier.L3, Tier.L4),
            ("small",) if arguments.quick else MODELS,
            (8,) if arguments.quick else (1, 8, 100),
            (0.0,) if arguments.quick else (0.0, 0.5),
        )
        if arguments.only in (cell := Cell(*parts)).name
    ]
    report = Report("load_choice")
    most_s = 0.5 if arguments.quick else 20.0
    asyncio.run(_run(report, cells, most_s, random.Random(arguments.seed)))
    finish(report, arguments.format)


async def _run(report: Report, cells: list[Cell], most_s: float, rng: random.Random) -> None:
    torch.manual_seed(1)
    worst = 0.0
    for cell in cells:
        worst = max(worst, await _measure(report, cell, most_s, rng))
    report.add("worst_auto_of_better", worst)


async def _measure(report: Report, cell: Cell, most_s: float, rng: random.Random) -> float:
    vocabulary = MODELS[cell.model]["vocab_size"]
    rows = [[rng.randrange(10, vocabulary) for _ in range(ROW_TOKENS)] for _ in range(cell.rows)]
    async with _nodes(cell) as nodes:
        for node in nodes.values():
            await _ask(node, cell, rows, [1])
            if not await node.flush():
                raise AssertionError("the rows' KV was not published")
        rounds: list[dict[str, float]] = []
        warm_s = time.monotonic()
        while not _enough(rounds, most_s):
            question = [rng.randrange(10, vocabulary) for _ in range(QUESTION_TOKENS)]
            answers, seconds = [], {}
            for name, node in sorted(nodes.items(), key=lambda _: rng.random()):
                seconds[name], tokens = await _ask(node, cell, rows, question)
                answers.append(tokens)
            _check_equal(answers, cell)
            rounds.append(seconds)
            if len(rounds) == _COLD_ROUNDS:
                warm_s = time.monotonic()
        error = _prediction_error(nodes[AUTO], warm_s)
        _check_tier(nodes[ALWAYS], cell)
    rounds = rounds[_COLD_ROUNDS:]
    better = ALWAYS if _ratio(rounds, ALWAYS, NEVER) < 1.0 else NEVER
    ratio = _ratio(rounds, AUTO, better)
    report.add(f"{cell.name}_always_of_never", _ratio(rounds, ALWAYS, NEVER))
    report.add(f"{cell.name}_always_of_itself", _ratio(rounds, AGAIN, ALWAYS))
    report.add(f"{cell.name}_auto_of_better", ratio)
    report.add(f"{cell.name}_prediction_error", error)
    return ratio


def _check_equal(answers: list[list[list[int]]], cell: Cell) -> None:
    """Stop if policies gave other tokens."""
    for row, tokens in enumerate(zip(*answers, strict=True)):
        if any(other != tokens[0] for other in tokens):
            raise AssertionError(f"{cell.name}: other tokens of row {row}: {tokens}")


def _check_tier(node: ComputeNode, cell: Cell) -> None:
    """Stop if most of what was loaded came from another tier."""
    hits = {stats.tier: stats.hit_tokens for stats in node.report().tiers}
    loaded = sum(hits.get(tier, 0) for tier in (Tier.L2, Tier.L3, Tier.L4))
    if 2 * hits.get(cell.tier, 0) < loaded:
        raise AssertionError(f"{cell.name}: loaded from other tiers: {hits}")


def _enough(rounds: list[dict[str, float]], most_s: float) -> bool:
    """Some rounds after those in which figures are learned, and more where they are short."""
    spent_s = sum(sum(seconds.values()) for seconds in rounds)
    count = len(rounds) - _COLD_ROUNDS
    return count >= _LEAST_ROUNDS and (spent_s > most_s or count >= _MOST_ROUNDS)


def _ratio(rounds: list[dict[str, float]], one: str, other: str) -> float:
    """Return the median over rounds: a round's questions ran at about the same time."""
    return statistics.median(seconds[one] / seconds[other] for seconds in rounds)


def _prediction_error(node: ComputeNode, warm_s: float) -> float:
    """Return the mean error of the predictions as a share of the mean time they took.

    As for all figures of a cell, the rounds in which the node learns its costs do not count.
    """
    known = [
        record
        for record in node.load_decisions()
        if record.decided_at_s > warm_s and record.predicted_s > 0.0 and record.actual_s > 0.0
    ]
    if not known:
        return 0.0
    errors = [abs(record.predicted_s - record.actual_s) for record in known]
    return sum(errors) / sum(record.actual_s for record in known)


@asynccontextmanager
async def _nodes(cell: Cell) -> AsyncIterator[dict[str, ComputeNode]]:
    """Run the nodes over one pool."""
    blocks = cell.rows * (ROW_TOKENS // BLOCK_TOKENS)
    async with AsyncExitStack() as stack:
        nodes: dict[str, ComputeNode] = {}
        pool = await stack.enter_async_context(
            open_pool(cell.tier, blocks=blocks, block_bytes=cell.block_bytes)
        )
        for name, policy in NODES.items():
            config = ComputeConfig(
                NodeId(f"compute-{name.replace(' ', '-')}"),
                HOST if cell.tier is not Tier.L3 else THERE,
                random_model=RandomModelSpec(MODELS[cell.model], seed=1),
                l1_pages=2 + cell.l1_blocks,
                block_tokens=BLOCK_TOKENS,
                load_policy=policy,
                load_timeout_s=60.0,
            )
            node = ComputeNode(config, incarnation=Incarnation(1), meta=pool.meta)
            node.set_pool_nodes([pool.connect(config.host)])
            await node.start()
            stack.push_async_callback(node.stop)
            nodes[name] = node
        yield nodes


async def _ask(
    node: ComputeNode, cell: Cell, rows: list[list[int]], question: list[int]
) -> tuple[float, list[list[int]]]:
    """Ask one question about all rows; return the seconds and each row's answer."""
    places = asyncio.Semaphore(cell.calls)

    async def answer(row: list[int]) -> list[int]:
        tokens: list[int] = []
        request = GenerateRequest(
            new_request_id(), "model", (*row, *question), NAMESPACE,
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        )  # fmt: skip
        async with places:
            async for event in node.generate(request):
                tokens += event.token_ids
        return tokens

    if cell.in_l1 == 0.0:  # Pages enough for the batch, but empty.
        await node.drop_cache()
    began = time.perf_counter()
    answers = await asyncio.gather(*map(answer, rows))
    return time.perf_counter() - began, list(answers)


if __name__ == "__main__":
    main()
