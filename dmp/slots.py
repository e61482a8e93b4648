"""Which slot holds which block: the pure core of a DMP node.

Called by dmp/node.py under its lock; decides and answers what changed (victims, expired slots),
never touches memory, clock or socket.

Eviction takes the least recently used *leaf*: a block whose children are in this node goes after
them, because a continuation without its head is useless. Held, pinned and unsealed blocks never go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from dmp.extents import Extent, ExtentTable, slot_bytes_for
from dmp.pool_node import PutRequest
from kvcore.ids import BlockKey

_COMING: Final = -1
"""Stands for a child that is about to get its slot, so that its ancestors stay."""


class SlotState(IntEnum):
    """What a slot's bytes are; the numbers are stored in the segment."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


@dataclass(slots=True)
class Slot:
    """A slot in use; mutated only by SlotTable.

    Attributes:
        index: slot number in the segment.
        generation: counts uses of this slot number; never repeats.
        put: what is in it.
        state: never FREE; free slots have no Slot.
        deadline: when a WRITING slot expires.
        pins: transfers touching the bytes right now; a pinned slot is not reused.
        holds: clients that asked to keep it; counts until ``hold_deadline``.
        hold_deadline: the latest deadline of its holds.
        last_used: position in the order of uses.
        queued: whether the eviction queue of its size has an entry for it.
        doomed: expired or aborted while pinned; freed with the last pin.
        owner: who reserved it; empty for nobody in particular.
        holders: how many holds each owner has; ``holds`` is their sum.
    """

    index: int
    generation: int
    put: PutRequest
    state: SlotState
    deadline: float = 0.0
    pins: int = 0
    holds: int = 0
    hold_deadline: float = 0.0
    last_used: int = 0
    queued: bool = False
    doomed: bool = False
    owner: str = ""
    holders: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decision: clear ``victims``, note the extent's size, then let ``slot`` be written."""

    slot: Slot
    extent: int
    slot_bytes: int
    victims: tuple[Slot, ...]


class SlotTable:
    """All slots of one segment.

    Attributes:
        extents: how the segment is cut.
        generations: last generation of every slot number, used or free.
        alloc_failures: reservations refused for want of room.
        evicted_blocks: blocks removed to make room.
    """

    def __init__(self, *, extent_count: int, extent_bytes: int, slots_per_extent: int) -> None:
        self.extents = ExtentTable(
            extent_count=extent_count, extent_bytes=extent_bytes, slots_per_extent=slots_per_extent
        )
        self.generations = [0] * (extent_count * slots_per_extent)
        self.alloc_failures = 0
        self.evicted_blocks = 0
        self._slots: dict[int, Slot] = {}
        self._by_key: dict[BlockKey, Slot] = {}
        self._children: dict[BlockKey, set[int]] = {}
        self._queues: dict[int, list[tuple[int, int, int]]] = {}
        self._deadlines: list[tuple[float, int, int]] = []
        self._uses = 0
        self._owned: dict[str, set[int]] = {}

    # Questions

    def find(self, key: BlockKey) -> Slot | None:
        """Return the sealed slot of a block and count it as used."""
        slot = self._by_key.get(key)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        self._touch(slot)
        return slot

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if it still is in that generation and not doomed."""
        slot = self._slots.get(index)
        if slot is None or slot.generation != generation or slot.doomed:
            return None
        return slot

    def sealed(self) -> list[Slot]:
        """Return all readable slots, oldest use first."""
        found = [s for s in self._slots.values() if s.state is SlotState.SEALED]
        return sorted(found, key=lambda s: s.last_used)

    def count(self, state: SlotState) -> int:
        """Count the slots in a state; O(slots in use)."""
        return sum(1 for s in self._slots.values() if s.state is state)

    # The life of a slot

    def reserve(self, put: PutRequest, *, deadline: float, owner: str = "") -> Reserved | None:
        """Take a slot for a block, evicting leaves if there is no free one.

        Returns:
            The decision; None when the block is here already (sealed or being written) or no room
            can be made (then ``alloc_failures`` grows). None never has victims.
        """
        if put.key in self._by_key:
            return None
        size = slot_bytes_for(put.range_bytes, put.range_count)
        index = self.extents.take(size)
        victims: list[Slot] = []
        if index is None and size <= self.extents.extent_bytes:
            # The parent must not be evicted to make room for its own child.
            self._link(put.parent, _COMING)
            victims = self._evict_for(size)
            self._unlink(put.parent, _COMING)
            index = self.extents.take(size)
        if index is None:
            assert not victims, victims
            self.alloc_failures += 1
            return None
        slot = self._occupy(index, put)
        slot.deadline = deadline
        slot.owner = owner
        if owner:
            self._owned.setdefault(owner, set()).add(index)
        heapq.heappush(self._deadlines, (deadline, slot.index, slot.generation))
        return Reserved(slot, self.extents.of(index).index, size, tuple(victims))

    def seal(self, index: int, generation: int, *, now: float) -> Slot | None:
        """Make a written slot readable; None when it is gone, too late or still being filled."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.WRITING or slot.pins or slot.deadline <= now:
            return None
        slot.state = SlotState.SEALED
        self._disown(slot)
        self._touch(slot)
        self._queue_if_leaf(slot)
        return slot

    def release_owner(self, owner: str) -> list[Slot]:
        """Abort an owner's reservations and end its holds; answers the freed slots.

        O(its reservations and holds).
        """
        freed: list[Slot] = []
        for index in self._owned.pop(owner, set()):
            slot = self._slots.get(index)
            if slot is None:
                continue
            if slot.state is SlotState.WRITING and slot.owner == owner and not slot.doomed:
                gone = self._free_or_doom(slot)
                freed.extend([gone] if gone else [])
            elif slot.holders.pop(owner, 0):
                slot.holds = sum(slot.holders.values())
                self._queue_if_leaf(slot)
        return freed

    def _disown(self, slot: Slot) -> None:
        owned = self._owned.get(slot.owner)
        if owned is not None:
            owned.discard(slot.index)
            if not owned:
                del self._owned[slot.owner]
        slot.owner = ""

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
            elif slot.holds and slot.hold_deadline <= now:
                slot.holds = 0
                slot.holders.clear()
                self._queue_if_leaf(slot)
        return freed

    def hold(self, index: int, generation: int, *, until: float, owner: str = "") -> bool:
        """Keep a sealed block from eviction until released or ``until``; False if it is gone."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.SEALED:
            return False
        slot.hold_deadline = max(slot.hold_deadline, until) if slot.holds else until
        slot.holds += 1
        slot.holders[owner] = slot.holders.get(owner, 0) + 1
        if owner:
            self._owned.setdefault(owner, set()).add(index)
        heapq.heappush(self._deadlines, (slot.hold_deadline, index, generation))
        self._touch(slot)
        return True

    def release(self, index: int, generation: int, *, owner: str = "") -> None:
        """Undo one hold of that owner; unknown ones are ignored."""
        slot = self.get(index, generation)
        if slot is not None and slot.holders.get(owner):
            slot.holds -= 1
            slot.holders[owner] -= 1
            self._queue_if_leaf(slot)

    def touch(self, index: int, generation: int) -> None:
        """Count a use of a sealed block (a reader that maps the segment reports late)."""
        slot = self.get(index, generation)
        if slot is not None and slot.state is SlotState.SEALED:
            self._touch(slot)

    def pin(self, slot: Slot) -> None:
        """Keep the slot's bytes in place while a transfer touches them."""
        slot.pins += 1

    def unpin(self, slot: Slot) -> Slot | None:
        """End a transfer; answers the slot if that freed it."""
        slot.pins -= 1
        assert slot.pins >= 0, slot
        if slot.pins == 0 and slot.doomed:
            self._vacate(slot)
            return slot
        self._queue_if_leaf(slot)
        return None

    def quarantine(self, index: int, generation: int) -> Slot | None:
        """Take a sealed slot with bad bytes out of use for good; None if it was gone."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        slot.state = SlotState.QUARANTINED
        slot.holds = 0
        slot.holders.clear()
        self._forget_key(slot)
        return slot

    def restore(
        self, generations: list[int], extent_sizes: list[int], slots: Iterable[Slot]
    ) -> list[Slot]:
        """Fill an empty table from a segment, slots in order of use.

        Returns:
            Slots that were not kept (a second copy of a block); their memory counts as free.
        """
        assert not self._slots, "restore wants an empty table"
        self.generations = generations
        refused: list[Slot] = []
        for slot in slots:
            if slot.state is SlotState.SEALED and slot.put.key in self._by_key:
                refused.append(slot)
                continue
            self._slots[slot.index] = slot
            if slot.state is SlotState.SEALED:
                self._by_key[slot.put.key] = slot
                self._link(slot.put.parent, slot.index)
        self.extents.adopt(extent_sizes, self._slots)
        for slot in self._slots.values():
            self._touch(slot)
            self._queue_if_leaf(slot)
        return refused

    def _occupy(self, index: int, put: PutRequest) -> Slot:
        self.generations[index] += 1
        slot = Slot(index, self.generations[index], put, SlotState.WRITING)
        self._slots[index] = slot
        self._by_key[put.key] = slot
        self._link(put.parent, index)
        self._touch(slot)
        return slot

    def _free_or_doom(self, slot: Slot) -> Slot | None:
        self._disown(slot)
        self._forget_key(slot)
        if slot.pins:
            slot.doomed = True
            return None
        self._vacate(slot)
        return slot

    def _forget_key(self, slot: Slot) -> None:
        if self._by_key.get(slot.put.key) is slot:
            del self._by_key[slot.put.key]
        self._unlink(slot.put.parent, slot.index)

    def _vacate(self, slot: Slot) -> None:
        del self._slots[slot.index]
        self.extents.give_back(slot.index)

    # Family and age

    def _link(self, parent: BlockKey, child: int) -> None:
        self._children.setdefault(parent, set()).add(child)

    def _unlink(self, parent: BlockKey, child: int) -> None:
        children = self._children.get(parent, set())
        children.discard(child)
        if not children and self._children.pop(parent, None) is not None:
            above = self._by_key.get(parent)
            if above is not None:
                self._queue_if_leaf(above)

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_used = self._uses
        self.extents.of(slot.index).last_used = self._uses

    def _evictable(self, slot: Slot) -> bool:
        return slot.state is SlotState.SEALED and not (slot.holds or slot.pins)

    def _is_leaf(self, slot: Slot) -> bool:
        return self._evictable(slot) and slot.put.key not in self._children

    def _queue_if_leaf(self, slot: Slot) -> None:
        if not slot.queued and self._is_leaf(slot):
            slot.queued = True
            queue = self._queues.setdefault(self.extents.of(slot.index).slot_bytes, [])
            heapq.heappush(queue, (slot.last_used, slot.index, slot.generation))

    # Eviction

    def _evict_for(self, size: int) -> list[Slot]:
        """Make one place of a size: its own oldest leaf, or a whole extent that is colder."""
        leaf = self._oldest_leaf(size)
        older_than = leaf.last_used if leaf else self._uses + 1
        victims = self._coldest_foreign_family(size, older_than) or ([leaf] if leaf else [])
        for slot in victims:
            self._forget_key(slot)
            self._vacate(slot)
        self.evicted_blocks += len(victims)
        return list(victims)

    def _oldest_leaf(self, size: int) -> Slot | None:
        """Return the least recently used leaf of a size; amortised O(log slots).

        Entries are not moved when a slot is used; one that turns out too young or no leaf any
        more is put back or dropped here.
        """
        queue = self._queues.get(size, [])
        while queue:
            used, index, generation = queue[0]
            slot = self._slots.get(index)
            if slot is None or slot.generation != generation:
                heapq.heappop(queue)
            elif not self._is_leaf(slot):
                heapq.heappop(queue)
                slot.queued = False
            elif slot.last_used != used:
                heapq.heapreplace(queue, (slot.last_used, index, generation))
            else:
                return slot
        return None

    def _coldest_foreign_family(self, size: int, older_than: int) -> Sequence[Slot]:
        """Return what must go to free the coldest extent of another size; () if none is colder.

        O(extents) when several sizes share the segment, which is when a node serves several models.
        """
        for extent in self.extents.coldest_of_other_sizes(size):
            if extent.last_used >= older_than:
                return ()
            family = self._family(extent)
            if all(self._evictable(s) and s.last_used < older_than for s in family):
                return family
        return ()

    def _family(self, extent: Extent) -> Sequence[Slot]:
        """Return an extent's slots and all descendants, those first; () if one is coming."""
        order: list[Slot] = []
        seen: set[int] = set()
        todo = [(index, False) for index in extent.live]
        while todo:
            index, children_done = todo.pop()
            if index == _COMING:
                return ()
            slot = self._slots[index]
            if children_done:
                order.append(slot)
            elif index not in seen:
                seen.add(index)
                todo.append((index, True))
                if self._by_key.get(slot.put.key) is slot:
                    todo.extend((c, False) for c in self._children.get(slot.put.key, ()))
        return order

    def check_invariants(self) -> None:
        """Assert everything that must always hold; O(slots)."""
        for index, slot in self._slots.items():
            assert slot.index == index and index in self.extents.of(index).live, slot
            assert slot.generation == self.generations[index] > 0, slot
            assert slot.state is not SlotState.FREE and slot.pins >= 0 and slot.holds >= 0, slot
            named = not slot.doomed and slot.state is not SlotState.QUARANTINED
            assert (self._by_key.get(slot.put.key) is slot) == named, slot
            assert (index in self._children.get(slot.put.parent, ())) == named, slot
            assert slot.queued or not self._is_leaf(slot), f"a leaf is not queued: {slot}"
        assert len(self._by_key) == sum(len(c) for c in self._children.values())
        assert all(self._children.values()), "an empty family was kept"
        in_extents = sum(1 for i in self._slots if i in self.extents.of(i).live)
        assert in_extents == len(self._slots)
        self.extents.check_invariants()
