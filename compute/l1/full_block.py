"""A block in an L1 page, as the batcher names it and the publisher saves it.

Made by the batcher, by blending and by saves; read by the tiers. A plain value: the page keeps the
block only while the maker holds a reference on the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import NO_FACTS, BlockFacts


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that is, or in a moment will be, full and findable.

    Attributes:
        key: name of the block.
        parent: name of the block before.
        page: where the block lies.
        tokens: tokens of a partial block, as handoffs and demotions save them; 0: full.
        facts: what is known about the next use.
    """

    key: BlockKey
    parent: BlockKey
    page: int
    tokens: int = 0
    facts: BlockFacts = NO_FACTS
