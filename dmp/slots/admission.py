"""Decides whether a new block is worth the place of the block that would be evicted.

A part of the pure core, used by dmp/slots/slot_table.py. The policy of a slot size compares the new
block with its victim. Blocks that follow a refused block are refused too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from tierkv.dmp.slots.eviction_order import EvictionOrder
from tierkv.kvcore.block import BlockSpec, Expectation
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import BlockFacts

_REMEMBERED: Final = 8_192
"""Refused blocks whose children are refused too; older refusals are forgotten."""


class Admission:
    """Refuses blocks.

    Attributes:
        refused_puts: number of blocks ever refused.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.refused_puts = 0
        self._order = order
        self._refused: dict[Hashable, None] = {}

    def is_unreachable(self, put: BlockSpec) -> bool:
        """Return True, and refuse the block, if the parent of the block was refused.

        Most chains lie on one node, their writer's. If a chain is spread over several nodes, other
        nodes may keep parts of the chain until these parts age. Blocks that pending rows will read
        are not refused.
        """
        if put.parent not in self._refused or put.outlook.expectation is Expectation.ROWS:
            return False
        self._refuse(put.key)
        return True

    def refuses(self, facts: BlockFacts, size: int, now: float) -> bool:
        """Return True if a block is worth less than the victim just named by the eviction order."""
        if facts.outlook.expectation is Expectation.ROWS:  # The block will be read soon.
            return False
        if self._order.admits(facts, size, now):
            return False
        self._refuse(facts.key)
        return True

    def taken(self, key: BlockKey) -> None:
        """Note a stored block: its children are reachable again."""
        self._refused.pop(key, None)

    def _refuse(self, key: Hashable) -> None:
        self.refused_puts += 1
        self._refused[key] = None
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
