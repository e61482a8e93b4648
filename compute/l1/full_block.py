"""A block in an L1 page, as the batcher names it and the publisher saves it.

Made by the batcher, by blending and by saves; read by the tiers. A plain value: the page keeps the
block only while the maker holds a reference on the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.block import BlockSpec


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that is, or in a moment will be, full and findable.

    Attributes:
        spec: the block, without its ranges, which depend on the codec.
        page: where the block lies.
        partial: the block is not full, as handoffs and demotions save it.
    """

    spec: BlockSpec
    page: int
    partial: bool = False
