"""Which rotary position embedding a model has, read from its ``config.json``; without torch.

Called by compute/model/architecture.py; compute/model/rope.py computes with it. Variants that would
silently give wrong positions are refused with their name, and for good those whose frequencies
depend on the length of the prompt: a block's keys would not fit a longer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore.errors import ModelFolderError


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
