"""Effect of the block size on hit share, time to first token and size of the directory.

Run ``python -m bench.block_size``. For each size a node with a pool on its host answers the same
prompts twice. In the first pass the prompts come eight at a time, with room for all prompts in L1.
In the second pass each prompt comes alone after L1 was emptied, so reused KV comes from the pool.
The prompts are rows after one instruction. ``--table FILE.csv`` adds the rows of a table and
``--trace FILE.jsonl.zst`` adds the requests of a trace, scaled down.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import re
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zstandard

from bench.compute_node import HERE, Timed, ask
from bench.memory_pool import memory_pool
from bench.pipeline import MODEL
from bench.report import Report, finish, make_parser
from tierkv.compute.config import ComputeConfig, LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.ids import Incarnation, NodeId

SIZES = (16, 32, 64, 128)
_AT_ONCE = 8
_SHARED_TOKENS, _ROW_TOKENS = 127, 15
_TRACE_TOKENS = 45
"""Number of tokens that replace a trace's block of 512 tokens."""
_WORD = re.compile(r"\w+|[^\w\s]")
Prompts = list[list[int]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--table", type=Path, help="a CSV file; each row becomes a prompt")
    parser.add_argument("--trace", type=Path, help="requests with hash_ids, one JSON per line")
    parser.add_argument("--prompts", type=int, help="prompts of each kind")
    arguments = parser.parse_args(argv)
    count = arguments.prompts or (8 if arguments.quick else 48)
    rng = random.Random(arguments.seed)
    kinds = {"rows": _rows(rng, count)}
    if arguments.table:
        kinds["table"] = _table(arguments.table, count)
    if arguments.trace:
        kinds["trace"] = _trace(arguments.trace, count)
    report = Report("block_size")
    sizes = SIZES[::2] if arguments.quick else SIZES
    for kind, prompts in kinds.items():
        report.add(f"{kind}_tree_share", tree_hits(prompts) / sum(map(len, prompts)))
        for size in sizes:
            for name, number in asyncio.run(_measure(size, prompts)).items():
                report.add(f"{kind}_{size}_{name}", number)
    report.note(f"{count} prompts of each kind; {_AT_ONCE} at once; medians")
    finish(report, arguments.format)


def tree_hits(prompts: Prompts) -> int:
    """Count the tokens that need no computation, because an earlier prompt has the same prefix."""
    ordered: Prompts = []
    hits = 0
    for prompt in prompts:
        hits += max((_common(prompt[:-1], other) for other in ordered), default=0)
        ordered.append(prompt)
    return hits


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _rows(rng: random.Random, count: int) -> Prompts:
    head = _tokens(rng, _SHARED_TOKENS)
    return [head + _tokens(rng, _ROW_TOKENS) for _ in range(count)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, MODEL["vocab_size"]) for _ in range(count)]


def _table(file: Path, count: int) -> Prompts:
    """Return prompts of an instruction and a row, a token per word, with reversed field order."""
    with file.open(newline="") as lines:
        rows = [row for _, row in zip(range(count), csv.DictReader(lines), strict=False)]
    texts = [", ".join(f"{name}: {text}" for name, text in reversed(row.items())) for row in rows]
    return [_words(f"Which of these products must be mended first, and why? {t}") for t in texts]


def _words(text: str) -> list[int]:
    return [10 + zlib.crc32(w.encode()) % (MODEL["vocab_size"] - 10) for w in _WORD.findall(text)]


def _trace(file: Path, count: int) -> Prompts:
    """Return the short requests of a trace; equal trace blocks become equal short token lists."""
    prompts: Prompts = []
    with zstandard.open(file, "rt") as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            if len(prompts) < count and len(ids) <= 24:
                prompts.append(
                    [t for one in ids for t in _tokens(random.Random(one), _TRACE_TOKENS)]
                )
    return prompts


async def _measure(size: int, prompts: Prompts) -> dict[str, float]:
    torch.manual_seed(1)
    with memory_pool(HERE, capacity_bytes=2 << 30) as dmp:
        pool = InprocPoolNode(dmp)
        node = ComputeNode(_config(size), incarnation=Incarnation(1))
        await node.start()
        node.set_pool_nodes([pool])
        try:
            for length in (64, 300, 700):  # Steps of different size reveal the cost.
                await ask(node, _tokens(random.Random(length), length), 1, use_cache=False)
            room = asyncio.Semaphore(_AT_ONCE)
            first = await asyncio.gather(*(_ask(node, prompt, room) for prompt in prompts))
            await node.flush()
            blocks = dmp.reports.stats().memory.blocks_used
            again = []
            for prompt in prompts:
                await node.flush()
                await node.drop_cache()
                again.append(await ask(node, prompt, 1))
            if [one.tokens for one in first] != [one.tokens for one in again]:
                raise AssertionError("other tokens out of the pool")
            l1, below = _summed("l1", first, prompts), _summed("pool", again, prompts)
            return {**l1, **below, "directory_blocks": blocks}
        finally:
            await node.stop()
            pool.close()


async def _ask(node: ComputeNode, prompt: list[int], room: asyncio.Semaphore) -> Timed:
    async with room:
        return await ask(node, prompt, 1)


def _summed(way: str, answers: Sequence[Timed], prompts: Prompts) -> dict[str, float]:
    hits = sum(one.usage.hit_tokens.total for one in answers)
    ttft_s = statistics.median(one.ttft_s for one in answers)
    return {f"{way}_hit_share": hits / sum(map(len, prompts)), f"{way}_ttft_ms": 1e3 * ttft_s}


def _config(size: int) -> ComputeConfig:
    changes: dict[str, Any] = {"l1_bytes": 1 << 30, "block_tokens": size, "threads": 1}
    return ComputeConfig(
        NodeId("compute"),
        HERE,
        random_model=RandomModelSpec(MODEL, seed=1),
        load_policy=LoadPolicy.AUTO,
        load_timeout_s=60.0,
        **changes,
    )


if __name__ == "__main__":
    main()
