"""Ten rounds of chat over a long history: time to first token without cache and from each tier.

Run ``python -m bench.chat_reuse``. A random-weight model of more than 100 M parameters answers the
same conversation with the cache off, and with each tier in turn as the only source of KV. The
tokens must be equal; the times are printed as ratios.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.report import Report, finish, parse_arguments
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.ids import HostId, Incarnation, NamespaceKey, NodeId, new_request_id
from tierkv.kvcore.request import GenerateRequest, SamplingParams
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.parts import DmpPart

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
NAMESPACE = NamespaceKey(bytes(range(32)))
MODES = ("L1", "L2", "L3")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    history, rounds = (1_000, 3) if arguments.quick else (3_000, 10)
    report = Report("chat reuse")
    asyncio.run(_run(report, history, rounds, random.Random(arguments.seed)))
    report.note(f"{rounds} rounds over a history of {history} tokens; medians; block 64 tokens")
    finish(report, arguments.format)


async def _run(report: Report, history: int, rounds: int, rng: random.Random) -> None:
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        meta = LocalMeta()
        pool = DmpPart(
            DmpConfig(NodeId("dmp"), HostId("a"), f"{Path(folder)}/seg", capacity_bytes=2 << 30),
            meta,
        )
        await pool.start()
        node = _compute(meta)
        report.add("model_parameters", node.model.parameters)
        await node.start()
        try:
            turns = [_tokens(rng, 24) for _ in range(rounds)]
            start = _tokens(rng, history)
            answers, off = await _chat(node, start, turns, use_cache=False)
            report.add("ttft_off_s", statistics.median(off))
            for mode in MODES:
                where = HostId("a") if mode == "L2" else HostId("b")
                info = pool.node.reports.info(data_address=pool.address)
                client = connect_pool_node(info, host=where)
                node.set_pool_nodes([client])
                got, times = await _chat(node, start, turns, mode=mode, flush=pool)
                if got != answers:
                    raise AssertionError(f"{mode}: other tokens than without the cache")
                report.add(f"ttft_{mode}_s", statistics.median(times))
                speedup = statistics.median(off) / statistics.median(times)
                report.add(f"speedup_{mode}_over_off", speedup)
                node.set_pool_nodes([])
                client.close()
        finally:
            await node.stop()
            await pool.stop()
            await meta.close()


def _compute(meta: LocalMeta) -> ComputeNode:
    config = ComputeConfig(
        NodeId("compute"),
        HostId("a"),
        random_model=RandomModelSpec(MODEL, seed=1),
        l1_bytes=512 << 20,
        load_policy=LoadPolicy.ALWAYS,
    )
    return ComputeNode(config, incarnation=Incarnation(1), meta=meta)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, MODEL["vocab_size"]) for _ in range(count)]  # type: ignore[call-overload]


async def _chat(
    node: ComputeNode,
    start: list[int],
    turns: list[list[int]],
    *,
    mode: str = "",
    use_cache: bool = True,
    flush: DmpPart | None = None,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Play the conversation; the first answer warms the tier and is not timed."""
    prompt = list(start)
    await node.drop_cache()
    if use_cache:
        await _answer(node, prompt, use_cache)
    answers, times = [], []
    for turn in turns:
        prompt += turn
        await node.flush()  # A person thinks longer between turns than write-behind takes.
        if mode in ("L2", "L3"):
            assert flush is not None
            await flush.flush()
            await node.drop_cache()
        answer, seconds = await _answer(node, prompt, use_cache)
        answers.append(answer)
        times.append(seconds)
        prompt += answer
    return answers, times


async def _answer(
    node: ComputeNode, prompt: list[int], use_cache: bool
) -> tuple[tuple[int, ...], float]:
    request = GenerateRequest(
        new_request_id(), "model", tuple(prompt), NAMESPACE,
        sampling=SamplingParams(max_tokens=8, ignore_eos=True), use_cache=use_cache,
    )  # fmt: skip
    started, first = time.perf_counter(), 0.0
    tokens: list[int] = []
    async for event in node.generate(request):
        if event.token_ids and not first:
            first = time.perf_counter() - started
        tokens += event.token_ids
    return tuple(tokens), first


if __name__ == "__main__":
    main()
