"""Chains stored at two levels (codec ``adaptive``): finds both, picks a level per block.

Used by the tiers' worker threads. Leading blocks are loaded fine first, because every later token
attends to them. The result is an ordinary chain: each frame names its level, and a load may mix
levels. How deep to load, or whether to compute, is decided afterwards (costing/load_controller.py).
Source: CacheGen, arXiv 2310.07240, there per chunk of 1,500 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.compute.tiers.finder import BlockFinder, Source
from tierkv.compute.tiers.load_figures import LoadFigures
from tierkv.costing.load_controller import BlockSizes, Run, choose_levels
from tierkv.costing.service_time import causal_pairs
from tierkv.kvcore.block_key import coarse_key
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.layout import BlockLayout, KvCodec

Copies = tuple[Source, ...]

_SHARE_OF_COMPUTING = 0.5
"""Without a budget, loading may take this share of the time of computing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chain, or the rest of a chain.

    Attributes:
        keys: keys of the blocks at the fine level.
        start: tokens before the first block.
        left_s: seconds left until the first token is due; None: no budget.
    """

    keys: Sequence[BlockKey]
    start: int
    left_s: float | None = None


class LevelPicker:
    """Picks levels by this node's measurements."""

    def __init__(self, finder: BlockFinder, figures: LoadFigures, layout: BlockLayout) -> None:
        self._finder = finder
        self._figures = figures
        self._layout = layout

    def pick(self, wanted: Wanted, fine: list[Copies], *, thorough: bool) -> list[Copies]:
        """Return a chain with the best level per block within the time allowed.

        Args:
            wanted: the wanted chain.
            fine: the found blocks of the fine level.
            thorough: as in BlockFinder.find.
        """
        skipped = 0 if wanted.start else 1  # A prompt's first block is stored at one level only.
        names = [coarse_key(key) for key in wanted.keys[skipped:]]
        if len(fine) < skipped:
            return fine  # The first block is missing, and coarse blocks begin behind it.
        coarse = self._finder.find(names, thorough=thorough) if names else []
        coarse = [*fine[:skipped], *coarse]
        both = list(zip(fine, coarse, strict=False))
        count = choose_levels(
            [self._sizes(*copies) for copies in both],
            bytes_per_s=self._bytes_per_s([copies for copies, _ in both]),
            budget_s=self._budget_s(wanted, len(both)),
        ).fine
        longer = fine if len(fine) > len(coarse) else coarse
        return [*fine[:count], *coarse[count : len(both)], *longer[len(both) :]]

    def _sizes(self, fine: Copies, coarse: Copies) -> BlockSizes:
        return BlockSizes(self._size(fine), self._size(coarse))

    def _size(self, copies: Copies) -> int:
        """Return a copy's size; the upper bound for a copy on a disk, whose size is unknown."""
        at = copies[0].location
        return at.length if at is not None else self._layout.stored_bytes

    def _bytes_per_s(self, chain: Sequence[Copies]) -> float:
        sizes = [self._size(copies) for copies in chain]
        level = self._figures.level(KvCodec.ADAPTIVE, chain)
        seconds = 0.0
        for size, copies in zip(sizes, chain, strict=True):
            tier = copies[0].tier
            seconds += Run(tier, 1, self._figures.line(tier)).seconds(size, level).total_s
        return sum(sizes) / seconds if seconds else float("inf")

    def _budget_s(self, wanted: Wanted, blocks: int) -> float:
        if wanted.left_s is not None:
            return max(0.0, wanted.left_s)
        cost = self._figures.steps.cost
        if cost is None:
            return float("inf")  # No measured step yet, and no reason to hurry.
        tokens = blocks * self._layout.block_tokens
        return _SHARE_OF_COMPUTING * cost.seconds(tokens, causal_pairs(wanted.start, tokens))
