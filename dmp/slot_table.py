"""Which slot holds which block: the pure core of a DMP node.

Called by the node under its lock; decides and answers what changed (victims, expired slots), never
touches memory, clock or socket.

Eviction takes the least recently used *leaf*: a block whose children are in this node goes after
them, because a continuation without its head is useless. Held, pinned and unsealed blocks never go.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from dmp.clean_slots import CleanSlots
from dmp.evictor import Evictor, evictable
from dmp.extents import ExtentTable, slot_bytes_for
from dmp.leaf_queue import LeafQueue
from dmp.owners import Owners
from dmp.pool_node import PutRequest
from dmp.restored import RestoredSlots
from dmp.slot_store import SlotStore
from dmp.slots import Reserved, Slot, SlotState
from kvcore.ids import BlockKey

_SPARE_DEADLINES: Final = 1_024


class SlotTable:
    """All slots of one segment.

    Attributes:
        extents: how the segment is cut.
        generation: the last one given out; grows with every reservation of any slot.
        alloc_failures: reservations refused for want of room.
        evicted_blocks: blocks removed to make room.
        pinned: pins of all slots.
    """

    def __init__(
        self,
        *,
        extent_count: int,
        extent_bytes: int,
        slots_per_extent: int,
        has_lower_tier: bool = False,
    ) -> None:
        self.extents = ExtentTable(
            extent_count=extent_count, extent_bytes=extent_bytes, slots_per_extent=slots_per_extent
        )
        self.generation = 0
        self.alloc_failures = 0
        self.evicted_blocks = 0
        self.pinned = 0
        self._store = SlotStore(self.extents)
        self._leaves = LeafQueue(evictable)
        self._clean = CleanSlots(self._store.find, enabled=has_lower_tier)
        self._evictor = Evictor(self._store, self.extents, self._leaves)
        self._owners = Owners()
        self._deadlines: list[tuple[float, int, int]] = []
        self._uses = 0

    # Questions

    def find(self, key: BlockKey) -> Slot | None:
        """Return the sealed slot of a block and count it as used."""
        slot = self._store.find(key)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self._clean.used(slot)
        return slot

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if it still is in that generation and not doomed."""
        slot = self._store.get(index, generation)
        return None if slot is None or slot.doomed else slot

    def is_used(self, index: int) -> bool:
        """Whether a slot number is in use, in any generation."""
        return self._store.at(index) is not None

    def knows(self, slot: Slot) -> bool:
        """Whether a slot in use is this table's, not one of an earlier start's."""
        return self._store.at(slot.index) is slot

    def holds(self, key: BlockKey) -> bool:
        """Whether a block is here, sealed or being written; counts as no use."""
        return key in self._store.by_key

    def keys(self) -> list[BlockKey]:
        """Return the blocks that are sealed or being written, in no order."""
        return list(self._store.by_key)

    def peek(self, key: BlockKey) -> Slot | None:
        """Return the sealed slot of a block; counts as no use."""
        slot = self._store.find(key)
        return slot if slot is not None and slot.state is SlotState.SEALED else None

    def sealed_at(self, index: int) -> Slot | None:
        """Return the sealed slot under a number; counts as no use."""
        slot = self._store.at(index)
        return slot if slot is not None and slot.state is SlotState.SEALED else None

    def indices(self) -> list[int]:
        """Return the numbers of the slots in use, in no order."""
        return self._store.indices()

    def sealed(self) -> list[Slot]:
        """Return all readable slots, oldest use first; O(slots)."""
        found = [slot for slot in self._store.all() if slot.state is SlotState.SEALED]
        return sorted(found, key=lambda slot: slot.last_used)

    def count(self, state: SlotState) -> int:
        """Count the slots in a state."""
        return self._store.counts[state]

    # The life of a slot

    def reserve(self, put: PutRequest, *, deadline: float, owner: str = "") -> Reserved | None:
        """Take a slot for a block, evicting leaves if there is no free one.

        Returns:
            The decision; None when the block is here already (sealed or being written), would be
            its own ancestor (then none of that ring could ever go), or no room can be made (then
            ``alloc_failures`` grows). None never has victims.
        """
        if put.key in self._store.by_key or self._closes_a_ring(put):
            return None
        size = slot_bytes_for(put.range_bytes, put.range_count)
        index = self.extents.take(size)
        victims: Sequence[Slot] = ()
        if index is None and size <= self.extents.extent_bytes:
            victims = self._evict_for(size, put.parent)
            index = self.extents.take(size)
        if index is None:
            assert not victims, victims
            self.alloc_failures += 1
            return None
        slot = self._occupy(index, put, owner)
        slot.deadline = deadline
        self._expect(slot, deadline)
        return Reserved(slot, tuple(victims))

    def seal(self, index: int, generation: int, *, now: float) -> Slot | None:
        """Make a written slot readable; None when it is gone, too late or still being filled."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.WRITING or slot.pins or slot.deadline <= now:
            return None
        self._disown(slot)
        self._store.change(slot, SlotState.SEALED)
        self._touch(slot)
        self._offer(slot)
        return slot

    def abort(self, index: int, generation: int) -> Slot | None:
        """Give a reservation up; answers the freed slot, None if it was gone or is pinned."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.WRITING:
            return None
        return self._free_or_doom(slot)

    def expire(self, now: float) -> list[Slot]:
        """End every reservation and hold whose deadline has come; answers the freed slots."""
        freed: list[Slot] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, index, generation = heapq.heappop(self._deadlines)
            slot = self.get(index, generation)
            if slot is None:
                continue
            if slot.state is SlotState.WRITING:
                gone = self._free_or_doom(slot)
                freed.extend([gone] if gone else [])
            elif slot.holders and slot.hold_deadline <= now:
                self._end_holds(slot)
                self._offer(slot)
        return freed

    def hold(self, index: int, generation: int, *, until: float, owner: str = "") -> bool:
        """Keep a sealed block from eviction until released or ``until``; False if it is gone."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.SEALED:
            return False
        slot.hold_deadline = max(slot.hold_deadline, until) if slot.holders else until
        slot.holders[owner] = slot.holders.get(owner, 0) + 1
        self._owners.add(owner, index)
        self._expect(slot, slot.hold_deadline)
        self._touch(slot)
        return True

    def release(self, index: int, generation: int, *, owner: str = "") -> None:
        """Undo one hold of an owner; unknown ones are ignored."""
        slot = self.get(index, generation)
        if slot is None or owner not in slot.holders:
            return
        slot.holders[owner] -= 1
        if not slot.holders[owner]:
            del slot.holders[owner]
            self._owners.discard(owner, index)
            self._offer(slot)

    def release_owner(self, owner: str) -> list[Slot]:
        """Abort an owner's reservations and end its holds; answers the freed slots.

        O(its reservations and holds).
        """
        freed: list[Slot] = []
        for index in self._owners.take(owner):
            slot = self._store.at(index)
            if slot is None or slot.doomed:
                continue
            if slot.state is SlotState.WRITING and slot.owner == owner:
                gone = self._free_or_doom(slot)
                freed.extend([gone] if gone else [])
            elif slot.holders.pop(owner, 0):
                self._offer(slot)
        return freed

    def touch(self, index: int, generation: int) -> None:
        """Count a use of a sealed block (a reader that maps the segment reports late)."""
        slot = self.get(index, generation)
        if slot is not None and slot.state is SlotState.SEALED:
            self._touch(slot)

    def pin(self, slot: Slot) -> None:
        """Keep the slot's bytes in place while a transfer touches them."""
        slot.pins += 1
        self.pinned += 1

    def pin_for_read(self, slot: Slot) -> None:
        """Pin, and count a use."""
        slot.pins += 1
        self.pinned += 1
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self._clean.used(slot)

    def unpin(self, slot: Slot) -> Slot | None:
        """End a transfer; answers the slot if that freed it."""
        slot.pins -= 1
        self.pinned -= 1
        assert slot.pins >= 0, slot
        if slot.pins == 0 and slot.doomed:
            self._vacate(slot)
            return slot
        self._leaves.offer(slot, slot.extent.slot_bytes)
        return None

    def quarantine(self, index: int, generation: int) -> Slot | None:
        """Take a sealed slot with bad bytes out of use for good; None if it was gone."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        self._forget_key(slot)
        self._end_holds(slot)
        self._store.change(slot, SlotState.QUARANTINED)
        return slot

    # The lower tier

    def next_dirty(self) -> Slot | None:
        """Return the sealed block that goes next and has no copy below yet; None when all have."""
        return self._clean.next_dirty(self._store.get)

    @property
    def dirty_bytes(self) -> int:
        """Slot bytes in use that eviction would lose."""
        return self.extents.used_bytes - self._clean.clean_bytes

    @property
    def exposed_bytes(self) -> int:
        """Slot bytes in use but for blocks that have a copy and go before what has none.

        Blocks that were used since they were copied, or were just brought up, give way after
        older ones without a copy: they are no reserve for the next to come.
        """
        return self.extents.used_bytes - self._clean.spare_bytes

    def mark_clean(self, slot: Slot, *, spare: bool = True) -> None:
        """Note that a copy of a sealed block rests below; ``spare``: it goes before others."""
        self._clean.mark(slot, spare=spare)

    def mark_dirty(self, slot: Slot) -> None:
        """Note that the copy below is gone."""
        self._clean.unmark(slot)

    # Restart

    def restore(
        self,
        extent_sizes: Sequence[int],
        sealed: RestoredSlots,
        quarantined: Sequence[Slot],
        *,
        generation: int,
    ) -> list[int]:
        """Fill an empty table from a segment; 100 000 slots take some tens of milliseconds.

        Args:
            extent_sizes: slot size of every extent.
            sealed: the readable slots, oldest first.
            quarantined: slots never to be used again.
            generation: the last one that may have been given out.

        Returns:
            Slots that were not kept (a second copy of a block); their memory counts as free.
        """
        assert not len(self._store), "restore wants an empty table"
        refused: list[int] = []
        kept = self._adopt(extent_sizes, sealed, quarantined)
        if not kept:
            again = sealed.second_copies()
            refused, sealed = sealed.indices[again].tolist(), sealed.some(~again)
            kept = self._adopt(extent_sizes, sealed, quarantined)
        assert kept, "second copies are out"
        self.generation = generation
        self._uses = len(sealed)
        self._restore_queues(sealed)
        return refused

    def _adopt(
        self, extent_sizes: Sequence[int], sealed: RestoredSlots, quarantined: Sequence[Slot]
    ) -> bool:
        """Take the slots in; False, and nothing is done, when a block is there twice."""
        if not self._store.restore(sealed):
            return False
        numbers = np.append(sealed.indices, [slot.index for slot in quarantined]).astype(int)
        self.extents.adopt(extent_sizes, np.sort(numbers).tolist())
        self._store.restore_others(quarantined)
        return True

    def _restore_queues(self, sealed: RestoredSlots) -> None:
        """Queue the leaves; a slot's age is its row, counting from 1."""
        self._leaves.load(sealed.parent_list())
        has_child = map(self._leaves.children.__contains__, self._store.by_key)
        rows = np.flatnonzero(~np.fromiter(has_child, bool, len(sealed)))
        places = sealed.indices[rows] // self.extents.slots_per_extent
        sizes = np.array(self.extents.slot_sizes())[places]
        entries = np.column_stack((rows + 1, sealed.indices[rows], sealed.generations[rows]))
        for size in np.unique(sizes).tolist():
            lane = entries[sizes == size].tolist()
            self._leaves.load_lane(size, map(_entry, lane))
        if self._clean.enabled:
            self._clean.restore(self._leaves.children, map(_entry, entries.tolist()))
        self.extents.note_uses(sealed.indices, len(sealed))

    # What every step is made of

    def _expect(self, slot: Slot, deadline: float) -> None:
        """Have ``expire`` look at a slot; entries that count no more never outnumber the slots."""
        heapq.heappush(self._deadlines, (deadline, slot.index, slot.generation))
        if len(self._deadlines) > 2 * len(self._store) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in set(self._deadlines) if self._is_expected(*entry)]
            heapq.heapify(self._deadlines)

    def _is_expected(self, deadline: float, index: int, generation: int) -> bool:
        slot = self.get(index, generation)
        if slot is None:
            return False
        if slot.state is SlotState.WRITING:
            return deadline == slot.deadline
        return bool(slot.holders) and deadline == slot.hold_deadline

    def _occupy(self, index: int, put: PutRequest, owner: str) -> Slot:
        self.generation += 1
        extent = self.extents.of(index)
        offset = self.extents.offset(index, extent)
        slot = Slot(index, self.generation, put, SlotState.WRITING, extent, offset, owner=owner)
        self._owners.add(owner, index)
        self._store.add(slot)
        self._store.by_key[put.key] = index
        self._leaves.link(put.parent)
        self._clean.linked(slot)
        self._evictor.linked(slot)
        self._touch(slot)
        return slot

    def _closes_a_ring(self, put: PutRequest) -> bool:
        """Whether a block's ancestors here descend from it; O(1) unless it has children here."""
        if put.key not in self._leaves.children:
            return False
        key = put.parent
        for _ in range(len(self._store)):  # A segment of an older version may hold a ring.
            above = self._store.find(key)
            if above is None:
                return False
            key = above.put.parent
            if key == put.key:
                return True
        return True

    def _evict_for(self, size: int, parent: BlockKey) -> Sequence[Slot]:
        """Make one place of a size; a parent is not evicted to make room for its own child."""
        self._leaves.link(parent)
        victims = self._evictor.victims(size, uses=self._uses, coming=parent)
        for slot in victims:
            self._forget_key(slot)
            self._vacate(slot)
        self._unlink(parent)
        self.evicted_blocks += len(victims)
        return victims

    def _free_or_doom(self, slot: Slot) -> Slot | None:
        self._disown(slot)
        self._forget_key(slot)
        if slot.pins:
            slot.doomed = True
            return None
        self._vacate(slot)
        return slot

    def _disown(self, slot: Slot) -> None:
        self._owners.discard(slot.owner, slot.index)
        slot.owner = ""

    def _end_holds(self, slot: Slot) -> None:
        for owner in slot.holders:
            self._owners.discard(owner, slot.index)
        slot.holders.clear()

    def _forget_key(self, slot: Slot) -> None:
        """Make a block unfindable; its parent may be a leaf now."""
        del self._store.by_key[slot.put.key]
        self._evictor.unlinked(slot)
        self._unlink(slot.put.parent)
        self._clean.unlinked(slot)

    def _unlink(self, parent: BlockKey) -> None:
        if self._leaves.unlink(parent):
            above = self._store.find(parent)
            if above is not None:
                self._leaves.offer(above, above.extent.slot_bytes)

    def _vacate(self, slot: Slot) -> None:
        self._store.remove(slot)
        self.extents.give_back(slot.index)
        self._leaves.forget(slot.index)
        self._clean.vacated(slot.index)

    def _offer(self, slot: Slot) -> None:
        self._leaves.offer(slot, slot.extent.slot_bytes)
        self._clean.offer(slot)

    def _touch(self, slot: Slot) -> None:
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self._clean.used(slot)

    def check_invariants(self) -> None:
        """Assert everything that must always hold; O(slots)."""
        named: list[Slot] = []
        slots = list(self._store.all())
        for slot in slots:
            assert slot.index in slot.extent.live and slot.extent is self.extents.of(slot.index)
            assert slot.offset == self.extents.offset(slot.index, slot.extent), slot
            assert 0 < slot.generation <= self.generation, slot
            assert slot.state is not SlotState.FREE and slot.pins >= 0, slot
            assert all(slot.holders.values()), slot
            is_named = not slot.doomed and slot.state is not SlotState.QUARANTINED
            assert (self._store.by_key.get(slot.put.key) == slot.index) == is_named, slot
            named.extend([slot] if is_named else [])
            self._check_owners(slot)
        assert len(self._store.by_key) == len(named)
        for state in SlotState:
            assert self.count(state) == sum(1 for slot in slots if slot.state is state), state
        self._leaves.check_invariants(slots, [slot.put.parent for slot in named])
        self._clean.check_invariants(slots, named)
        assert self.pinned == sum(slot.pins for slot in slots)
        self._evictor.check_invariants()
        self.extents.check_invariants(len(slots))

    def _check_owners(self, slot: Slot) -> None:
        if slot.owner:
            assert slot.index in self._owners.slots_of(slot.owner), slot
        for owner in slot.holders:
            assert not owner or slot.index in self._owners.slots_of(owner), slot


def _entry(row: list[int]) -> tuple[int, int, int]:
    used, index, generation = row
    return used, index, generation
