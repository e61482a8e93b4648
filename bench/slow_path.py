"""Never slower than no cache: a path to the pool that slows down, hangs, and recovers.

Run ``python -m bench.slow_path``. A node answers the same prompt repeatedly with KV behind a line.
The line is fast at first, then throttled to a tenth and to a hundredth, then hangs, and is fast
again. Each answer is paired with an answer without a pool. The tokens must be equal. Printed is the
time to the first token as a multiple of the pair's time, for the first answer after each change and
for the answers after the node has adapted. Printed is also the share of the later answers that
loaded KV.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.memory_pool import memory_pool
from bench.pipeline import BLOCK_TOKENS, HERE, MODEL, THERE, answer
from bench.report import Report, finish, make_parser
from bench.throttled import ThrottledPoolNode
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dmp.pool_node import PoolNode, RangeRead
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.ids import HostId, Incarnation, NodeId

FAST = 8.0
"""The line's speed at first, in units of the rate at which loading takes as long as computing."""


class HangingPoolNode(ThrottledPoolNode):
    """A throttled line whose reads return only when the line is flowing.

    Attributes:
        flowing: cleared to make the line hang.
    """

    def __init__(self, below: PoolNode, *, host: HostId) -> None:
        super().__init__(below, host=host)
        self.flowing = threading.Event()
        self.flowing.set()

    def read_ranges(self, reads: Sequence[RangeRead]) -> None:
        """Read when the line is flowing."""
        self.flowing.wait()
        super().read_ranges(reads)


@dataclass(frozen=True, slots=True)
class Stage:
    """Speed of the line for a period; ``slower`` divides FAST."""

    name: str
    slower: float = 1.0
    hangs: bool = False


STAGES = (
    Stage("fast"),
    Stage("slower_x10", 10.0),
    Stage("fast_again", 1.0),
    Stage("slower_x100", 100.0),
    Stage("hanging", 1.0, hangs=True),
    Stage("fast_at_last"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, help="pairs of answers in each stage that count")
    arguments = parser.parse_args(argv)
    tokens = arguments.tokens or (640 if arguments.quick else 1_536)
    rounds = arguments.rounds or (2 if arguments.quick else 9)
    report = Report("slow path")
    asyncio.run(_run(report, tokens, rounds, random.Random(arguments.seed)))
    report.note(
        f"{tokens} tokens, {MODEL['num_hidden_layers']} layers; TTFT as a multiple of that of a "
        "paired answer without a pool: of the first after the change, and the median of "
        f"{rounds} pairs after as many for learning"
    )
    finish(report, arguments.format)


async def _run(report: Report, tokens: int, rounds: int, rng: random.Random) -> None:
    torch.manual_seed(1)
    config = ComputeConfig(
        NodeId("compute"),
        HERE,
        random_model=RandomModelSpec(MODEL, seed=1),
        l1_bytes=256 << 20,
        block_tokens=BLOCK_TOKENS,
        load_policy=LoadPolicy.AUTO,
    )
    with memory_pool(THERE, capacity_bytes=256 << 20) as dmp:
        line = HangingPoolNode(InprocPoolNode(dmp), host=THERE)
        node = ComputeNode(config, incarnation=Incarnation(1))
        await node.start()
        try:
            await _Bench(report, node, line, tokens, rng).measure(rounds)
        finally:
            line.flowing.set()
            await node.stop()
            line.close()


class _Bench:
    """One prompt, one node, one line."""

    def __init__(
        self,
        report: Report,
        node: ComputeNode,
        line: HangingPoolNode,
        tokens: int,
        rng: random.Random,
    ) -> None:
        self._report, self._node, self._line = report, node, line
        self._prompt = [rng.randrange(10, 8_000) for _ in range(tokens)]
        self._warm = [[rng.randrange(10, 8_000) for _ in range(tokens // n)] for n in (8, 2, 1)]
        self._want: object = None

    async def measure(self, rounds: int) -> None:
        """Publish once, then run all stages."""
        for prompt in self._warm:  # Steps of different size reveal the cost of steps.
            await answer(self._node, prompt)
        self._node.set_pool_nodes([self._line])
        self._want, _ = await answer(self._node, self._prompt)
        if not await self._node.flush():
            raise AssertionError("the prompt was not published")
        alone_s = statistics.median([await self._alone() for _ in range(3)])
        self._report.add("compute_s", alone_s)
        size_bytes = len(self._prompt) // BLOCK_TOKENS * self._node.model.layout.stored_bytes
        for stage in STAGES:
            self._line.bytes_per_s = FAST * size_bytes / alone_s / stage.slower
            if stage.hangs:
                self._line.flowing.clear()
            await self._stage(stage, rounds)
            self._line.flowing.set()

    async def _stage(self, stage: Stage, rounds: int) -> None:
        ratios = [await self._pair() for _ in range(2 * rounds)]
        records = list(self._node.load_decisions())[-rounds:]
        self._report.add(f"{stage.name}_first_ttft_ratio", ratios[0])
        self._report.add(f"{stage.name}_ttft_ratio", statistics.median(ratios[rounds:]))
        loads = sum(record.kind != "compute" for record in records)
        self._report.add(f"{stage.name}_loads", loads / rounds)

    async def _pair(self) -> float:
        alone_s = await self._alone()
        return await self._answer() / alone_s

    async def _alone(self) -> float:
        self._node.set_pool_nodes([])
        seconds = await self._answer()
        self._node.set_pool_nodes([self._line])
        return seconds

    async def _answer(self) -> float:
        await self._node.flush()  # Pages that are still being published can't be dropped.
        await self._node.drop_cache()
        got, seconds = await answer(self._node, self._prompt)
        if got != self._want:
            raise AssertionError("other tokens than without a pool")
        return seconds


if __name__ == "__main__":
    main()
