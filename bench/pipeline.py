"""Loading KV layer by layer behind the computation, compared with loading whole blocks first.

Run ``python -m bench.pipeline``. The blocks of a long history come over a throttled line. Loading
takes half, once and twice the time of computing the new tokens. The measured time is reported next
to the prediction of the formula (costing/service_time.py), and to the time of a turn whose history
was loaded before, as for conversations that are due (scheduler/requests/returns.py). All
measurements are in a single run; tokens must agree.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.memory_pool import memory_pool
from bench.report import Report, finish, make_parser
from bench.throttled import Order, ThrottledPoolNode
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.costing.service_time import pipelined
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, new_request_id
from tierkv.kvcore.request import GenerateRequest, SamplingParams

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
NAMESPACE = NamespaceKey(bytes(range(32)))
HERE, THERE = HostId("here"), HostId("there")
BLOCK_TOKENS = 64
RATIOS = (0.5, 1.0, 2.0)
"""Seconds of loading per second of computing."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens to load, tokens to compute, and number of rounds."""

    history_tokens: int
    new_tokens: int
    rounds: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--history", type=int, help="tokens to load, whole blocks of 64")
    parser.add_argument("--new", type=int, help="tokens to compute behind the load")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args(argv)
    usual = Sizes(1_024, 256, 3) if arguments.quick else Sizes(2_048, 512, 7)
    sizes = Sizes(
        arguments.history or usual.history_tokens,
        arguments.new or usual.new_tokens,
        arguments.rounds or usual.rounds,
    )
    report = Report("pipeline")
    asyncio.run(_run(report, sizes, random.Random(arguments.seed)))
    report.note(
        f"{sizes.history_tokens} tokens loaded, {sizes.new_tokens} computed, "
        f"{MODEL['num_hidden_layers']} layers; medians of {sizes.rounds} rounds"
    )
    finish(report, arguments.format)


async def _run(report: Report, sizes: Sizes, rng: random.Random) -> None:
    torch.manual_seed(1)
    with memory_pool(THERE, capacity_bytes=256 << 20) as dmp:
        line = ThrottledPoolNode(InprocPoolNode(dmp), host=THERE)
        try:
            history = [rng.randrange(10, 8_000) for _ in range(sizes.history_tokens)]
            await _publish(line, history)
            await _measure(report, line, history, sizes, rng)
        finally:
            line.close()


def _node(line: ThrottledPoolNode, *, publish: bool) -> ComputeNode:
    config = ComputeConfig(
        NodeId("compute"),
        HERE,
        random_model=RandomModelSpec(MODEL, seed=1),
        l1_bytes=256 << 20,
        block_tokens=BLOCK_TOKENS,
        load_policy=LoadPolicy.ALWAYS,
        load_timeout_s=60.0,
        publish=publish,
    )
    node = ComputeNode(config, incarnation=Incarnation(1))
    node.set_pool_nodes([line])
    return node


async def _publish(line: ThrottledPoolNode, history: list[int]) -> None:
    node = _node(line, publish=True)
    await node.start()
    try:
        await answer(node, history)
        if not await node.flush():
            raise AssertionError("the history was not published")
    finally:
        await node.stop()


async def _measure(
    report: Report,
    line: ThrottledPoolNode,
    history: list[int],
    sizes: Sizes,
    rng: random.Random,
) -> None:
    """Compute each round's new tokens behind no load, behind layers and behind whole blocks."""
    node = _node(line, publish=False)
    await node.start()
    try:
        computes: list[float] = []
        times: dict[tuple[float, Order | None], list[float]] = {}
        for number in range(sizes.rounds + 1):
            prompt = history + [rng.randrange(10, 8_000) for _ in range(sizes.new_tokens)]
            want, compute_s = await _compute_only(node, line, history, prompt)
            computes += [compute_s] if number else []  # The first round is for warm-up.
            for ratio in RATIOS if number else ():
                load_s = ratio * statistics.median(computes)
                line.bytes_per_s = _history_bytes(node, history) / load_s
                for order in Order:
                    line.order = order
                    await node.drop_cache()
                    got, seconds = await answer(node, prompt)
                    if got != want:
                        raise AssertionError("other tokens than without loading")
                    times.setdefault((ratio, order), []).append(seconds / compute_s)
                await node.drop_cache()
                if await node.prefetch(_request(prompt)) < sizes.history_tokens:
                    raise AssertionError("the history was not loaded ahead")
                _, seconds = await answer(node, prompt)
                times.setdefault((ratio, None), []).append(seconds / compute_s)
        _report(report, statistics.median(computes), times)
    finally:
        await node.stop()


async def _compute_only(
    node: ComputeNode, line: ThrottledPoolNode, history: list[int], prompt: list[int]
) -> tuple[tuple[int, ...], float]:
    line.bytes_per_s = 0.0
    await node.drop_cache()
    await answer(node, history)
    return await answer(node, prompt)


def _history_bytes(node: ComputeNode, history: list[int]) -> int:
    return len(history) // BLOCK_TOKENS * node.model.layout.payload_bytes


def _report(
    report: Report, compute_s: float, times: dict[tuple[float, Order | None], list[float]]
) -> None:
    """Report all times in units of the measured computation."""
    layers = int(MODEL["num_hidden_layers"])
    report.add("compute_s", compute_s)
    for ratio in RATIOS:
        loads, computes = [ratio / layers] * layers, [1 / layers] * layers
        layered = statistics.median(times[ratio, Order.LAYERS])
        whole = statistics.median(times[ratio, Order.WHOLE_BLOCKS])
        ahead = statistics.median(times[ratio, None])
        promised = pipelined(loads, computes)
        promised_whole = sum(loads) + sum(computes)
        name = f"load_{ratio:g}x"
        report.add(f"{name}_layers_of_compute", layered)
        report.add(f"{name}_layers_of_formula", layered / promised)
        report.add(f"{name}_whole_of_compute", whole)
        report.add(f"{name}_whole_of_formula", whole / promised_whole)
        report.add(f"{name}_speedup_over_whole", whole / layered)
        report.add(f"{name}_formula_speedup", promised_whole / promised)
        report.add(f"{name}_ahead_of_compute", ahead)
        report.add(f"{name}_ahead_speedup_over_layers", layered / ahead)


async def answer(node: ComputeNode, prompt: list[int]) -> tuple[tuple[int, ...], float]:
    """Return one token and its time in seconds."""
    request = _request(prompt)
    started = time.perf_counter()
    tokens: list[int] = []
    async for event in node.generate(request):
        tokens += event.token_ids
    return tuple(tokens), time.perf_counter() - started


def _request(prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(
        new_request_id(), "model", tuple(prompt), NAMESPACE,
        sampling=SamplingParams(max_tokens=1, ignore_eos=True),
    )  # fmt: skip


if __name__ == "__main__":
    main()
