"""Ten rounds of chat over a long history: time to first token without cache and from each tier.

Run ``python -m bench.chat_reuse``. A random-weight model of more than 100 M parameters answers the
same conversation with the cache off, and with each tier in turn as the only source of KV. Ways come
in random order, and each begins with an answer that does not count. The tokens must be equal, and
the whole history must come from the tier; the times are printed as ratios.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence

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
BLOCK_TOKENS = 64
OFF = "off"
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
            DmpConfig(
                NodeId("dmp"), HostId("a"), segment_path=f"{folder}/seg", capacity_bytes=2 << 30
            ),
            meta,
        )
        await pool.start()
        node = _compute(meta)
        report.add("model_parameters", node.model.parameters)
        await node.start()
        try:
            turns = [_tokens(rng, 24) for _ in range(rounds)]
            start = _tokens(rng, history)
            answers, times = {}, {}
            for mode in rng.sample((OFF, *MODES), 1 + len(MODES)):
                where = HostId("a") if mode == "L2" else HostId("b")
                info = pool.node.reports.info(data_address=pool.address)
                client = connect_pool_node(info, host=where)
                node.set_pool_nodes([client])
                answers[mode], times[mode] = await _chat(node, start, turns, mode=mode, pool=pool)
                node.set_pool_nodes([])
                client.close()
            for mode in (OFF, *MODES):
                if answers[mode] != answers[OFF]:
                    raise AssertionError(f"{mode}: other tokens than without the cache")
                report.add(f"ttft_{mode}_s", statistics.median(times[mode]))
            for mode in MODES:
                speedup = statistics.median(times[OFF]) / statistics.median(times[mode])
                report.add(f"speedup_{mode}_over_off", speedup)
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
        block_tokens=BLOCK_TOKENS,
        load_policy=LoadPolicy.ALWAYS,
    )
    return ComputeNode(config, incarnation=Incarnation(1), meta=meta)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, MODEL["vocab_size"]) for _ in range(count)]  # type: ignore[call-overload]


async def _chat(
    node: ComputeNode, start: list[int], turns: list[list[int]], *, mode: str, pool: DmpPart
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Play the conversation; the first answer warms the node and the tier, and is not timed."""
    prompt = list(start)
    await node.drop_cache()
    await _answer(node, prompt, mode)
    answers, times = [], []
    for turn in turns:
        prompt += turn
        await node.flush()  # A person thinks longer between turns than write-behind takes.
        if mode in ("L2", "L3"):
            await pool.flush()
            await node.drop_cache()
        answer, seconds, hit_tokens = await _answer(node, prompt, mode)
        if hit_tokens < (0 if mode == OFF else len(start) // BLOCK_TOKENS * BLOCK_TOKENS):
            raise AssertionError(f"{mode} gave {hit_tokens} of {len(start)} tokens")
        answers.append(answer)
        times.append(seconds)
        prompt += answer
    return answers, times


async def _answer(
    node: ComputeNode, prompt: list[int], mode: str
) -> tuple[tuple[int, ...], float, int]:
    """Return the answer, the time to its first token, and the tokens that the tier gave."""
    request = GenerateRequest(
        new_request_id(), "model", tuple(prompt), NAMESPACE,
        sampling=SamplingParams(max_tokens=8, ignore_eos=True), use_cache=mode != OFF,
    )  # fmt: skip
    started, first, hit_tokens = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    async for event in node.generate(request):
        if event.token_ids and not first:
            first = time.perf_counter() - started
        tokens += event.token_ids
        if event.usage is not None:
            hit_tokens = getattr(event.usage.hit_tokens, mode.lower(), 0)
    return tuple(tokens), first, hit_tokens


if __name__ == "__main__":
    main()
