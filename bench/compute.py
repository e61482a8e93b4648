"""Benchmarks of the compute node: reuse from each tier, decoding against transformers, blending.

Run ``python -m bench.compute``. ``--quick`` takes about a minute, the whole run about fifteen. The
model runs on the CPU with random weights of more than 100 M parameters; the benchmark for GPUs is
bench.compute_gpu. bench.pipeline compares loading layer by layer over a slow line with loading
whole blocks.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import compute_blend, compute_decode, compute_ttft
from bench.line_plot import Panel, save_panels
from bench.report import Report, finish, make_parser

PARTS = ("ttft", "decode", "blend")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--parts", default=",".join(PARTS), help="any of " + ", ".join(PARTS))
    parser.add_argument("--histories", help="tokens of history, as 1024,4096")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--plot", type=Path, help="write a picture of TTFT by round")
    arguments = parser.parse_args(argv)
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    report = Report("compute")
    if "decode" in parts:
        _decode(report, quick=arguments.quick, seed=arguments.seed)
    if "blend" in parts:
        rounds, chunk_tokens = (1, 128) if arguments.quick else (5, 512)
        _blend(report, rounds=rounds, chunk_tokens=chunk_tokens, seed=arguments.seed)
    if "ttft" in parts:
        usual = "320" if arguments.quick else "1024,4096,16384"
        histories = [int(tokens) for tokens in (arguments.histories or usual).split(",")]
        rounds = arguments.rounds or (2 if arguments.quick else 10)
        found = [_ttft(report, tokens, rounds, arguments.seed) for tokens in histories]
        if arguments.plot:
            save_panels(arguments.plot, [_panel(history) for history in found])
    finish(report, arguments.format)


def _panel(history: compute_ttft.History) -> Panel:
    """Show TTFT by round, with the cache off and from each tier."""
    lines = {"off": sorted(history.off.items())}
    lines |= {tier: list(enumerate(times)) for tier, times in history.tiers.items()}
    ticks = {float(number): str(number + 1) for number in range(len(history.tiers["L1"]))}
    return Panel(f"{history.tokens:,} tokens of history: TTFT, s", lines, ticks, "round")


def _ttft(report: Report, tokens: int, rounds: int, seed: int) -> compute_ttft.History:
    """Measure a history; 16 K tokens take a minute, so long ones run without cache only twice."""
    off_rounds = set(range(rounds)) if tokens <= 4_096 else {0, rounds - 1}
    found = asyncio.run(compute_ttft.measure(tokens, rounds, off_rounds, seed))
    name = f"history_{tokens}"
    report.add(f"{name}_off_ttft_s", statistics.median(found.off.values()))
    for tier, times in found.tiers.items():
        report.add(f"{name}_{tier}_ttft_s", statistics.median(times))
        ratios = [seconds / times[number] for number, seconds in found.off.items()]
        report.add(f"{name}_{tier}_times_faster_than_off", statistics.median(ratios))
    return found


def _decode(report: Report, *, quick: bool, seed: int) -> None:
    new_tokens, rounds = (12, 1) if quick else (64, 5)
    results = asyncio.run(
        compute_decode.measure(
            (1, 8), prompt_tokens=128, new_tokens=new_tokens, rounds=rounds, seed=seed
        )
    )
    for result in results:
        name = f"decode_batch_{result.batch}"
        report.add(f"{name}_tokens_per_s", statistics.median(result.ours))
        report.add(f"{name}_transformers_tokens_per_s", statistics.median(result.theirs))
        report.add(f"{name}_times_faster_than_transformers", result.ratio)


def _blend(report: Report, *, rounds: int, chunk_tokens: int, seed: int) -> None:
    found = asyncio.run(compute_blend.measure(rounds, seed, chunk_tokens=chunk_tokens))
    report.add("blend_full_ttft_s", statistics.median(found.full_s))
    report.add("blend_ttft_s", statistics.median(found.blend_s))
    report.add("blend_times_faster_than_full", found.speedup)
    report.add("blend_flops_of_full", found.flop_share)
    report.add("blend_speedup_of_flop_promise", found.speedup * found.flop_share)


if __name__ == "__main__":
    main()
