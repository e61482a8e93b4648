"""The correctness gate: the check at load whether blending may be used with a model.

Runs once when a model is loaded, on a few random tokens with separate pages. Blending moves keys to
positions other than the original ones. A model with a different handling of positions than assumed
would give fluent but wrong answers. The gate refuses to blend this model, with a reason, and the
model serves exact answers only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tierkv.compute.blend.passes import BlendOutcome, blend_steps
from tierkv.compute.blend.plan import BlendPlan, ChunkUse
from tierkv.compute.model.batch import ChunkInput, Int64Array, RawTarget, build_batch
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.pages import L1Pages
from tierkv.kvcore.request import Blend, BlendSelector

HEAD, CHUNK, END = 2, 4, 2
CHUNKS = 3
TOKENS = HEAD + CHUNKS * CHUNK + END
BLOCK_TOKENS = 8
TABLE_PAGES = -(-TOKENS // BLOCK_TOKENS)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest distance of two tensors that should be equal, relative to the norm. Keys rotated by a
wrong angle are off by 0.1 and more; rounding in bfloat16 measured up to 0.02 over 32 layers."""


@torch.inference_mode()
def check_model(decoder: Decoder) -> str:
    """Return the reason why a model must not be blended; empty if blending is allowed.

    Costs four passes over 10 to 34 tokens. The decoder's own pages are not touched.
    """
    return _Trial(decoder).find_fault()


class _Trial:
    """A prompt of a head, three chunks and an end, and the chunks computed after the head alone."""

    def __init__(self, decoder: Decoder) -> None:
        device = decoder.pages.kv.device
        layout = replace(decoder.pages.layout, block_tokens=BLOCK_TOKENS)
        pages = L1Pages(layout, 1 + TABLE_PAGES * (2 + 2 * CHUNKS), device=device)
        self._decoder = type(decoder)(decoder.arch, decoder.weights, pages)
        self._tables = np.arange(1, pages.num_pages).reshape(-1, TABLE_PAGES)
        self._raw = self._tables[2 + CHUNKS :]
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(decoder.arch.vocab_tokens, (TOKENS,), generator=generator)
        self._ids: Int64Array = ids.numpy()

    def find_fault(self) -> str:
        """Compare results that must be equal; return a description of the first difference."""
        logits = self._compute()
        if not torch.isfinite(logits).all():
            return "the model's logits are not finite"
        full = self._kv(self._tables[0])
        again = self._blend(BlendSelector.HKVD, 1.0)
        far = max(self._distance(again.logits, logits), self._distance(self._kv(), full))
        if far > self._tolerance:
            return f"recomputing everything differs from a plain prefill by {far:.2g}"
        self._blend(BlendSelector.BOUNDARY, 0.5)
        half = self._kv()
        if (far := self._distance(half[0], full[0])) > self._tolerance:
            return f"chunks moved to another place differ from KV in place by {far:.2g} in layer 0"
        first = slice(HEAD, HEAD + CHUNK)  # This chunk has the context it was computed with.
        if (far := self._distance(half[:, :, first], full[:, :, first])) > self._tolerance:
            return f"a chunk computed alone differs from the same chunk in place by {far:.2g}"
        return self._find_leak(half)

    def _find_leak(self, before: Tensor) -> str:
        late = HEAD + (CHUNKS - 1) * CHUNK
        pages = self._decoder.pages.kv
        pages[:, torch.from_numpy(self._raw[-1]).to(pages.device)] += 1.0
        self._blend(BlendSelector.BOUNDARY, 0.5)
        far = self._distance(self._kv()[:, :, :late], before[:, :, :late])
        return f"tokens see later ones: a change behind them shows by {far:.2g}" if far else ""

    def _compute(self) -> Tensor:
        """Compute the prompt, and each chunk after the head alone, in one batch."""
        inputs = [ChunkInput(self._ids, 0, self._tables[0], wants_logits=True)]
        for i, start in enumerate(self._starts):
            ids = np.concatenate([self._ids[:HEAD], self._ids[start : start + CHUNK]])
            target = RawTarget(HEAD, self._raw[i])
            inputs.append(ChunkInput(ids, 0, self._tables[2 + i], False, target))
        device = self._decoder.pages.kv.device
        return self._decoder.forward(build_batch(inputs, block_tokens=BLOCK_TOKENS, device=device))

    def _blend(self, selector: BlendSelector, ratio: float) -> BlendOutcome:
        uses = tuple(
            ChunkUse(start, CHUNK, pages)
            for start, pages in zip(self._starts, self._raw, strict=True)
        )
        bounds = tuple((start, start + CHUNK) for start in self._starts)
        plan = BlendPlan(self._ids, 0, self._tables[1], uses, Blend(bounds, ratio, selector))
        steps = blend_steps(self._decoder, plan)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                outcome: BlendOutcome = end.value
                return outcome

    @property
    def _starts(self) -> range:
        return range(HEAD, HEAD + CHUNKS * CHUNK, CHUNK)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[self._decoder.pages.kv.dtype]

    def _kv(self, table: Int64Array | None = None) -> Tensor:
        """Copy the KV of a whole prompt, layers and k|v first; by default of the blended prompt."""
        pages = self._decoder.pages.kv
        index = torch.from_numpy(self._tables[1] if table is None else table).to(pages.device)
        return pages[:, index].transpose(1, 2).flatten(2, 3)[:, :, :TOKENS].float()

    @staticmethod
    def _distance(found: Tensor, wanted: Tensor) -> float:
        """Return the norm of the difference of two tensors, relative to the norm of ``wanted``."""
        far = (found - wanted).norm() / wanted.norm().clamp(min=1e-30)
        return float(torch.nan_to_num(far, nan=torch.inf))
