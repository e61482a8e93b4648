"""Chooses eviction victims: the next leaf of the wanted size, or a whole colder extent.

A part of the pure core: this module only chooses, and dmp/slots/slot_table.py evicts. Held, pinned
and unsealed blocks are never evicted, and no block is evicted before its children.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dmp.segment.extents import Extent, ExtentTable
from tierkv.dmp.segment.slots import Slot
from tierkv.dmp.slots.eviction_order import EvictionOrder, evictable
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore.ids import BlockKey

Families = dict[BlockKey, set[int]]


class Evictor:
    """Chooses victims.

    Attributes:
        _families: children by parent; made when a second slot size first needs an extent, because a
            node with one model never needs this index.
    """

    def __init__(
        self, store: SlotStore, extents: ExtentTable, order: EvictionOrder, *, has_lower_tier: bool
    ) -> None:
        self._store = store
        self._extents = extents
        self._order = order
        self._has_lower_tier = has_lower_tier
        self._families: Families | None = None

    def victims(
        self, leaf: Slot | None, size: int, *, uses: int, coming: BlockKey
    ) -> Sequence[Slot]:
        """Choose the blocks to evict for one slot of a size, children first; () if impossible.

        Args:
            leaf: result of ``next_leaf``.
            size: slot size.
            uses: number of uses until now; no slot was used later.
            coming: parent of the new block; the parent is not evicted.
        """
        if others := self._extents.coldest_of_other_sizes(size):
            older_than = self._oldest_use(size) if leaf else uses + 1
            if family := self._coldest_family(others, older_than, coming):
                return family
        return [leaf] if leaf else []

    def next_leaf(self, size: int, now: float) -> Slot | None:
        """Return the next leaf of a size to evict.

        With a lower tier, a block without a copy is evicted only if the oldest leaf has no copy
        either: blocks that were copied ahead of time go first (dmp/slots/clean_slots.py), and
        nothing is lost.
        """
        leaf = self._order.next(size, self._store, now)
        if leaf is not None and self._has_lower_tier and not leaf.clean:
            oldest = self._order.oldest(size, self._store)
            if oldest is not None and oldest.clean:
                return oldest
        return leaf

    def _oldest_use(self, size: int) -> int:
        if not self._order.by_age:
            self._order.queue_by_age(self._store.all())
        oldest = self._order.oldest(size, self._store)
        return oldest.last_used if oldest is not None else 0

    def linked(self, slot: Slot) -> None:
        """Note a new child."""
        if self._families is not None:
            self._families.setdefault(slot.block.parent, set()).add(slot.index)

    def unlinked(self, slot: Slot) -> None:
        """Note that a child is gone."""
        if self._families is not None:
            family = self._families[slot.block.parent]
            family.discard(slot.index)
            if not family:
                del self._families[slot.block.parent]

    def _coldest_family(
        self, others: Sequence[Extent], older_than: int, coming: BlockKey
    ) -> Sequence[Slot]:
        """Return the slots to evict to free the coldest extent of another size; () if not colder.

        O(extents) when several sizes share the segment, which happens when a node serves several
        models.
        """
        for extent in others:
            if extent.last_used >= older_than:
                return ()
            family = self._family(extent, coming)
            if all(evictable(slot) and slot.last_used < older_than for slot in family):
                return family
        return ()

    def _family(self, extent: Extent, coming: BlockKey) -> Sequence[Slot]:
        """Return an extent's slots and all descendants, children first; () if one is ``coming``."""
        families = self._known_families()
        order: list[Slot] = []
        seen: set[int] = set()
        todo = [(index, False) for index in extent.live]
        while todo:
            index, children_done = todo.pop()
            slot = self._store.at(index)
            assert slot is not None, index
            named = self._store.by_key.get(slot.block.key) == index
            if children_done:
                order.append(slot)
            elif index not in seen:
                if named and slot.block.key == coming:
                    return ()
                seen.add(index)
                todo.append((index, True))
                if named:
                    todo.extend((child, False) for child in families.get(slot.block.key, ()))
        return order

    def _known_families(self) -> Families:
        """Return children by parent; O(slots) the first time."""
        if self._families is None:
            self._families = {}
            for slot in self._store.all():
                if self._store.by_key.get(slot.block.key) == slot.index:
                    self.linked(slot)
        return self._families

    def check_invariants(self) -> None:
        """Assert that the families agree with the slots; O(slots)."""
        if self._families is not None:
            kept, self._families = self._families, None
            assert kept == self._known_families(), "families do not add up"
