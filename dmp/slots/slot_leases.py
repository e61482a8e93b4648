"""What leases keep in a segment, at most a share of it: puts go on in the rest.

A part of the pure core, used by dmp/slots/slot_table.py. A meta server promised these blocks to
somebody (kvcore/hold.py); a lease ends with its time, or when it is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore import limits
from tierkv.kvcore.hold import HoldOrder
from tierkv.policies.holds import Holds


class SlotLeases:
    """Marks slots as leased.

    Attributes:
        _offer: called with each slot that no lease keeps any more.
    """

    def __init__(
        self, store: SlotStore, *, limit_bytes: int, offer: Callable[[Slot], None]
    ) -> None:
        self._store = store
        self._holds = Holds(limit_bytes)
        self._offer = offer

    @property
    def blocks(self) -> int:
        """Blocks kept now."""
        return len(self._holds)

    @property
    def refused(self) -> int:
        """Blocks that were not kept for want of room, ever."""
        return self._holds.refused

    def carry_out(self, order: HoldOrder, now: float) -> None:
        """Keep blocks that are sealed here, prolong, or let go."""
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
        """End the leases whose time is over."""
        if self._holds:
            self._let_go(self._holds.expire(now))

    def gone(self, slot: Slot) -> None:
        """Take in that a block can't be found any more."""
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
        """Assert that the marks are right; O(slots)."""
        self._holds.check_invariants()
        assert all(slot.leased == (slot.index in self._holds) for slot in slots)
        assert len(self._holds) == sum(slot.leased for slot in slots)
