"""Decoding with guesses and with shared reads, each compared with plain decoding in one run.

Run ``python -m bench.decoding``. Guesses: the shipped model answers questions whose answers are in
the prompt, and questions whose answers are labels of a single token. A model of 100 M random
parameters continues prompts without a reason to repeat the prompt. Shared reads: rows with a common
prefix of 2,048 tokens. The tokens must agree.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.compute_node import HERE, NAMESPACE
from bench.pipeline import MODEL
from bench.report import Report, finish, make_parser
from tierkv.compute.config import ComputeConfig, RandomModelSpec
from tierkv.compute.demo_model.data import make_probes
from tierkv.compute.loading import load_model
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.row_groups import LEAST_SAVED_TOKENS
from tierkv.compute.node import ComputeNode
from tierkv.kvcore.ids import Incarnation, NodeId, new_request_id
from tierkv.kvcore.request import GenerateRequest, SamplingParams
from tools.demo_model.evaluate import Answerer
from tools.demo_model.tokenizer import FOLDER

BLOCK_TOKENS = 64
SHARED_TOKENS, OWN_TOKENS = 2_048, 64
_LEAST_DECODED = 3
"""Tokens per answer below which a decoding rate is meaningless."""
COPIES, LABELS = ("lookup", "extract"), ("sentiment", "topic", "category", "review_filter")


@dataclass(frozen=True, slots=True)
class Run:
    """Answers to several concurrent prompts, and seconds until the first and the last token."""

    answers: list[list[int]]
    first_s: float
    whole_s: float

    @property
    def decoded(self) -> int:
        """Number of tokens after the first token of each answer."""
        return sum(max(0, len(tokens) - 1) for tokens in self.answers)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--probes", type=int, help="questions per task and round")
    parser.add_argument("--tokens", type=int, help="that the random model adds to a prompt")
    parser.add_argument("--rows", type=int, nargs="*", default=(8, 32), help="that share")
    parser.add_argument("--shared-tokens", type=int, default=SHARED_TOKENS, help="what they share")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    probes = arguments.probes or (2 if arguments.quick else 16)
    tokens = arguments.tokens or (12 if arguments.quick else 48)
    report, rng = Report("decoding"), random.Random(arguments.seed)
    asyncio.run(_guesses(report, rounds=rounds, probes=probes, tokens=tokens, rng=rng))
    for rows in arguments.rows:
        _cascade(report, rows, arguments.shared_tokens, rounds=rounds, rng=rng)
    report.note(f"one thread, float32; medians of {rounds} rounds, each with both ways in turn")
    finish(report, arguments.format)


async def _guesses(
    report: Report, *, rounds: int, probes: int, tokens: int, rng: random.Random
) -> None:
    tokenizer = Answerer(FOLDER).tokenizer
    shipped = {"model_folder": str(FOLDER)}
    for name, tasks in (("copies", COPIES), ("labels", LABELS)):
        asked = [
            tokenizer.apply_chat_template(
                list(probe.messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
            for probe in make_probes(tasks, probes, rng.randrange(1 << 20))
        ]
        for batch in (1, 8):
            await _compare(report, f"{name}_batch_{batch}", shipped, asked, 24, batch, rounds)
    random_model: dict[str, Any] = {"random_model": RandomModelSpec(MODEL, seed=1)}
    prompts = [[rng.randrange(10, 8_000) for _ in range(256)] for _ in range(4)]
    for batch in (1, 4):
        await _compare(
            report, f"random_batch_{batch}", random_model, prompts, tokens, batch, rounds
        )


async def _compare(
    report: Report,
    name: str,
    model: dict[str, Any],
    prompts: Sequence[list[int]],
    new_tokens: int,
    batch: int,
    rounds: int,
) -> None:
    """Answer the same prompts with and without guesses, in turn; the first round does not count."""
    nodes = [_node(model, guesses) for guesses in (0, -1)]
    for node in nodes:
        await node.start()
    try:
        runs: list[tuple[Run, Run]] = []
        for number in range(rounds + 1):
            for first in range(0, len(prompts), batch):
                part = prompts[first : first + batch]
                order = nodes if number % 2 else nodes[::-1]
                both = [await _decode(node, part, new_tokens) for node in order]
                plain, guessing = both if number % 2 else both[::-1]
                if plain.answers != guessing.answers:
                    raise AssertionError("other tokens than without guesses")
                runs += [(plain, guessing)] if number else []
        _report(report, name, runs, batch)
        stats = nodes[1].speculation
        if stats.decoded_tokens:
            report.add(f"{name}_guessed_of_decoded", stats.guessed_tokens / stats.decoded_tokens)
            report.add(f"{name}_right_of_decoded", stats.right_tokens / stats.decoded_tokens)
    finally:
        for node in nodes:
            await node.stop()


def _report(report: Report, name: str, runs: Sequence[tuple[Run, Run]], batch: int) -> None:
    """Report the numbers of both ways, and the median of the ratios of pairs."""
    plain_s, guessing_s = (statistics.median(run[i].whole_s for run in runs) for i in (0, 1))
    report.add(f"{name}_plain_answers_per_s", batch / plain_s)
    report.add(f"{name}_guessing_answers_per_s", batch / guessing_s)
    ratios = [plain.whole_s / guessing.whole_s for plain, guessing in runs]
    report.add(f"{name}_guessing_speedup_of_answers", statistics.median(ratios))
    speeds = [
        tuple(run.decoded / (run.whole_s - run.first_s) for run in both)
        for both in runs
        if both[0].decoded >= _LEAST_DECODED * batch
    ]
    if speeds:
        report.add(f"{name}_plain_tokens_per_s", statistics.median(x for x, _ in speeds))
        report.add(f"{name}_guessing_tokens_per_s", statistics.median(x for _, x in speeds))
        report.add(f"{name}_guessing_speedup", statistics.median(b / a for a, b in speeds))


def _node(model: dict[str, Any], guesses: int) -> ComputeNode:
    config = ComputeConfig(
        NodeId("compute"), HERE, l1_bytes=256 << 20, block_tokens=BLOCK_TOKENS, publish=False,
        threads=1, speculative_tokens=guesses, **model,
    )  # fmt: skip
    return ComputeNode(config, incarnation=Incarnation(1))


async def _decode(node: ComputeNode, prompts: Sequence[list[int]], new_tokens: int) -> Run:
    """Answer several prompts in L1 concurrently."""
    await asyncio.gather(*(_answer(node, prompt, 1) for prompt in prompts))
    began = time.perf_counter()
    timed = await asyncio.gather(*(_answer(node, prompt, new_tokens) for prompt in prompts))
    firsts, lasts = [first for _, first, _ in timed], [last for _, _, last in timed]
    return Run([tokens for tokens, _, _ in timed], max(firsts) - began, max(lasts) - began)


async def _answer(
    node: ComputeNode, prompt: list[int], new_tokens: int
) -> tuple[list[int], float, float]:
    """Return the tokens, and the times of the first and the last token."""
    request = GenerateRequest(
        new_request_id(), "model", tuple(prompt), NAMESPACE,
        sampling=SamplingParams(max_tokens=new_tokens),
    )  # fmt: skip
    tokens: list[int] = []
    first = 0.0
    async for event in node.generate(request):
        tokens += event.token_ids
        first = first or time.perf_counter()
    return tokens, first, time.perf_counter()


def _cascade(
    report: Report, rows: int, shared_tokens: int, *, rounds: int, rng: random.Random
) -> None:
    """Decode rows step by step, each step both ways; the tokens of both must be equal."""
    shared, own = shared_tokens // BLOCK_TOKENS, OWN_TOKENS // BLOCK_TOKENS + 1
    config = ComputeConfig(
        NodeId("compute"), HERE, random_model=RandomModelSpec(MODEL, seed=1),
        l1_pages=shared + rows * own + 1, block_tokens=BLOCK_TOKENS, threads=1,
    )  # fmt: skip
    decoder = load_model(config).decoder
    head = np.arange(1, shared + 1)
    tables = [np.append(head, 1 + shared + own * i + np.arange(own)) for i in range(rows)]
    _forward(decoder, [_drawn(rng, shared_tokens, 0, tables[0])])
    _forward(decoder, [_drawn(rng, OWN_TOKENS, shared_tokens, table) for table in tables])
    last, times = [10] * rows, dict[bool, list[float]]({False: [], True: []})
    for step in range(rounds + 1):
        at = shared_tokens + OWN_TOKENS + step
        chunks = [ChunkInput(np.array([t]), at, tables[i], 1) for i, t in enumerate(last)]
        found = []
        for shares in (False, True):
            began = time.perf_counter()
            found.append(_forward(decoder, chunks, shares=shares))
            times[shares] += [time.perf_counter() - began] if step else []
        if found[0] != found[1]:
            raise AssertionError("other tokens than with a read per row")
        last = found[0]
    plain, sharing = statistics.median(times[False]), statistics.median(times[True])
    report.add(f"rows_{rows}_plain_tokens_per_s", rows / plain)
    report.add(f"rows_{rows}_sharing_tokens_per_s", rows / sharing)
    ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
    report.add(f"rows_{rows}_sharing_speedup", statistics.median(ratios))


def _drawn(rng: random.Random, count: int, start: int, table: np.ndarray[Any, Any]) -> ChunkInput:
    ids = np.array([rng.randrange(10, 8_000) for _ in range(count)])
    return ChunkInput(ids, start, table, 1)


def _forward(decoder: Decoder, chunks: Sequence[ChunkInput], *, shares: bool = False) -> list[int]:
    least = LEAST_SAVED_TOKENS if shares else 1 << 62
    cpu = torch.device("cpu")
    batch = build_batch(chunks, block_tokens=BLOCK_TOKENS, device=cpu, least_saved_tokens=least)
    with torch.inference_mode():
        tokens = decoder.forward(batch).argmax(dim=-1).tolist()
    ordered = dict(zip(batch.logit_chunks, tokens, strict=True))
    return [ordered[i] for i in range(len(chunks))]


if __name__ == "__main__":
    main()
