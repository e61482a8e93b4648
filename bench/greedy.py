"""Greedy answers of a model in this process, with several ways of reusing KV side by side.

Used by the quality benchmarks. Every way has its own pages, all ways of a prompt decode together,
and distributions are compared with the full recompute's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tierkv.compute.config import ComputeConfig
from tierkv.compute.loading import load_model
from tierkv.compute.model.batch import ChunkInput, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.layout import BlockLayout

NEW_TOKENS = 12
CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Row:
    """One answer in the making."""

    tokens: list[int]
    pages: np.ndarray
    done: bool = False


class Greedy:
    """A model with a fixed number of pages; continues rows whose prompts have KV.

    Attributes:
        decoder: the model.
        layout: layout of the pages.
        block: tokens per page.
    """

    def __init__(self, folder: Path, *, block_tokens: int, pages: int) -> None:
        config = ComputeConfig(
            NodeId("trial"),
            HostId("here"),
            model_folder=str(folder),
            dtype="float32",
            device="cpu",
            block_tokens=block_tokens,
            l1_pages=pages,
        )
        loaded = load_model(config)
        self.decoder: Decoder = loaded.decoder
        self.layout: BlockLayout = loaded.info.layout
        self.block = block_tokens
        self._eos = frozenset(loaded.info.eos_token_ids)

    def chunk(self, row: Row, start: int) -> ChunkInput:
        """Return a row's tokens from ``start`` on as a chunk to compute."""
        ids = np.array(row.tokens[start:], dtype=np.int64)
        return ChunkInput(ids, start, row.pages, wants_logits=True)

    def forward(self, chunks: Sequence[ChunkInput]) -> Tensor:
        """Compute chunks; the logits keep the order of the chunks."""
        batch = build_batch(chunks, block_tokens=self.block, device=CPU)
        logits = self.decoder.forward(batch)
        ordered = torch.empty_like(logits)
        ordered[list(batch.logit_chunks)] = logits
        return ordered

    def decode(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Continue greedily; every row ends at an eos token or after NEW_TOKENS."""
        live = list(rows)
        for step in range(NEW_TOKENS):
            for row, token in zip(live, logits.argmax(-1).tolist(), strict=True):
                row.done = token in self._eos
                if not row.done:
                    row.tokens.append(token)
            live = [row for row in live if not row.done]
            if not live or step == NEW_TOKENS - 1:
                return
            logits = self.forward([self.chunk(row, len(row.tokens) - 1) for row in live])


def divergences(logits: Tensor) -> list[float]:
    """Return the Kullback-Leibler divergence of each row after the first from the first, nats."""
    logs = logits.double().log_softmax(-1)
    apart = (logs[0].exp() * (logs[0] - logs[1:])).sum(-1).clamp(min=0)
    return [float(x) for x in apart]
