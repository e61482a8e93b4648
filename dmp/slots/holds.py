"""Reasons to keep a slot: a client's reservation or hold, or a lease of the meta server.

Parts of the pure core, used by dmp/slots/slot_table.py. Owners finds the slots of a dead client,
Deadlines finds reservations and holds that have ended. Both indexes may name slots that have moved
on, so the table checks each slot before acting.

Leases keep at most a share of the segment; puts continue in the rest. A lease is a promise of the
meta server to a reader (kvcore/block_event.py). A lease ends at its deadline or when it is revoked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore import limits
from tierkv.kvcore.block_event import HoldOrder
from tierkv.policies.holds import Holds

_SPARE_DEADLINES: Final = 1_024


class Deadlines:
    """Slots ordered by the time of their next check.

    Attributes:
        _slot_of: returns the slot of a number and generation; None if the slot number was reused or
            freed.
    """

    def __init__(self, slot_of: Callable[[int, int], Slot | None]) -> None:
        self._slot_of = slot_of
        self._entries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, slot: Slot, deadline: float, *, slots: int) -> None:
        """Schedule a slot for ``due``; ``slots`` is the number of slots in use."""
        heapq.heappush(self._entries, (deadline, slot.index, slot.generation))
        if len(self._entries) > 2 * slots + _SPARE_DEADLINES:
            self._entries = [entry for entry in set(self._entries) if self._counts(*entry)]
            heapq.heapify(self._entries)

    def due(self, now: float) -> Iterator[Slot]:
        """Yield the slots whose time has come, including slots whose deadline was extended."""
        while self._entries and self._entries[0][0] <= now:
            _, index, generation = heapq.heappop(self._entries)
            slot = self._slot_of(index, generation)
            if slot is not None:
                yield slot

    def _counts(self, deadline: float, index: int, generation: int) -> bool:
        slot = self._slot_of(index, generation)
        if slot is None:
            return False
        if slot.state is SlotState.WRITING:
            return deadline == slot.deadline
        return bool(slot.holders) and deadline == slot.hold_deadline


class Owners:
    """Slot numbers by owner; the owner "" means no owner and is not kept."""

    def __init__(self) -> None:
        self._slots: dict[str, set[int]] = {}

    def add(self, owner: str, index: int) -> None:
        """Note that a slot belongs to an owner."""
        if owner:
            self._slots.setdefault(owner, set()).add(index)

    def discard(self, owner: str, index: int) -> None:
        """Forget that a slot belongs to an owner."""
        slots = self._slots.get(owner)
        if slots is not None:
            slots.discard(index)
            if not slots:
                del self._slots[owner]

    def take(self, owner: str) -> set[int]:
        """Forget an owner and return its slots."""
        return self._slots.pop(owner, set())

    def slots_of(self, owner: str) -> frozenset[int]:
        """Return an owner's slots."""
        return frozenset(self._slots.get(owner, ()))

    def check(self, slot: Slot) -> None:
        """Assert that a slot is known for owner and holders."""
        assert not slot.owner or slot.index in self.slots_of(slot.owner), slot
        for owner in slot.holders:
            assert not owner or slot.index in self.slots_of(owner), slot


class SlotLeases:
    """Marks slots as leased.

    Attributes:
        _offer: called with each slot whose last lease ended.
    """

    def __init__(
        self, store: SlotStore, *, limit_bytes: int, offer: Callable[[Slot], None]
    ) -> None:
        self._store = store
        self._holds = Holds(limit_bytes)
        self._offer = offer

    @property
    def blocks(self) -> int:
        """Number of leased blocks."""
        return len(self._holds)

    @property
    def refused(self) -> int:
        """Number of blocks ever refused a lease for lack of room."""
        return self._holds.refused

    def carry_out(self, order: HoldOrder, now: float) -> None:
        """Lease the sealed blocks of an order, or prolong or end the lease.

        Blocks that are not sealed here are not kept.
        """
        self.expire(now)
        until = now + min(order.ttl_s, limits.MAX_LEASE_S)
        if order.keys:
            slots = [slot for key in order.keys if (slot := self._store.find(key)) is not None]
            slots = [slot for slot in slots if slot.state is SlotState.SEALED]
            blocks = [(slot.index, slot.extent.slot_bytes) for slot in slots]
            self._holds.hold(order.lease, blocks, until)
            for slot in slots:
                slot.leased = slot.index in self._holds
        elif order.ttl_s > 0:
            self._holds.prolong(order.lease, until)
        else:
            self._let_go(self._holds.end(order.lease))

    def expire(self, now: float) -> None:
        """End the leases whose deadline has passed."""
        if self._holds:
            self._let_go(self._holds.expire(now))

    def gone(self, slot: Slot) -> None:
        """Forget a removed block."""
        if slot.leased:
            self._holds.gone(slot.index)
            slot.leased = False

    def _let_go(self, indices: Sequence[int]) -> None:
        for index in indices:
            slot = self._store.at(index)
            assert slot is not None, index
            slot.leased = False
            self._offer(slot)

    def check_invariants(self, slots: Sequence[Slot]) -> None:
        """Assert that the marks agree with the leases; O(slots)."""
        self._holds.check_invariants()
        assert all(slot.leased == (slot.index in self._holds) for slot in slots)
        assert len(self._holds) == sum(slot.leased for slot in slots)
