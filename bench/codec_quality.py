"""Quality cost of a KV codec: a model's greedy answers and logits, compared with full recompute.

A prompt is computed once. For each codec the prompt's whole blocks are encoded and decoded as if
loaded from the pool. The remaining tokens are computed on top, as in the engine, and the answer is
decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.greedy import NEW_TOKENS, Greedy, Row, divergences
from tierkv.compute.codec.entropy import LEVELS, CodecLevel
from tierkv.compute.demo_model.data import Probe
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.tokenizer import load_tokenizer
from tierkv.kvcore.layout import KvCodec

MEASURED = tuple(codec for codec in KvCodec if codec is not KvCodec.ADAPTIVE)
"""All codecs except ``adaptive``, a mix of two measured codecs."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of one codec over all probes.

    Attributes:
        exact_match: share of right answers.
        agreement: share of answers equal to the full recompute's answer.
        kl_mean: mean Kullback-Leibler divergence of the first answer token's distribution from the
            full recompute's, in nats.
        kl_max: the largest divergence.
        reused_share: share of prompt tokens whose KV went through the codec.
        bits: bits per number of the reused KV below L1, including padding and per-block tables.
    """

    exact_match: float
    agreement: float
    kl_mean: float
    kl_max: float
    reused_share: float
    bits: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of a prompt, without and with each codec.

    Attributes:
        answers: answers, full recompute first.
        divergence: divergence of each codec, in nats.
        reused_tokens: tokens that went through each codec.
        stored_bytes: stored bytes of the reused tokens, per codec.
    """

    answers: list[list[int]]
    divergence: list[float]
    reused_tokens: int
    stored_bytes: list[int]


class CodecTrial:
    """A model with room for one prompt per codec and one prompt without a codec."""

    def __init__(self, folder: Path, *, block_tokens: int, longest: int) -> None:
        self._width = -(-(longest + NEW_TOKENS) // block_tokens)
        self._model = Greedy(
            folder, block_tokens=block_tokens, pages=1 + self._width * (1 + len(MEASURED))
        )
        self._pages = self._model.decoder.pages
        layout = self._model.decoder.pages.layout
        self.block_numbers = layout.payload_bytes // layout.dtype.itemsize

    def run(self, prompt: Sequence[int]) -> Trial:
        """Answer a prompt without and with each codec."""
        tables = 1 + np.arange((1 + len(MEASURED)) * self._width).reshape(-1, self._width)
        rows = [Row(list(prompt), pages) for pages in tables]
        model = self._model
        want = model.forward([model.chunk(rows[0], 0)])[0]
        blocks = (len(prompt) - 1) // model.block
        stored = self._through_codecs(rows, blocks)
        got = model.forward([model.chunk(row, blocks * model.block) for row in rows[1:]])
        first = torch.cat([want[None], got])
        model.decode(rows, first)
        divergence = divergences(first)
        answers = [row.tokens[len(prompt) :] for row in rows]
        return Trial(answers, divergence, blocks * model.block, stored)

    def _through_codecs(self, rows: Sequence[Row], blocks: int) -> list[int]:
        """Copy the first row's whole blocks to each further row through the row's codec."""
        stored = []
        for row, codec in zip(rows[1:], MEASURED, strict=True):
            sources, targets = rows[0].pages[:blocks].tolist(), row.pages[:blocks].tolist()
            ways = zip(sources, targets, strict=True)
            if codec.has_fixed_size:
                stored.append(sum(self._copy(codec, *way) for way in ways))
            else:
                levels = [
                    CodecLevel.FINE,
                    *[LEVELS[codec]] * blocks,
                ]  # As in compute/tiers/block_puts.py.
                stored.append(sum(map(self._copy_frames, sources, targets, levels)))
        return stored

    def _copy(self, codec: KvCodec, source: int, target: int) -> int:
        pages = self._model.decoder.pages
        stored = 0
        for layer in range(pages.layout.layers):
            window = pages.window(layer, [target], codec)
            window.ranges[0][:] = pages.read_ranges(layer, [source], codec)[0]
            window.commit(1)
            stored += len(window.ranges[0])
        return stored

    def _copy_frames(self, source: int, target: int, level: CodecLevel) -> int:
        pages = self._model.decoder.pages
        frames = pages.read_frames(source, level)
        size = len(frames) // pages.layout.layers
        for layer in range(pages.layout.layers):
            window = pages.window(layer, [target], KvCodec.ADAPTIVE, [size])
            window.ranges[0][:] = frames[layer * size : (layer + 1) * size]
            window.commit(1)
        return len(frames)


def measure(folder: Path, probes: Sequence[Probe], *, block_tokens: int = 64) -> dict[str, Quality]:
    """Return the quality of ``full`` recompute and of each codec, over the probes."""
    tokenizer = load_tokenizer(folder)
    prompts = [
        asyncio.run(tokenizer.encode_chat([Message(m["role"], m["content"]) for m in p.messages]))
        for p in probes
    ]
    model = CodecTrial(folder, block_tokens=block_tokens, longest=max(map(len, prompts)))
    with torch.inference_mode():
        trials = [model.run(prompt) for prompt in prompts]
    tokens = sum(trial.reused_tokens for trial in trials)
    found = {}
    for i, name in enumerate(["full", *MEASURED]):
        right = [
            tokenizer.decode(trial.answers[i]) == probe.answer
            for trial, probe in zip(trials, probes, strict=True)
        ]
        agree = [trial.answers[i] == trial.answers[0] for trial in trials]
        kl = [trial.divergence[i - 1] if i else 0.0 for trial in trials]
        stored = sum(trial.stored_bytes[i - 1] if i else 0 for trial in trials)
        found[str(name)] = Quality(
            exact_match=float(np.mean(right)),
            agreement=float(np.mean(agree)),
            kl_mean=float(np.mean(kl)),
            kl_max=max(kl),
            reused_share=tokens / sum(map(len, prompts)) if i else 0.0,
            bits=8 * stored * block_tokens / (tokens * model.block_numbers),
        )
    return found
