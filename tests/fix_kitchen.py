"""Prompts of chunks on a tiny model: chunks computed in isolation, prompts blended and in full."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.fix_logits import BLOCK, CPU
from tierkv.compute.blend.passes import BlendOutcome, blend_steps
from tierkv.compute.blend.plan import BlendPlan, ChunkUse
from tierkv.compute.model.batch import ChunkInput, RawTarget, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.kvcore.request import Blend, BlendSelector


@dataclass(frozen=True)
class Prompt:
    """Token ids; ``chunks`` may be reused, all else is computed."""

    ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def head(self) -> tuple[int, ...]:
        return self.ids[: self.chunks[0][0]]


def make_prompt(seed: int, head: int, chunks: Sequence[int], gaps: Sequence[int], end: int):
    """Draw a prompt: head, chunks with as many tokens between them as gaps say, then the end."""
    rng = random.Random(seed)
    at, bounds = head, []
    for length, gap in zip(chunks, [*gaps, 0], strict=True):
        bounds.append((at, at + length))
        at += length + gap
    ids = rng.choices(range(128), k=at + end)
    return Prompt(tuple(ids), tuple(bounds))


class Kitchen:
    """A decoder with pages to give out."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._next = 1

    def pages(self, tokens: int) -> np.ndarray:
        count = -(-tokens // BLOCK)
        found = np.arange(self._next, self._next + count)
        self._next += count
        assert self._next <= self.decoder.pages.num_pages
        self.decoder.pages.kv[:, found] = torch.nan  # Whatever is read must have been written.
        return found

    def forward(self, ids, table, start=0, raw=None):
        """Compute ``ids[start:]``; returns the last token's logits."""
        chunk = ChunkInput(np.array(ids[start:]), start, table, True, raw)
        batch = build_batch([chunk], block_tokens=BLOCK, device=CPU)
        with torch.inference_mode():
            return self.decoder.forward(batch)[0]

    def full(self, prompt: Prompt):
        """Compute a prompt without any reuse; returns logits and KV."""
        table = self.pages(len(prompt.ids))
        self.decoder.pages.kv[:, table] = 0
        logits = self.forward(prompt.ids, table)
        return logits, self.kv(table, len(prompt.ids))

    def kv(self, table, tokens: int):
        """Return keys and values of a sequence, ``[layers, 2, tokens, kv_heads, head_dim]``."""
        pages = self.decoder.pages.kv[:, torch.from_numpy(table)].transpose(1, 2)
        return pages.flatten(2, 3)[:, :, :tokens].clone()

    def isolate(self, head, ids, *, split: int = 0) -> np.ndarray:
        """Compute a chunk after its head only, in two steps if ``split``; returns its raw pages."""
        raw = self.pages(len(ids))
        self.decoder.pages.kv[:, raw] = 0
        both = [*head, *ids]
        table = self.pages(len(both))
        self.decoder.pages.kv[:, table] = 0
        target = RawTarget(len(head), raw)
        if split:
            self.forward(both[:split], table, 0, target)
        self.forward(both, table, split, target)
        return raw

    def plan(self, prompt: Prompt, blend: Blend, *, exact: int = 0, missing=()) -> BlendPlan:
        """Prepare a prompt whose first ``exact`` tokens are computed and whose chunks are found."""
        table = self.pages(len(prompt.ids))
        if exact:
            own = self.decoder.pages.kv[:, table[: -(-exact // BLOCK)]]
            self.decoder.pages.kv[:, table[: own.shape[1]]] = 0
            self.forward(prompt.ids[:exact], table)
        uses = tuple(
            ChunkUse(a, b - a, self.isolate(prompt.head, prompt.ids[a:b]))
            for i, (a, b) in enumerate(prompt.chunks)
            if i not in missing and b > exact
        )
        return BlendPlan(np.array(prompt.ids), exact, table, uses, blend)

    def blend(self, plan: BlendPlan, **options) -> BlendOutcome:
        """Run a plan to its end."""
        steps = blend_steps(self.decoder, plan, **options)
        with torch.inference_mode():
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value


def blend_of(prompt: Prompt, ratio: float, selector="hkvd", gradual: bool = False) -> Blend:
    return Blend(prompt.chunks, ratio, BlendSelector(selector), gradual)
