"""Adaptive streaming: which blocks of a chain are loaded fine, and which coarse.

Pure; compute/tiers/level_picker.py asks with what was measured. Leading blocks, to which everything
after them attends, are fine first. How deep to load at all, or whether to compute, is decided
afterwards and in general (costing/load_controller.py). Source: CacheGen, arXiv 2310.07240, there
per chunk of 1,500 tokens while they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Stored bytes of one block; equal where it is stored at one level only."""

    fine: int
    coarse: int


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """How to load a chain.

    Attributes:
        fine: leading blocks to load at the fine level; the others are coarse.
        predicted_s: seconds to load all of them.
    """

    fine: int
    predicted_s: float


def choose_levels(
    blocks: Sequence[BlockSizes], *, bytes_per_s: float, budget_s: float
) -> LevelChoice:
    """Choose the least loss that is loaded within the budget; if nothing is, the fastest.

    Args:
        blocks: the chain that was found, in order.
        bytes_per_s: measured rate of loading and decoding, positive.
        budget_s: seconds that loading may take.

    Returns:
        as many leading blocks fine as the budget allows when all others are coarse. O(blocks).
    """
    count = len(blocks)
    fine_s = [0.0, *accumulate(size.fine / bytes_per_s for size in blocks)]
    coarse_s = [0.0, *accumulate(size.coarse / bytes_per_s for size in blocks)]
    for fine in range(count, -1, -1):
        seconds = fine_s[fine] + coarse_s[count] - coarse_s[fine]
        if seconds <= budget_s:
            return LevelChoice(fine, seconds)
    return LevelChoice(0, coarse_s[count])
