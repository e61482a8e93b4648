"""The loading controller over a line of known speed: choices, predictions and actual times.

Run ``python -m bench.controller``. The KV of a long prompt lies behind a throttled line. The rate
of the line is a multiple of the rate at which loading takes as long as computing. At each rate a
node with policy ``auto`` answers the same prompt several times, starting from measurements at the
previous rate; only the last rounds count. The tokens must equal the tokens of a node without a
pool.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence

import torch

from bench.memory_pool import memory_pool
from bench.pipeline import BLOCK_TOKENS, HERE, MODEL, THERE, answer
from bench.report import Report, finish, make_parser
from bench.throttled import ThrottledPoolNode
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.ids import Incarnation, NodeId

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""In units of the rate at which loading the whole prompt takes as long as computing the prompt."""
KINDS = ("compute", "part", "load")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, help="rounds that count at each rate")
    arguments = parser.parse_args(argv)
    tokens = arguments.tokens or (640 if arguments.quick else 1_536)
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    report = Report("controller")
    asyncio.run(_run(report, tokens, rounds, random.Random(arguments.seed)))
    report.note(
        f"{tokens} tokens, {MODEL['num_hidden_layers']} layers; medians of {rounds} rounds after "
        "as many for learning; choice 0 computes all, 1 loads a part, 2 loads all that was found"
    )
    finish(report, arguments.format)


async def _run(report: Report, tokens: int, rounds: int, rng: random.Random) -> None:
    torch.manual_seed(1)
    with memory_pool(THERE, capacity_bytes=256 << 20) as dmp:
        line = ThrottledPoolNode(InprocPoolNode(dmp), host=THERE)
        node = ComputeNode(_config(), incarnation=Incarnation(1))
        await node.start()
        try:
            await _measure(report, node, line, tokens, rounds, rng)
        finally:
            await node.stop()
            line.close()


def _config() -> ComputeConfig:
    return ComputeConfig(
        NodeId("compute"),
        HERE,
        random_model=RandomModelSpec(MODEL, seed=1),
        l1_bytes=256 << 20,
        block_tokens=BLOCK_TOKENS,
        load_policy=LoadPolicy.AUTO,
        load_timeout_s=60.0,
    )


async def _measure(
    report: Report,
    node: ComputeNode,
    line: ThrottledPoolNode,
    tokens: int,
    rounds: int,
    rng: random.Random,
) -> None:
    """Publish once, then answer at every rate and compare with answers without the pool."""
    prompt = [rng.randrange(10, 8_000) for _ in range(tokens)]
    for length in (tokens // 8, tokens // 2):  # Steps of different size reveal the cost of steps.
        await answer(node, [rng.randrange(10, 8_000) for _ in range(length)])
    node.set_pool_nodes([line])
    want, _ = await answer(node, prompt)
    if not await node.flush():
        raise AssertionError("the prompt was not published")
    alone_s = await _alone(node, line, prompt, want, rounds)
    report.add("compute_s", alone_s)
    size_bytes = tokens // BLOCK_TOKENS * node.model.layout.stored_bytes
    for rate in RATES:
        line.bytes_per_s = rate * size_bytes / alone_s
        for _ in range(rounds):
            await _round(node, prompt, want)
        pairs = []
        for _ in range(rounds):
            base_s = await _alone(node, line, prompt, want, 1)
            pairs.append((await _round(node, prompt, want), base_s))
        _report(report, node, rate, pairs)


async def _alone(
    node: ComputeNode, line: ThrottledPoolNode, prompt: list[int], want: object, rounds: int
) -> float:
    """Return the median seconds without a pool."""
    node.set_pool_nodes([])
    seconds = [await _round(node, prompt, want) for _ in range(rounds)]
    node.set_pool_nodes([line])
    return statistics.median(seconds)


async def _round(node: ComputeNode, prompt: list[int], want: object) -> float:
    await node.flush()  # Pages that are still being published can't be dropped.
    await node.drop_cache()
    got, seconds = await answer(node, prompt)
    if got != want:
        raise AssertionError("other tokens than without loading")
    return seconds


def _report(
    report: Report, node: ComputeNode, rate: float, pairs: list[tuple[float, float]]
) -> None:
    records = list(node.load_decisions())[-len(pairs) :]
    name = f"rate_{rate:g}x"
    report.add(f"{name}_choice", statistics.median(KINDS.index(r.kind) for r in records))
    errors = [r.predicted_s / r.actual_s for r in records]
    report.add(f"{name}_predicted_of_actual", statistics.median(errors))
    report.add(f"{name}_ttft_of_compute", statistics.median(s / alone for s, alone in pairs))


if __name__ == "__main__":
    main()
