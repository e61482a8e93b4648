"""Which new blocks are worth a place that another would have to give up.

A part of the pure core, used by dmp/slots/slot_table.py. The policy of a slot size compares the
newcomer with the block that would go; what lies behind a refused block is refused too.
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
        refused_puts: how many, ever.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.refused_puts = 0
        self._order = order
        self._refused: dict[Hashable, None] = {}

    def is_unreachable(self, put: BlockSpec) -> bool:
        """Whether a block lies behind one that was refused; then it is refused as well.

        Most chains lie on one node, their writer's. Of one that is spread over several, parts may
        be kept elsewhere until they age.
        """
        if put.parent not in self._refused or put.outlook.expectation is Expectation.ROWS:
            return False
        self._refuse(put.key)
        return True

    def refuses(self, facts: BlockFacts, size: int, now: float) -> bool:
        """Whether a block is worth less than the one the eviction order just named."""
        if facts.outlook.expectation is Expectation.ROWS:  # It will be read, and soon.
            return False
        if self._order.admits(facts, size, now):
            return False
        self._refuse(facts.key)
        return True

    def taken(self, key: BlockKey) -> None:
        """Take in that a block got a place: what lies behind it can be reached."""
        self._refused.pop(key, None)

    def _refuse(self, key: Hashable) -> None:
        self.refused_puts += 1
        self._refused[key] = None
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
