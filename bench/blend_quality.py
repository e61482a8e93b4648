"""Quality of answers when notes are reused at new positions, compared with full recompute.

A prompt is a head, notes and a question. The KV of each note is computed after the head alone. The
head and the first note are exact prefix; the remaining notes are reused, with a share of the tokens
computed again. Greedy answers and the first token's distribution are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.blend_prompts import BlendPrompt, make_prompts
from bench.codec_quality import Quality
from bench.greedy import CPU, NEW_TOKENS, Greedy, Row, divergences
from tierkv.compute.blend.passes import BlendOutcome, blend_steps
from tierkv.compute.blend.plan import CHECK_LAYER, BlendPlan, ChunkUse
from tierkv.compute.model.batch import ChunkInput, RawTarget, build_batch
from tierkv.dbfront.tokens.tokenizer import load_tokenizer
from tierkv.kvcore.request import Blend, BlendSelector

NOTHING = 1e-12
"""A recompute ratio that selects no token."""
RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50, 0.75, 1.0)
BLOCK_TOKENS = 16
MOST_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Way:
    """A way to reuse the notes.

    Attributes:
        name: name of the method, the same for all ratios.
        ratio: share of reused tokens computed again.
        selector: selects the tokens to compute again; None reuses keys without position correction.
        gradual: see tierkv.kvcore.request.Blend.
        check_layer: layer at which the hkvd selector compares.
    """

    name: str
    ratio: float
    selector: BlendSelector | None
    gradual: bool = False
    check_layer: int = CHECK_LAYER


def ways(*, check_layers: Sequence[int] = (1, 2, 3), ratios: Sequence[float] = RATIOS) -> list[Way]:
    """Return all measured ways; full reuse without and with position fix comes first."""
    found = [
        Way("no position fix", 0.0, None),
        Way("position fix", NOTHING, BlendSelector.BOUNDARY),
    ]
    for ratio in ratios:
        found += [
            Way(f"hkvd, check layer {layer}", ratio, BlendSelector.HKVD, check_layer=layer)
            for layer in check_layers
        ]
        found += [
            Way("hkvd, gradual", ratio, BlendSelector.HKVD, gradual=True),
            Way("query", ratio, BlendSelector.QUERY),
            Way("boundary", ratio, BlendSelector.BOUNDARY),
        ]
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of a prompt, full recompute first: answers of each way, and divergences."""

    prompt: BlendPrompt
    answers: list[list[int]]
    divergence: list[float]


class BlendTrial:
    """A model with room for one prompt, computed in full and in each way."""

    def __init__(self, folder: Path, tried: Sequence[Way], *, longest: int) -> None:
        self._ways = tried
        width = -(-(longest + NEW_TOKENS) // BLOCK_TOKENS)
        sequences = 1 + len(tried) + 2 * MOST_CHUNKS
        self._model = Greedy(folder, block_tokens=BLOCK_TOKENS, pages=1 + sequences * width)
        tables = 1 + np.arange(sequences * width).reshape(-1, width)
        self._tables = tables[: 1 + len(tried)]
        self._alone, self._raw = np.split(tables[1 + len(tried) :], 2)

    def run(self, prompt: BlendPrompt) -> Trial:
        """Answer a prompt in full and in each way."""
        rows = [Row(list(prompt.token_ids), table) for table in self._tables]
        logits = [self._model.forward([self._model.chunk(rows[0], 0)])[0]]
        self._isolate(prompt)
        for row, way in zip(rows[1:], self._ways, strict=True):
            self._copy(rows[0].pages, row.pages, 0, prompt.chunks[0][1], 0)
            logits.append(self._reuse(prompt, row, way))
        first = torch.stack(logits)
        self._model.decode(rows, first)
        answers = [row.tokens[len(prompt.token_ids) :] for row in rows]
        return Trial(prompt, answers, divergences(first))

    def _isolate(self, prompt: BlendPrompt) -> None:
        """Compute each note after the head alone."""
        head = prompt.chunks[0][0]
        inputs = []
        for i, (start, stop) in enumerate(prompt.chunks):
            ids = np.array([*prompt.token_ids[:head], *prompt.token_ids[start:stop]])
            raw = RawTarget(head, self._raw[i])
            inputs.append(ChunkInput(ids, 0, self._alone[i], wants_logits=False, raw=raw))
        self._model.decoder.forward(build_batch(inputs, block_tokens=BLOCK_TOKENS, device=CPU))

    def _reuse(self, prompt: BlendPrompt, row: Row, way: Way) -> Tensor:
        if way.selector is None:
            return self._put_in_place(prompt, row)
        uses = [
            ChunkUse(start, stop - start, pages)
            for (start, stop), pages in zip(prompt.chunks, self._raw, strict=False)
        ]
        blend = Blend(prompt.chunks, way.ratio, way.selector, way.gradual)
        ids, exact = np.array(prompt.token_ids), prompt.chunks[0][1]
        plan = BlendPlan(ids, exact, row.pages, tuple(uses[1:]), blend)
        return _finish(self._model, plan, way.check_layer).logits[0]

    def _put_in_place(self, prompt: BlendPrompt, row: Row) -> Tensor:
        """Reuse the KV of notes unchanged; keys stay rotated for the place after the head."""
        head = prompt.chunks[0][0]
        for pages, (start, stop) in zip(self._alone, prompt.chunks, strict=False):
            self._copy(pages, row.pages, start, stop, start - head)
        return self._model.forward([self._model.chunk(row, prompt.chunks[-1][1])])[0]

    def _copy(self, source: np.ndarray, target: np.ndarray, a: int, b: int, back: int) -> None:
        """Copy the KV of positions ``[a, b)`` from ``back`` positions earlier in ``source``."""
        kv, at = self._model.decoder.pages.kv, np.arange(a, b)
        old = source[(at - back) // BLOCK_TOKENS], (at - back) % BLOCK_TOKENS
        new = target[at // BLOCK_TOKENS], at % BLOCK_TOKENS
        kv[:, new[0], :, new[1]] = kv[:, old[0], :, old[1]]


def _finish(model: Greedy, plan: BlendPlan, check_layer: int) -> BlendOutcome:
    steps = blend_steps(model.decoder, plan, check_layer=check_layer)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: BlendOutcome = end.value
            return outcome


@dataclass(frozen=True, slots=True)
class Measured:
    """Quality by way over several prompts.

    Attributes:
        prompts: number of prompts.
        full: quality of the full recompute.
        by_way: quality of each way.
    """

    prompts: int
    full: Quality
    by_way: dict[Way, Quality]


def measure(
    folder: Path, tasks: Sequence[str], tried: Sequence[Way], *, count: int, seed: int
) -> Measured:
    """Return the quality over held-out prompts.

    Args:
        folder: folder of the model.
        tasks: members of ``tierkv.compute.demo_model.data.CHAT_TASKS``.
        tried: the ways to measure.
        count: prompts per task.
        seed: seed of the prompts.
    """
    tokenizer = load_tokenizer(folder)
    prompts = make_prompts(tokenizer, tasks, count, seed)
    model = BlendTrial(folder, tried, longest=max(len(p.token_ids) for p in prompts))
    with torch.inference_mode():
        trials = [model.run(prompt) for prompt in prompts]
    found = []
    for i in range(1 + len(tried)):
        kl = [trial.divergence[i - 1] if i else 0.0 for trial in trials]
        right = [tokenizer.decode(t.answers[i]) == t.prompt.answer for t in trials]
        agree = [trial.answers[i] == trial.answers[0] for trial in trials]
        exact, same, mean = (float(np.mean(numbers)) for numbers in (right, agree, kl))
        found.append(Quality(exact, same, mean, max(kl), reused_share=1.0))
    return Measured(len(trials), found[0], dict(zip(tried, found[1:], strict=True)))
