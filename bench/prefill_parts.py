"""Which part of a prefill matrix products and attention take, by number of threads.

Run ``python -m bench.prefill_parts``. One node in this process, a model of 132 M parameters with
random weights in float32, new prompts only. Every number of threads runs in a process of its own.
The rest is norms, rotations, activations, writing KV, and Python.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.compute_node import ask, make_node, random_tokens
from bench.report import Report, finish, make_parser
from tierkv.compute.model.attention import PagedAttention
from tierkv.compute.model.weights import Projection

_L1_TOKENS = 16_384
_spent: Counter[str] = Counter()


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the engine")
    arguments = parser.parse_args(argv)
    report = Report("prefill parts")
    prompts, rounds = ((512,), 2) if arguments.quick else ((512, 2_048), 5)
    context = multiprocessing.get_context("spawn")
    for threads in arguments.threads:
        with context.Pool(1) as pool:
            found = pool.apply(_measured, (threads, prompts, rounds, arguments.seed))
        for name, value in found.items():
            report.add(f"{threads}_threads_{name}", value)
    finish(report, arguments.format)


def _measured(threads: int, prompts: Sequence[int], rounds: int, seed: int) -> dict[str, float]:
    """Return tokens per second and shares of the time to the first token."""
    Projection.__call__ = _timed("products", Projection.__call__)  # type: ignore[method-assign]
    PagedAttention.attend = _timed("attention", PagedAttention.attend)  # type: ignore[method-assign]
    return asyncio.run(_prefills(threads, prompts, rounds, random.Random(seed)))


async def _prefills(
    threads: int, prompts: Sequence[int], rounds: int, rng: random.Random
) -> dict[str, float]:
    node = make_node(_L1_TOKENS, threads=threads)
    await node.start()
    found: dict[str, float] = {}
    for tokens in prompts:
        await ask(node, random_tokens(rng, tokens), 1)
        _spent.clear()
        times = [(await ask(node, random_tokens(rng, tokens), 1)).ttft_s for _ in range(rounds)]
        found[f"prefill_{tokens}_tokens_per_s"] = tokens / statistics.median(times)
        for part, seconds in sorted(_spent.items()):
            found[f"prefill_{tokens}_{part}_share"] = seconds / sum(times)
    await node.stop()
    return found


def _timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the model; its seconds are added up."""

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = run(*arguments)
        _spent[part] += time.perf_counter() - began
        return result

    return timed


if __name__ == "__main__":
    main(sys.argv[1:])
