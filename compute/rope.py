"""Rotary position embedding: its configuration and its frequencies.

Called when a model folder is read and once per step for the rotation angles. Variants that would
silently give wrong positions are refused with their name, and for good those whose frequencies
depend on the length of the prompt: a block's keys would not fit a longer one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcore.errors import ModelFolderError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and how frequencies are stretched.

    Attributes:
        theta: base.
        stretch: all wavelengths are that much longer (variant linear).
        scaling: of Llama 3.1 and later (variant llama3).
    """

    theta: float
    stretch: float = 1.0
    scaling: Llama3Scaling | None = None


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Read rope settings: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises:
        ModelFolderError: a variant other than default, linear and llama3, partial rotation, or a
            variant's number missing.
    """
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelFolderError(f"partial rotary embedding (factor {partial}) is not supported")
    variant = settings.get("rope_type") or settings.get("type") or "default"
    try:
        return _variant(variant, theta, settings)
    except KeyError as missing:
        raise ModelFolderError(
            f"config.json has no {missing.args[0]!r} for rope variant {variant!r}"
        ) from missing


def _variant(variant: str, theta: float, settings: Mapping[str, Any]) -> RopeConfig:
    if variant == "default":
        return RopeConfig(theta)
    if variant == "linear":
        return RopeConfig(theta, stretch=float(settings["factor"]))
    if variant != "llama3":
        raise ModelFolderError(
            f"rope variant {variant!r} (rope_type) is not supported",
            hint="default, linear and llama3 are supported",
        )
    scaling = Llama3Scaling(
        float(settings["factor"]),
        float(settings["low_freq_factor"]),
        float(settings["high_freq_factor"]),
        int(settings["original_max_position_embeddings"]),
    )
    return RopeConfig(theta, scaling=scaling)


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
    smooth = smooth.clamp(0.0, 1.0)  # 0: long waves, fully stretched; 1: short waves, untouched.
    return (1 - smooth) * frequencies / s.factor + smooth * frequencies


def rotation(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each ``[tokens, 1, head_dim / 2]``, computed in float32."""
    angles = positions.float()[:, None] * frequencies[None, :]
    return angles.cos().to(dtype)[:, None, :], angles.sin().to(dtype)[:, None, :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` ``[tokens, heads, head_dim]``: pairs are (i, i + head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x)  # Written in place: temporaries cost more than the arithmetic.
    low, high = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)
    return rotated
