"""Steps of a warm statement: many short rests behind cached prompts, together and one by one.

Run ``python -m bench.warm_rests``. Each step fills the token budget with rests of one kind. Each
step is computed in two ways, in turn: as in production, and with an attention call per sequence and
every row in the last layer. The tokens must agree. The models are the shipped model and a model of
100 M random parameters.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.compute_node import BLOCK_TOKENS, HERE, MODEL
from bench.report import Report, finish, make_parser
from tierkv.compute.config import ComputeConfig, RandomModelSpec
from tierkv.compute.loading import load_model
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.kvcore.ids import NodeId
from tools.demo_model.tokenizer import FOLDER

STEP_TOKENS = 1_024
CPU = torch.device("cpu")
_LOWEST_ID, _IDS = 10, 2_000


@dataclass(frozen=True, slots=True)
class Case:
    """Common properties of the sequences of a step.

    Attributes:
        name: name in the report.
        shared: number of leading tokens common to all sequences.
        own: maximum number of cached tokens of each sequence after the shared tokens; drawn per
            sequence if ``varies``.
        rest: maximum number of tokens left to compute; drawn per sequence if ``varies``.
        varies: whether lengths differ.
    """

    name: str
    shared: int
    own: int
    rest: int
    varies: bool = False


CASES = (
    Case("rest_8", 320, 64, 8),
    Case("rest_34", 320, 128, 34),
    Case("rest_2_to_64", 320, 128, 64, varies=True),
    Case("rest_34_nothing_shared", 0, 448, 34),
    Case("rest_34_nothing_cached", 0, 0, 34),
    Case("prompts_of_512", 0, 0, 512),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tokens", type=int, default=STEP_TOKENS, help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    report, rng = Report("warm_rests"), random.Random(arguments.seed)
    for name, model in (
        ("shipped", {"model_folder": str(FOLDER)}),
        ("random", {"random_model": RandomModelSpec(MODEL, seed=1)}),
    ):
        config = ComputeConfig(
            NodeId("compute"), HERE, l1_pages=1_200, block_tokens=BLOCK_TOKENS, touch_l1=False,
            threads=arguments.threads, **model,
        )  # fmt: skip
        decoder = load_model(config).decoder
        decoder.pages.kv.normal_(generator=torch.Generator().manual_seed(arguments.seed))
        decoder.pages.clear([0])
        for case in CASES[1:4] if arguments.quick else CASES:
            step = draw(case, arguments.tokens, decoder.pages.num_pages, rng)
            measure(report, f"{name}_{case.name}", decoder, step, rounds)
    report.note(
        f"{arguments.threads} threads, float32, steps of {arguments.tokens} tokens; {rounds} rounds"
        " with both ways in turn; speed-up: medians of wall seconds, least processor seconds"
    )
    finish(report, arguments.format)


def draw(case: Case, tokens: int, num_pages: int, rng: random.Random) -> list[ChunkInput]:
    """Return a step's chunks; the pages hold arbitrary KV."""
    head = list(range(1, 1 + case.shared // BLOCK_TOKENS))
    free = rng.sample(range(len(head) + 1, num_pages), num_pages - len(head) - 1)
    chunks: list[ChunkInput] = []
    while tokens > 1:
        count = min(tokens, rng.randint(2, case.rest) if case.varies else case.rest)
        start = case.shared + (rng.randint(0, case.own) if case.varies else case.own)
        own = [free.pop() for _ in range(-(-(start + count) // BLOCK_TOKENS) - len(head))]
        ids = np.array([rng.randrange(_LOWEST_ID, _IDS) for _ in range(count)])
        chunks.append(ChunkInput(ids, start, np.array(head + own), 1))
        tokens -= count
    return chunks


def measure(
    report: Report, name: str, decoder: Decoder, step: Sequence[ChunkInput], rounds: int
) -> None:
    """Compute a step both ways, in turn; the first round does not count."""
    wall = dict[bool, list[float]]({False: [], True: []})
    processor = dict[bool, list[float]]({False: [], True: []})
    for number in range(rounds + 1):
        found = {}
        for together in (number % 2 == 0, number % 2 == 1):
            began, began_processor = time.perf_counter(), time.process_time()
            found[together] = _forward(decoder, step, together=together)
            if number:
                wall[together].append(time.perf_counter() - began)
                processor[together].append(time.process_time() - began_processor)
        if found[False] != found[True]:
            raise AssertionError("other tokens than one by one")
    medians = {way: statistics.median(seconds) for way, seconds in wall.items()}
    report.add(f"{name}_one_by_one_step_ms", medians[False] * 1e3)
    report.add(f"{name}_together_step_ms", medians[True] * 1e3)
    report.add(f"{name}_speedup", medians[False] / medians[True])
    report.add(f"{name}_processor_speedup", min(processor[False]) / min(processor[True]))


def _forward(decoder: Decoder, step: Sequence[ChunkInput], *, together: bool) -> list[int]:
    if together:
        batch = build_batch(step, block_tokens=BLOCK_TOKENS, device=CPU)
    else:
        batch = build_batch(step, block_tokens=BLOCK_TOKENS, device=CPU, longest_rest=0)
        batch = dataclasses.replace(batch, last=None)
    with torch.inference_mode():
        tokens = decoder.forward(batch).argmax(dim=-1).tolist()
    ordered = dict(zip(batch.logit_chunks, tokens, strict=True))
    return [ordered[i] for i in range(len(step))]


if __name__ == "__main__":
    main()
