"""Prefill and decode on two nodes: the cost of the handoff, and the cost of saving KV.

Run ``python -m bench.split``. The first part measures the time from the prompt's first token to the
decode node's own first token, with the partial last block handed over or computed again. The second
part measures a prompt's prefill with nothing saved, with KV saved behind the computation, and with
KV saved after the computation. The KV goes into memory, or over a line that needs as long as the
computation. All measurements are in a single run; tokens must agree.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from bench.memory_pool import memory_pool
from bench.pipeline import MODEL
from bench.report import Report, finish, make_parser
from tierkv.compute.batching.batch_plan import Chunk
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.compute.transfers.saves import NOTHING_SAVED, PassSave
from tierkv.dmp.pool_node import PutGrant, RangeWrite
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, new_request_id
from tierkv.kvcore.request import GenerateRequest, SamplingParams

NAMESPACE = NamespaceKey(bytes(range(32)))
HERE = HostId("here")
BLOCK_TOKENS = 64
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompt tokens of the handoff and of the save, and the number of measurements of each.

    A prompt of the handoff ends in a block that is full except for a single token: the most to
    compute.
    """

    handoff_tokens: int
    save_tokens: int
    rounds: int


class Line(InprocPoolNode):
    """The pool over a line of limited speed; refuses partial blocks on request.

    Attributes:
        bytes_per_s: write bandwidth; 0 means memory speed.
        takes_tails: whether partial blocks are stored.
    """

    bytes_per_s = 0.0
    takes_tails = True

    def reserve(
        self, puts: Sequence[BlockSpec], *, deadline_s: float = 30.0
    ) -> list[PutGrant | None]:
        """Reserve slots for all blocks except for refused tails."""
        wanted = [put for put in puts if self.takes_tails or put.tokens == BLOCK_TOKENS]
        grants = iter(super().reserve(wanted, deadline_s=deadline_s))
        return [next(grants) if put in wanted else None for put in puts]

    def write_ranges(self, writes: Sequence[RangeWrite]) -> None:
        """Write, then wait as long as the line would have needed."""
        began = time.perf_counter()
        super().write_ranges(writes)
        if self.bytes_per_s:
            need_s = sum(len(write.data) for write in writes) / self.bytes_per_s
            time.sleep(max(0.0, began + need_s - time.perf_counter()))


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="prompt tokens, whole blocks of 64")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args(argv)
    tokens = arguments.tokens or (384 if arguments.quick else 2_048)
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    sizes = Sizes(tokens - 1, tokens, rounds)
    report = Report("split")
    asyncio.run(_run(report, sizes, random.Random(arguments.seed)))
    report.note(
        f"{sizes.handoff_tokens} and {sizes.save_tokens} prompt tokens, "
        f"{MODEL['num_hidden_layers']} layers; medians of {sizes.rounds} rounds"
    )
    finish(report, arguments.format)


async def _run(report: Report, sizes: Sizes, rng: random.Random) -> None:
    torch.manual_seed(1)
    with memory_pool(HERE, capacity_bytes=512 << 20) as dmp:
        line = Line(dmp)
        try:
            await _measure_handoff(report, line, sizes, rng)
            await _measure_saves(report, line, sizes, rng)
        finally:
            line.close()


@asynccontextmanager
async def _node(line: Line, name: str, *, publish: bool = True) -> AsyncIterator[ComputeNode]:
    config = ComputeConfig(
        NodeId(name),
        HERE,
        random_model=RandomModelSpec(MODEL, seed=1),
        l1_bytes=192 << 20,
        block_tokens=BLOCK_TOKENS,
        max_batch_tokens=4_096,
        load_policy=LoadPolicy.ALWAYS,
        load_timeout_s=60.0,
        publish=publish,
    )
    node = ComputeNode(config, incarnation=Incarnation(1))
    node.set_pool_nodes([line])
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def _measure_handoff(report: Report, line: Line, sizes: Sizes, rng: random.Random) -> None:
    """Measure the handoff between two nodes with and without the tail, and a single node."""
    times: dict[str, list[float]] = {"with_tail": [], "without_tail": [], "one_node": []}
    async with _node(line, "prefill") as first, _node(line, "decode") as second:
        for number in range(sizes.rounds + 1):
            for way in ("with_tail", "without_tail"):
                prompt = _prompt(rng, sizes.handoff_tokens)
                line.takes_tails = way == "with_tail"
                want, alone_s = await _two_tokens(second, prompt, use_cache=False)
                got, handed_s = await _hand_over(first, second, prompt)
                if got != want:
                    raise AssertionError("other tokens than on one node")
                if number:  # The first round is for warm-up.
                    times[way].append(handed_s)
                    times["one_node"].append(alone_s)
    for way, seconds in times.items():
        report.add(f"second_token_{way}_ms", 1e3 * statistics.median(seconds))
    report.add(
        "tail_saves_ms",
        report.metrics["second_token_without_tail_ms"]
        - report.metrics["second_token_with_tail_ms"],
    )


async def _hand_over(
    first: ComputeNode, second: ComputeNode, prompt: Tokens
) -> tuple[Tokens, float]:
    """Return the first two tokens and the seconds between them, from node to node."""
    began = 0.0
    head: list[int] = []
    async for event in first.generate(_request(prompt, handoff=True)):
        if event.token_ids:
            began = time.perf_counter()
            head += event.token_ids
    events = second.generate(_request((*prompt, *head), resumed_tokens=1))
    event = await anext(events)
    seconds = time.perf_counter() - began
    await events.aclose()
    return (head[0], event.token_ids[0]), seconds


async def _two_tokens(node: ComputeNode, prompt: Tokens, **changes: bool) -> tuple[Tokens, float]:
    events = node.generate(_request(prompt, **changes))
    first = await anext(events)
    began = time.perf_counter()
    second = await anext(events)
    seconds = time.perf_counter() - began
    await events.aclose()
    return (first.token_ids[0], second.token_ids[0]), seconds


async def _measure_saves(report: Report, line: Line, sizes: Sizes, rng: random.Random) -> None:
    """Measure prefill and the end of the save, compared with a prefill that saves nothing."""
    token_s: dict[str, list[float]] = {}
    saved_s: dict[str, list[float]] = {}
    alone: list[float] = []
    async with _node(line, "plain", publish=False) as plain, _node(line, "saving") as saving:
        size = sizes.save_tokens // BLOCK_TOKENS * saving.model.layout.payload_bytes
        begin = saving._engine._saves.begin
        for number, speed in itertools.product(range(sizes.rounds + 1), ("memory", "line")):
            compute_s, _ = await _prefill(plain, _prompt(rng, sizes.save_tokens))
            alone.append(compute_s)
            line.bytes_per_s = size / compute_s if speed == "line" else 0.0
            for way in ("behind", "after"):
                # Without a pass to follow, the engine offers full blocks when a step is over.
                follow = begin if way == "behind" else _follow_nothing
                saving._engine._saves.begin = follow  # type: ignore[method-assign]
                first_s, done_s = await _prefill(saving, _prompt(rng, sizes.save_tokens))
                if number:  # The first round is for warm-up.
                    token_s.setdefault(f"{way}_{speed}", []).append(first_s / compute_s)
                    saved_s.setdefault(f"{way}_{speed}", []).append(done_s / compute_s)
    report.add("prefill_s", statistics.median(alone[2:]))
    for name in token_s:
        report.add(f"first_token_save_{name}_of_prefill", statistics.median(token_s[name]))
        report.add(f"in_the_pool_save_{name}_of_prefill", statistics.median(saved_s[name]))


def _follow_nothing(chunks: Sequence[Chunk]) -> PassSave:
    return NOTHING_SAVED


async def _prefill(node: ComputeNode, prompt: Tokens) -> tuple[float, float]:
    """Return seconds to the first token, and until all KV is in the pool."""
    began = time.perf_counter()
    async for _ in node.generate(_request(prompt, max_tokens=1)):
        pass
    first_s = time.perf_counter() - began
    if not await node.flush():
        raise AssertionError("the prompt's KV was not published")
    return first_s, time.perf_counter() - began


def _prompt(rng: random.Random, count: int) -> Tokens:
    return tuple(rng.randrange(10, 8_000) for _ in range(count))


def _request(
    prompt: Tokens,
    *,
    max_tokens: int = 8,
    handoff: bool = False,
    use_cache: bool = True,
    resumed_tokens: int = 0,
) -> GenerateRequest:
    return GenerateRequest(
        new_request_id(), "model", prompt, NAMESPACE, handoff=handoff, use_cache=use_cache,
        resumed_tokens=resumed_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )  # fmt: skip


if __name__ == "__main__":
    main()
