"""The decoder: one forward pass of a Llama-like model over a mixed batch.

The engine calls the decoder once per step, with prefill chunks and decodes on one token axis: every
projection is one matrix product. KV is read from and written to pages; no other state is kept
between steps. Rotary position embedding is here too: frequencies are computed once when a model is
loaded, rotation angles once per step.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from tierkv.compute.model.architecture import Architecture, RopeConfig
from tierkv.compute.model.attention import PagedAttention
from tierkv.compute.model.batch import ForwardBatch
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.model.weights import LayerWeights, Weights


class Outputs(NamedTuple):
    """Outputs of a forward pass for the requested rows.

    Attributes:
        hidden: hidden state after the last norm, ``[rows, hidden]`` in the weights' dtype.
        logits: output of the head for ``hidden``, ``[rows, vocab]`` float32.
    """

    hidden: Tensor
    logits: Tensor


class Graphs(Protocol):
    """Forward passes that were captured as CUDA graphs."""

    def run(self, step: ForwardBatch) -> Outputs | None:
        """Return the step's outputs; None if the step must run without a graph."""
        ...


class Decoder:
    """A decoder bound to its weights and pages.

    Attributes:
        arch: sizes and switches.
        weights: the weights.
        pages: the pages that hold KV.
        frequencies: rotary frequencies of keys and queries, ``[head_dim / 2]``.
        attention: paged attention over ``pages``.
        graphs: captured decode steps on CUDA (compute/model/cuda_decode.py); None: never use
            graphs.
    """

    def __init__(self, arch: Architecture, weights: Weights, pages: L1Pages) -> None:
        self.arch = arch
        self.weights = weights
        self.pages = pages
        self.attention = PagedAttention(pages)
        self.graphs: Graphs | None = None
        self.frequencies = inverse_frequencies(arch.rope, arch.head_dim).to(pages.kv.device)
        groups = (arch.heads, arch.kv_heads, arch.kv_heads)
        self._widths = [heads * arch.head_dim for heads in groups]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute KV of all tokens; return ``[len(batch.logit_rows), vocab]`` float32 logits."""
        return self.compute(batch).logits

    def compute(self, batch: ForwardBatch) -> Outputs:
        """Compute KV of all tokens, and the outputs of ``batch.logit_rows``.

        Args:
            batch: the step; its pages must be allocated.
        """
        outputs = None if self.graphs is None else self.graphs.run(batch)
        return self.compute_plainly(batch) if outputs is None else outputs

    def compute_plainly(self, batch: ForwardBatch) -> Outputs:
        """Do the same as ``compute``, without CUDA graphs."""
        steps = self.layer_steps(batch)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                outputs: Outputs = end.value
                return outputs

    def layer_steps(self, batch: ForwardBatch) -> Generator[int, None, Outputs]:
        """Do the same as ``compute`` in steps: yield each layer's index before reading its pages.

        The generator returns the value of ``compute``. Other steps may be computed between two
        layers; a paused step shares no state with other steps.
        """
        hidden = embedding(batch.token_ids, self.weights.embedding)
        cos, sin = rotation(self.frequencies, batch.positions, hidden.dtype)
        for index, layer in enumerate(self.weights.layers):
            yield index
            hidden = self._attend(index, layer, batch, hidden, cos, sin)
            hidden = self.feed_forward(layer, hidden).add_(hidden)
        return self.outputs(hidden[batch.logit_rows] if batch.last is None else hidden)

    def project(self, layer: LayerWeights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values before rope, each ``[tokens, heads, head_dim]``."""
        normed = self._norm(hidden, layer.input_norm)
        q, k, v = torch.split(layer.qkv(normed), self._widths, dim=-1)
        q, k, v = (x.view(len(x), -1, self.arch.head_dim) for x in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return q, k, v

    def feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """Return the feed-forward part's addition to ``hidden``, both ``[tokens, hidden]``."""
        normed = self._norm(hidden, layer.post_norm)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))

    def outputs(self, hidden: Tensor) -> Outputs:
        """Return the outputs for hidden states ``[rows, hidden]`` after the last layer."""
        normed = self._norm(hidden, self.weights.final_norm)
        return Outputs(normed, self.weights.head(normed).float())

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        batch: ForwardBatch,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Return ``hidden`` plus the output of the layer's attention part.

        In the last layer only rows with outputs are kept, if ``batch.last`` is set.
        """
        q, k, v = self.project(layer, hidden)
        if batch.raw is not None:
            self.attention.write_raw(index, batch.raw, k, v)
        self.attention.write(index, batch, rotate(k, cos, sin), v)
        plan = batch.attention
        if batch.last is not None and index + 1 == self.arch.layers:
            plan, rows = batch.last, batch.logit_rows
            q, hidden, cos, sin = q[rows], hidden[rows], cos[rows], sin[rows]
        attended = self.attention.attend(index, plan, rotate(q, cos, sin))
        return layer.out(attended.flatten(-2)).add_(hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm, computed in float32 like the reference models."""
        if x.dtype is torch.float32:
            return rms_norm(x, weight.shape, weight, self.arch.norm_eps)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return weight * scaled.to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return ``[head_dim / 2]`` float32 angular frequencies.

    Ref: "The Llama 3 Herd of Models" and the released Llama 3.1 code for the scaling.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponent) / rope.stretch
    if rope.scaling is None:
        return frequencies
    s = rope.scaling
    wavelength = 2 * math.pi / frequencies
    turns = s.original_context_tokens / wavelength
    smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)  # 0: long waves, fully stretched; 1: short waves, unchanged.
    return (1 - smooth) * frequencies / s.factor + smooth * frequencies


def rotation(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each ``[tokens, 1, head_dim / 2]``, computed in float32."""
    angles = positions.float()[:, None] * frequencies[None, :]
    return angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[tokens, heads, head_dim]``; rotated pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x)  # Written in place: temporaries cost more than the arithmetic.
    low, high = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)
    return rotated
