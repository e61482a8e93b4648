"""What a KV codec costs in quality: greedy answers and logits of a model, beside full recompute.

A prompt is computed once. For each codec its whole blocks are encoded and decoded as if they came
from the pool, what follows them is computed on top, as the engine does it, and the answer decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compute.batch import ChunkInput, build_batch
from compute.codec.layer_codec import make_codec
from compute.config import ComputeConfig
from compute.demo_model.data import Probe
from compute.loading import load_model
from compute.model import Decoder
from dbfront.contracts import Message
from dbfront.tokenizer import load_tokenizer
from kvcore.ids import HostId, NodeId
from kvcore.layout import KvCodec

NEW_TOKENS = 12
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Quality:
    """One codec over all probes.

    Attributes:
        exact_match: share of answers that are right.
        agreement: share of answers that equal the full recompute's.
        kl_mean: mean Kullback-Leibler divergence of the first answer token's distribution from the
            full recompute's, in nats.
        kl_max: the largest of them.
        reused_share: share of prompt tokens whose KV went through the codec.
    """

    exact_match: float
    agreement: float
    kl_mean: float
    kl_max: float
    reused_share: float


@dataclass(slots=True, eq=False)
class _Row:
    """One answer in the making."""

    tokens: list[int]
    pages: np.ndarray
    done: bool = False


class CodecTrial:
    """A model with room for one prompt per codec and one without any."""

    def __init__(self, folder: Path, *, block_tokens: int, longest: int) -> None:
        self._width = -(-(longest + NEW_TOKENS) // block_tokens)
        config = ComputeConfig(
            NodeId("trial"),
            HostId("here"),
            model_folder=str(folder),
            dtype="float32",
            device="cpu",
            block_tokens=block_tokens,
            l1_pages=1 + self._width * (1 + len(KvCodec)),
        )
        loaded = load_model(config)
        self._eos = frozenset(loaded.info.eos_token_ids)
        self._decoder: Decoder = loaded.decoder
        self._block = block_tokens
        layout = loaded.info.layout
        self._codecs = [make_codec(replace(layout, codec=codec)) for codec in KvCodec]

    def run(self, prompt: Sequence[int]) -> tuple[list[list[int]], list[float], int]:
        """Answer a prompt without and with each codec.

        Returns:
            Answers, the full recompute's first; the divergence per codec; tokens reused.
        """
        tables = 1 + np.arange((1 + len(KvCodec)) * self._width).reshape(-1, self._width)
        rows = [_Row(list(prompt), pages) for pages in tables]
        want = self._forward([self._chunk(rows[0], 0)])[0]
        blocks = (len(prompt) - 1) // self._block
        self._through_codecs(rows, blocks)
        got = self._forward([self._chunk(row, blocks * self._block) for row in rows[1:]])
        first = torch.cat([want[None], got])
        self._decode(rows, first)
        logs = first.double().log_softmax(-1)
        divergence = (logs[0].exp() * (logs[0] - logs[1:])).sum(-1).clamp(min=0).tolist()
        return [row.tokens[len(prompt) :] for row in rows], divergence, blocks * self._block

    def _through_codecs(self, rows: Sequence[_Row], blocks: int) -> None:
        kv = self._decoder.pages.kv
        for row, codec in zip(rows[1:], self._codecs, strict=True):
            for layer in range(kv.shape[0] if blocks else 0):
                source = kv[layer, torch.from_numpy(rows[0].pages[:blocks])]
                target = torch.from_numpy(row.pages[:blocks])
                kv[layer, target] = codec.decode(codec.encode(source))

    def _chunk(self, row: _Row, start: int) -> ChunkInput:
        ids = np.array(row.tokens[start:], dtype=np.int64)
        return ChunkInput(ids, start, row.pages, wants_logits=True)

    def _forward(self, chunks: Sequence[ChunkInput]) -> Tensor:
        batch = build_batch(chunks, block_tokens=self._block, device=CPU)
        logits = self._decoder.forward(batch)
        ordered = torch.empty_like(logits)
        ordered[list(batch.logit_chunks)] = logits
        return ordered

    def _decode(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Continue greedily; every row ends at its eos or after NEW_TOKENS."""
        live = list(rows)
        for step in range(NEW_TOKENS):
            for row, token in zip(live, logits.argmax(-1).tolist(), strict=True):
                row.done = token in self._eos
                if not row.done:
                    row.tokens.append(token)
            live = [row for row in live if not row.done]
            if not live or step == NEW_TOKENS - 1:
                return
            logits = self._forward([self._chunk(row, len(row.tokens) - 1) for row in live])


def measure(folder: Path, probes: Sequence[Probe], *, block_tokens: int = 64) -> dict[str, Quality]:
    """Return the quality of ``full`` recompute and of each codec, over the probes."""
    tokenizer = load_tokenizer(folder)
    prompts = [
        asyncio.run(tokenizer.encode_chat([Message(m["role"], m["content"]) for m in p.messages]))
        for p in probes
    ]
    trial = CodecTrial(folder, block_tokens=block_tokens, longest=max(map(len, prompts)))
    with torch.inference_mode():
        results = [trial.run(prompt) for prompt in prompts]
    share = sum(reused for *_, reused in results) / sum(map(len, prompts))
    found: dict[str, Quality] = {}
    for i, name in enumerate(["full", *KvCodec]):
        right = [
            tokenizer.decode(answers[i]) == probe.answer
            for (answers, *_), probe in zip(results, probes, strict=True)
        ]
        agree = [answers[i] == answers[0] for answers, *_ in results]
        kl = [divergence[i - 1] if i else 0.0 for _, divergence, _ in results]
        found[str(name)] = Quality(
            float(np.mean(right)),
            float(np.mean(agree)),
            float(np.mean(kl)),
            max(kl),
            share if i else 0.0,
        )
    return found
