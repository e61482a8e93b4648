"""The compute node on a CUDA device, in the shapes of widely served models, with random weights.

Run ``python -m bench.compute_gpu`` on a machine with a GPU; without a GPU the script refuses to
run. A single run measures TTFT with the cache off and on, prefill against a large matrix product,
decoding against copying, loading against the bus, and transformers with a static cache. ``--device
cpu --tiny`` runs the same code with a tiny model as a smoke test; the numbers are meaningless.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.compute_gpu_limits import (
    Device,
    bus_bytes_per_s,
    copy_bytes_per_s,
    matmul_flops_per_s,
    static_cache_tokens_per_s,
)
from bench.compute_gpu_work import Conversation, Rig, Shape
from bench.report import Report, finish, make_parser

SHAPES = {
    "llama-3.1-8b": Shape("LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128),
    "qwen2.5-7b": Shape("Qwen2ForCausalLM", 152_064, 3584, 18_944, 28, 28, 4, 128),
}
TINY = Shape("LlamaForCausalLM", 512, 64, 96, 2, 4, 2, 16)
PARTS = ("chat", "arrivals", "long", "prefill", "decode", "loading", "peer")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--models", default=",".join(SHAPES), help="any of " + ", ".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS), help="any of " + ", ".join(PARTS))
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2, "bench.compute_gpu: no CUDA device; --device cpu --tiny only tries the code\n"
        )
    if arguments.device == "cpu" and not arguments.tiny:
        parser.exit(
            2, "bench.compute_gpu: the CPU runs --tiny only; measure it with bench.compute\n"
        )
    shapes = (
        {"tiny": TINY} if arguments.tiny else {n: SHAPES[n] for n in arguments.models.split(",")}
    )
    device = Device(arguments.device, tiny=arguments.tiny)
    report = Report("compute gpu")
    for name, shape in shapes.items():
        asyncio.run(_run(report, name, shape, device, arguments))
    finish(report, arguments.format)


async def _run(report: Report, name: str, shape: Shape, device: Device, arguments: object) -> None:
    parts: list[str] = arguments.parts.split(",")  # type: ignore[attr-defined]
    seed: int = arguments.seed  # type: ignore[attr-defined]
    quick: bool = arguments.quick  # type: ignore[attr-defined]
    rounds = 2 if quick or device.tiny else 10
    scale = 16 if device.tiny else 1
    pool_bytes = (128 << 20) if device.tiny else (24 << 30) if quick else (48 << 30)
    long = (131_072,) if quick else (131_072, 200_000)
    async with Rig.open(shape, device, seed=seed, pool_bytes=pool_bytes) as rig:
        if "chat" in parts:
            await _chat(report, f"{name}_chat", rig, Conversation(3_000 // scale, 100, rounds))
        if "arrivals" in parts:
            await _arrivals(report, name, rig, 10_000 // scale, rounds, seed)
        if "long" in parts:
            for tokens in (count // scale // scale for count in long):
                talk = Conversation(tokens, 100, rounds, off_rounds=1)
                await _chat(report, f"{name}_long_{tokens}", rig, replace(talk, from_host=True))
        if "prefill" in parts:
            flops = await rig.prefill_flops_per_s(8_192 // scale)
            report.add(f"{name}_prefill_tflop_per_s", flops / 1e12)
            report.add(f"{name}_prefill_of_matmul", flops / matmul_flops_per_s(device))
        if "decode" in parts:
            for batch in (1, 64):
                speed, read = await rig.decode(batch, prompt_tokens=1_024 // scale)
                report.add(f"{name}_decode_batch_{batch}_tokens_per_s", speed)
                share = read / copy_bytes_per_s(device)
                report.add(f"{name}_decode_batch_{batch}_of_copy_bandwidth", share)
        if "loading" in parts:
            rate = await rig.loading_bytes_per_s(65_536 // scale // scale)
            report.add(f"{name}_loading_of_bus", rate / bus_bytes_per_s(device))
    del rig  # Free the weights and pages to make room for the peer.
    if "peer" in parts:
        for batch in (1, 64):
            speed = static_cache_tokens_per_s(shape.config(), device, batch, 1_024 // scale)
            report.add(f"{name}_transformers_static_batch_{batch}_tokens_per_s", speed)


async def _chat(report: Report, name: str, rig: Rig, talk: Conversation) -> None:
    found = await rig.converse(talk)
    report.add(f"{name}_off_ttft_s", statistics.median(found.off_s))
    report.add(f"{name}_ttft_s", statistics.median(found.on_s))
    report.add(
        f"{name}_times_faster", statistics.median(found.off_s) / statistics.median(found.on_s)
    )


async def _arrivals(
    report: Report, name: str, rig: Rig, tokens: int, rounds: int, seed: int
) -> None:
    """Play four conversations, a question each per round, with four requests per second."""
    for use_cache in (False, True):
        times = await rig.arrivals(
            tokens, rounds, per_s=4.0, use_cache=use_cache, rng=random.Random(seed)
        )
        which = "on" if use_cache else "off"
        report.add(f"{name}_arrivals_{which}_mean_ttft_s", statistics.fmean(times))


if __name__ == "__main__":
    main()
