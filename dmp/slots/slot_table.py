"""Which slot holds which block: the pure core of a DMP node.

Called by the node under its lock. The table decides and returns the changes (victims, expired
slots); it never touches memory, clock or socket.

Only *leaves* are evicted, in an order that a policy chooses (dmp/slots/eviction.py). A block
is evicted after its children on this node, because a continuation without its head is useless.
Held, leased, pinned and unsealed blocks are never evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import ExtentTable, Reserved, Slot, SlotState, slot_bytes_for
from tierkv.dmp.slots.accounts import EVERYONE, Accounts
from tierkv.dmp.slots.eviction import (
    SAME_USE_S,
    Admission,
    EvictionOrder,
    Evictor,
    MakePolicy,
)
from tierkv.dmp.slots.holds import Deadlines, Owners, SlotLeases
from tierkv.dmp.slots.leaf_queue import CleanSlots
from tierkv.dmp.slots.quotas import Quotas
from tierkv.dmp.slots.slot_store import SlotStore, TableRestore
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import BlockFacts, LeafLru

NO_DEADLINE: Final = float("inf")
"""Of a reservation that lasts as long as a frame is received: the node ends it in any case."""


class SlotTable:
    """All slots of one segment.

    Attributes:
        extents: how the segment is cut.
        generation: the last generation given out; grows with every reservation of any slot.
        alloc_failures: reservations refused for lack of room.
        evicted_blocks: blocks removed to make room.
        pinned: total number of pins of all slots.
        store: the slots in use, for questions that count no use.
        admission: refuses blocks, and counts the refused puts.
        leases: the leased slots; carries out the orders of the meta server.
        clean: which blocks have a copy in the lower tier, and which block is copied next.
        accounts: what each namespace keeps here, and may keep.
        quotas: makes namespaces keep to what they may keep.
        now: last time that the node passed to the table; the node sets it before calls that need
            the time.
    """

    def __init__(
        self,
        *,
        extent_count: int,
        extent_bytes: int,
        slots_per_extent: int,
        has_lower_tier: bool = False,
        make_policy: MakePolicy = lambda size, quota: LeafLru(),
        lease_share: float = 0.5,
    ) -> None:
        """Begin empty.

        Args:
            extent_count, extent_bytes, slots_per_extent: how the segment is cut.
            has_lower_tier: whether blocks are copied to a lower tier.
            make_policy: makes the eviction policy for slots of a size and a namespace.
            lease_share: maximum share of the segment under lease; puts continue in the rest.
        """
        self.extents = ExtentTable(
            extent_count=extent_count, extent_bytes=extent_bytes, slots_per_extent=slots_per_extent
        )
        self.generation = 0
        self.alloc_failures = 0
        self.evicted_blocks = 0
        self.pinned = 0
        self.now = 0.0
        self.accounts = Accounts()
        self.store = SlotStore(self.extents)
        self._order = EvictionOrder(make_policy, self.accounts, by_age=has_lower_tier)
        self.clean = CleanSlots(self.store.find, enabled=has_lower_tier)
        self._evictor = Evictor(
            self.store, self.extents, self._order, has_lower_tier=has_lower_tier
        )
        self.admission = Admission(self._order)
        self.leases = SlotLeases(
            self.store,
            limit_bytes=int(extent_count * extent_bytes * lease_share),
            offer=self._offer,
        )
        self._owners = Owners()
        self._deadlines = Deadlines(self.get)
        self.quotas = Quotas(
            self.accounts,
            self.store,
            self.extents,
            self._evictor,
            self.admission,
            order=self._order,
            evict=self._evict,
            offer=self._offer,
        )
        self._uses = 0

    def find(self, key: BlockKey) -> Slot | None:
        """Return the sealed slot of a block and count a use."""
        slot = self.store.find(key)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self.clean.used(slot)
        if self.now - slot.used_at >= SAME_USE_S or not slot.known:
            self._order.used(slot, self.now)
        return slot

    def get(self, index: int, generation: int) -> Slot | None:
        """Return a slot in use if the generation matches and the slot is not doomed."""
        slot = self.store.get(index, generation)
        return None if slot is None or slot.doomed else slot

    # The life of a slot

    def reserve(
        self, put: BlockSpec, *, deadline: float, owner: str = "", must: bool = False
    ) -> Reserved | None:
        """Reserve a slot for a block; evict leaves if no slot is free.

        Args:
            put: the block.
            deadline: time at which the reservation ends; NO_DEADLINE if the caller ends it.
            owner: client whose death ends the reservation.
            must: a reader waits for the block, whatever the worth of the block.

        Returns:
            The decision, or None. None means: the block is here already (sealed or being written),
            would be its own ancestor (no block of that ring could ever be evicted), is not worth
            its place (``refused_puts`` grows), or no room can be made (``alloc_failures`` grows).
            None never has victims.
        """
        if put.key in self.store.by_key:
            return None
        if put.key in self._order.leaves.children and self.store.closes_a_ring(put):
            return None
        size = slot_bytes_for(put.ranges.size_bytes, put.ranges.count)
        if not must and self.admission.is_unreachable(put):
            return None
        facts, (account, is_outdated) = BlockFacts.of(put), self.accounts.place(put.owner)
        if is_outdated:
            self.accounts.by_number[account].refused += 1
            return None
        own = self.quotas.make_room(facts, put.parent, account, size, must=must, now=self.now)
        if own is None:
            return None
        victims = list(own)
        index = self.extents.take(size)
        if index is None:
            more = self._evict_for(facts, put.parent, size, account, must=must)
            if not more:
                self.quotas.removed += victims
                return None
            victims += more
            index = self.extents.take(size)
            assert index is not None, victims
        slot = self._occupy(index, put, facts, owner, account)
        slot.deadline = deadline
        if deadline != NO_DEADLINE:
            self._expect(slot, deadline)
        return Reserved(slot, tuple(victims))

    def seal(self, index: int, generation: int, *, now: float) -> Slot | None:
        """Make a written slot readable; None if the slot is gone, expired or still being filled."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.WRITING or slot.pins or slot.deadline <= now:
            return None
        self.now = max(self.now, now)
        self._disown(slot)
        self.store.change(slot, SlotState.SEALED)
        self._touch(slot)
        self._order.entered(slot, self.now)
        self._offer(slot)
        self.quotas.sealed(slot, self.now)
        return slot

    def abort(self, index: int, generation: int) -> Slot | None:
        """End a reservation; return the freed slot, or None if the slot was gone or is pinned."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.WRITING:
            return None
        return self._free_or_doom(slot)

    def drop(self, slot: Slot) -> Slot | None:
        """Take a block out; return the freed slot, or None as long as transfers touch it."""
        self._end_holds(slot)
        self.store.change(slot, SlotState.WRITING)  # Like a reservation that is aborted.
        return self._free_or_doom(slot)

    def expire(self, now: float) -> list[Slot]:
        """End all overdue reservations, holds and leases; return the freed slots."""
        self.now = max(self.now, now)
        self.leases.expire(now)
        self.quotas.expire(self.now)
        freed: list[Slot] = []
        for slot in self._deadlines.due(now):
            if slot.state is SlotState.WRITING:
                freed += filter(None, [self._free_or_doom(slot)])
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
        """Undo one hold of an owner; unknown holds are ignored."""
        slot = self.get(index, generation)
        if slot is None or owner not in slot.holders:
            return
        slot.holders[owner] -= 1
        if not slot.holders[owner]:
            del slot.holders[owner]
            self._owners.discard(owner, index)
            self._offer(slot)

    def release_owner(self, owner: str) -> list[Slot]:
        """Abort an owner's reservations and end the owner's holds; return the freed slots.

        O(reservations and holds of the owner).
        """
        freed: list[Slot] = []
        for index in self._owners.take(owner):
            slot = self.store.at(index)
            if slot is None or slot.doomed:
                continue
            if slot.state is SlotState.WRITING and slot.owner == owner:
                freed += filter(None, [self._free_or_doom(slot)])
            elif slot.holders.pop(owner, 0):
                self._offer(slot)
        return freed

    def touch(self, index: int, generation: int) -> None:
        """Count a use of a sealed block (a reader that maps the segment reports late)."""
        slot = self.get(index, generation)
        if slot is not None and slot.state is SlotState.SEALED:
            self._touch(slot)
            self._order.used(slot, self.now)

    def pin(self, slot: Slot) -> None:
        """Keep the slot's bytes in place during a transfer."""
        slot.pins += 1
        self.pinned += 1

    def pin_for_read(self, slot: Slot) -> None:
        """Pin, and count a use."""
        slot.pins += 1
        self.pinned += 1
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self.clean.used(slot)
        if self.now - slot.used_at >= SAME_USE_S or not slot.known:
            self._order.used(slot, self.now)

    def unpin(self, slots: Iterable[Slot]) -> list[Slot]:
        """End transfers; return the slots that a last pin freed.

        Slots of an earlier start of the node, and slots still being written, are no candidates for
        eviction and are not offered.
        """
        at, order = self.store.at, self._order
        freed: list[Slot] = []
        for slot in slots:
            if at(slot.index) is not slot:
                continue
            slot.pins -= 1
            self.pinned -= 1
            assert slot.pins >= 0, slot
            if slot.doomed:
                if slot.pins == 0:
                    self._vacate(slot)
                    freed.append(slot)
            elif slot.state is not SlotState.WRITING and (not slot.offered or order.by_age):
                order.offer(slot)  # Either list may have dropped the slot.
        return freed

    def quarantine(self, index: int, generation: int) -> Slot | None:
        """Take a sealed slot with bad bytes out of use; None if the slot was gone."""
        slot = self.get(index, generation)
        if slot is None or slot.state is not SlotState.SEALED:
            return None
        self._forget_key(slot)
        self._end_holds(slot)
        self.store.change(slot, SlotState.QUARANTINED)
        self.quotas.give_to(slot, EVERYONE, self.now)  # Nobody pays for bad memory.
        return slot

    def heal(self, slot: Slot) -> None:
        """Free a quarantined slot whose memory passed the test."""
        self._vacate(slot)

    # The lower tier

    def next_dirty(self) -> Slot | None:
        """Return the sealed block to copy next: the next eviction victims, then the oldest block.

        Each policy names only one block. The other blocks are copied in the order of last use,
        which keeps a supply of victims with a copy. None if all blocks have a copy.
        """
        for lane in self._order.lanes():
            leaf = self._order.next(lane, self.store, self.now)
            if leaf is not None and not leaf.clean:
                return leaf
        return self.clean.next_dirty(self.store.get)

    @property
    def exposed_bytes(self) -> int:
        """Slot bytes in use, without spare blocks: copied blocks that go before all dirty blocks.

        Blocks that were used since their copy was made, or were just promoted, are evicted after
        older blocks without a copy. They are no reserve for the next blocks to arrive.
        """
        return self.extents.used_bytes - self.clean.spare_bytes

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
            quarantined: slots out of use until a memory test.
            generation: the last generation that may have been given out.

        Returns:
            Slots that were not kept (a second copy of a block); their memory counts as free.
        """
        parts = TableRestore(self.store, self.extents, self._order.leaves, self.clean)
        refused = parts.fill(extent_sizes, sealed, quarantined)
        self.generation = generation
        self._uses = len(self.store)
        return refused

    # Helpers of all steps

    def _expect(self, slot: Slot, deadline: float) -> None:
        self._deadlines.expect(slot, deadline, slots=len(self.store))

    def _occupy(
        self, index: int, put: BlockSpec, facts: BlockFacts, owner: str, account: int
    ) -> Slot:
        self.generation += 1
        extent = self.extents.of(index)
        offset = self.extents.offset(index, extent)
        slot = Slot(index, self.generation, put, SlotState.WRITING, extent, offset, owner=owner)
        slot.facts, slot.account = facts, account
        self.accounts.take(account, extent.slot_bytes)
        self._owners.add(owner, index)
        self.store.add(slot)
        self.store.by_key[put.key] = index
        self.admission.taken(put.key)
        self._order.leaves.link(put.parent)
        self.clean.linked(slot)
        self._evictor.linked(slot)
        self._touch(slot)
        return slot

    def _evict_for(
        self, facts: BlockFacts, parent: BlockKey, size: int, account: int, *, must: bool
    ) -> Sequence[Slot]:
        """Make room for one slot; () if that is impossible or the victims are worth more.

        A parent is not evicted to make room for its own child. Blocks of other accounts are not
        compared with the new block: their owners' policies rank their own blocks only.
        """
        if size > self.extents.extent_bytes:
            self.alloc_failures += 1
            return ()
        self._order.leaves.link(parent)
        leaf = self.quotas.next_leaf(size, self.now)
        victims: Sequence[Slot] = ()
        foreign = leaf is not None and leaf.account != account
        lane = size + account
        if leaf is None or must or foreign or not self.admission.refuses(facts, lane, self.now):
            victims = self._evictor.victims(leaf, size, uses=self._uses, coming=parent)
            self.alloc_failures += not victims
        for slot in victims:
            owner = self.accounts.by_number.get(slot.account)
            if owner is not None:
                owner.evicted_for_memory += 1
            self._evict(slot)
        self._unlink(parent)
        return victims

    def _evict(self, slot: Slot) -> None:
        self._forget_key(slot)
        self._vacate(slot)
        self.evicted_blocks += 1

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
        """Make a block unfindable; its parent may become a leaf."""
        del self.store.by_key[slot.block.key]
        self._order.left(slot, self.now)
        self.leases.gone(slot)
        self._evictor.unlinked(slot)
        self._unlink(slot.block.parent)
        self.clean.unlinked(slot)

    def _unlink(self, parent: BlockKey) -> None:
        if self._order.leaves.unlink(parent):
            above = self.store.find(parent)
            if above is not None:
                self._order.offer(above)

    def _vacate(self, slot: Slot) -> None:
        self.store.remove(slot)
        self.accounts.give_back(slot.account, slot.extent.slot_bytes)
        self.extents.give_back(slot.index)
        self._order.leaves.forget(slot.index)
        self.clean.vacated(slot.index)

    def _offer(self, slot: Slot) -> None:
        self._order.offer(slot)
        self.clean.offer(slot)

    def _touch(self, slot: Slot) -> None:
        self._uses = slot.last_used = slot.extent.last_used = self._uses + 1
        if slot.spare:
            self.clean.used(slot)

    def check_invariants(self) -> None:
        """Assert everything that must always hold; O(slots)."""
        named: list[Slot] = []
        slots = list(self.store.all())
        for slot in slots:
            assert slot.index in slot.extent.live and slot.extent is self.extents.of(slot.index)
            assert slot.offset == self.extents.offset(slot.index, slot.extent), slot
            assert 0 < slot.generation <= self.generation, slot
            assert slot.state is not SlotState.FREE and slot.pins >= 0, slot
            assert all(slot.holders.values()), slot
            is_named = not slot.doomed and slot.state is not SlotState.QUARANTINED
            assert (self.store.by_key.get(slot.block.key) == slot.index) == is_named, slot
            named.extend([slot] if is_named else [])
            self._owners.check(slot)
        assert len(self.store.by_key) == len(named)
        for state in SlotState:
            assert self.store.counts[state] == sum(1 for slot in slots if slot.state is state), (
                state
            )
        self._order.check_invariants(slots, named)
        self.leases.check_invariants(slots)
        self.clean.check_invariants(slots, named)
        self.accounts.check_invariants(slots)
        assert self.pinned == sum(slot.pins for slot in slots)
        self._evictor.check_invariants()
        self.extents.check_invariants(len(slots))
