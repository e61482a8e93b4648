"""Which new blocks are worth a place that another would have to give up.

A part of the pure core, used by dmp/slot_table.py. The policy of a slot size compares the newcomer
with the block that would go; what lies behind a refused block is refused too.
"""

from __future__ import annotations

from typing import Final

from dmp.eviction_order import EvictionOrder
from dmp.evictor import Evictor
from dmp.extents import ExtentTable
from dmp.pool_node import PutRequest
from kvcore.ids import BlockKey
from policies.eviction import Expectation

_REMEMBERED: Final = 8_192
"""Refused blocks whose children are refused too; older refusals are forgotten."""


class Admission:
    """Refuses blocks.

    Attributes:
        refused_puts: how many, ever.
    """

    def __init__(self, extents: ExtentTable, order: EvictionOrder, evictor: Evictor) -> None:
        self.refused_puts = 0
        self._extents = extents
        self._order = order
        self._evictor = evictor
        self._refused: dict[BlockKey, None] = {}

    def refuses(self, put: PutRequest, size: int, now: float) -> bool:
        """Whether a block should get no place.

        Nobody could reach what lies behind a refused block. Most chains lie on one node, their
        writer's; of one that is spread over several, parts may be kept elsewhere until they age.
        """
        if put.expectation is Expectation.ROWS:
            return False  # It will be read, and soon.
        refused = put.parent in self._refused or not self._is_worth_it(put, size, now)
        if refused:
            self.refused_puts += 1
            self._refused[put.key] = None
            if len(self._refused) > _REMEMBERED:
                del self._refused[next(iter(self._refused))]
        elif self._refused:
            self._refused.pop(put.key, None)
        return refused

    def _is_worth_it(self, put: PutRequest, size: int, now: float) -> bool:
        if self._extents.has_room(size) or self._evictor.next_leaf(size, now) is None:
            return True
        return self._order.admits(put, size, now)
