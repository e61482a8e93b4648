"""Rotary position embedding: frequencies, angles, and rotation of keys and queries.

Frequencies are computed once when a model is loaded, rotation angles once per step. The rope
variant of a model is read in compute/model/architecture.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tierkv.compute.model.architecture import RopeConfig


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
