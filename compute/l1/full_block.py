"""A block in an L1 page, as named by the batcher and saved by the publisher.

Made by the batcher, by blending and by saves; read by the tiers. A plain value: the page keeps the
block only while the maker of the value holds a reference on the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.block import BlockSpec


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that is, or in a moment will be, full and findable.

    Attributes:
        spec: the block, without its ranges, which depend on the codec.
        page: the page that holds the block.
        partial: the block is not full; handoffs and preemptions save such blocks.
    """

    spec: BlockSpec
    page: int
    partial: bool = False
