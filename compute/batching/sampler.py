"""From logits to tokens: greedy, or temperature with nucleus sampling.

Called once per step by the engine. A sampled token depends on the request's seed and on the number
of tokens generated before, never on batch mates, preemption or the computing node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierkv.kvcore.request import GenerateRequest

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose one token.

    Attributes:
        temperature: 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        seed: seed of the request.
        index: completion tokens generated before this token, including resumed tokens.
        allowed: ``[vocab]``, True for allowed tokens, of which at least one exists; None: all.
    """

    temperature: float
    top_p: float
    seed: int
    index: int
    allowed: NDArray[np.bool_] | None = None


def request_seed(request: GenerateRequest) -> int:
    """Return the request's seed, or a seed derived from the unguessable request id."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(blake2b(request.request_id.encode(), digest_size=8).digest(), "little")


class Sampler:
    """Chooses tokens; keeps a CPU generator, seeded anew for each draw."""

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """Choose one token per row.

        Args:
            logits: ``[rows, vocab]`` float32.
            draws: one per row.

        Returns:
            tokens: None for a row with a non-finite logit.
        """
        finite = torch.isfinite(logits).all(dim=-1).tolist()
        logits = _masked(logits, draws)
        greedy = logits.argmax(dim=-1).tolist()
        tokens: list[int | None] = []
        for row, draw in enumerate(draws):
            if not finite[row]:
                tokens.append(None)
            elif draw.temperature == 0.0:
                tokens.append(greedy[row])
            else:
                tokens.append(self._draw(logits[row].cpu(), draw))
        return tokens

    def _draw(self, logits: Tensor, draw: Draw) -> int:
        """Invert the nucleus' cumulative distribution at a uniform random number."""
        chances, ids = torch.softmax(logits / draw.temperature, dim=-1).sort(
            descending=True, stable=True
        )
        mass = chances.cumsum(dim=-1)
        # A token of probability 0 is never chosen, however the last bits are rounded.
        kept = int(((mass - chances < draw.top_p) & (chances > 0)).sum())
        self._generator.manual_seed((draw.seed * 0x9E3779B97F4A7C15 + draw.index) % _SEEDS)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        target = (uniform * mass[kept - 1]).to(mass.dtype)
        position = min(int(torch.searchsorted(mass[:kept], target, right=True)), kept - 1)
        return int(ids[position])


def _masked(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the logits with minus infinity for forbidden tokens."""
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    if not rows:
        return logits
    allowed = np.stack([allowed for draw in draws if (allowed := draw.allowed) is not None])
    mask = torch.from_numpy(allowed).to(logits.device)
    masked = logits.clone()
    masked[rows] = logits[rows].masked_fill(~mask, -torch.inf)
    return masked
