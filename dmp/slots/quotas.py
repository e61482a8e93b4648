"""Makes each namespace keep to its quota: room from its own blocks, and an end for unused ones.

A part of the pure core, used by dmp/slots/slot_table.py, the owner of the slots. Removed slots,
except victims of a reservation, are collected in ``removed`` for the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from tierkv.dmp.segment.slots import ExtentTable, Slot, SlotState
from tierkv.dmp.slots.accounts import EVERYONE, ON_DISK, Accounts, Quota, TtlWheel
from tierkv.dmp.slots.eviction import Admission, EvictionOrder, Evictor, evictable
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import BlockFacts

_ORDER_LASTS: Final = 64
"""Victims of a full node that are taken in one order of the accounts; sorting thousands of accounts
for each block would cost more than storing the block."""

_REMOVED_AT_ONCE: Final = 250
"""Blocks of older versions removed before others may use the table again: some milliseconds."""


class Quotas:
    """Chooses what goes when an account is full, and when blocks of a namespace are too old.

    Attributes:
        removed: sealed slots that are gone and were not named to the node yet.
        _outdated: number and generation of slots of older versions, the newest last.
        _due_below: number and generation of slots that need a copy in the lower tier now.
    """

    def __init__(
        self,
        accounts: Accounts,
        store: SlotStore,
        extents: ExtentTable,
        evictor: Evictor,
        admission: Admission,
        *,
        order: EvictionOrder,
        evict: Callable[[Slot], None],
        offer: Callable[[Slot], None],
    ) -> None:
        """Begin without quotas; ``evict`` and ``offer`` are the table's."""
        self.removed: list[Slot] = []
        self._accounts = accounts
        self._store = store
        self._extents = extents
        self._evictor = evictor
        self._admission = admission
        self._order = order
        self._evict = evict
        self._offer = offer
        self._ttl = TtlWheel(store.get)
        self._outdated: list[tuple[int, int]] = []
        self._due_below: deque[tuple[int, int]] = deque()
        self._by_pressure: list[int] = []
        self._order_lasts = 0

    def set(self, quotas: Sequence[Quota], now: float) -> None:
        """Take new quotas: slots change their accounts, and what is too much is removed.

        O(slots) if there were or are any quotas: about a second for a million. Held
        and leased blocks stay until that ends; then the next block of their namespace takes their
        place.
        """
        if not len(self._accounts) and not quotas:
            return
        if self._accounts.differ_in_rates_only(quotas):
            self._accounts.replace(quotas)
            return
        self._outdated.clear()
        before = {number: each.quota for number, each in self._accounts.by_number.items()}
        self._accounts.replace(quotas)
        self._renew_policies(before, now)
        place, ttls = self._accounts.place, self._new_ttls(before)
        for slot in self._store.all():
            number, is_outdated = place(slot.block.owner)
            if slot.state is SlotState.QUARANTINED:
                number = EVERYONE
            moves = slot.account != number
            if moves:
                self.give_to(slot, number, now)
            if is_outdated:
                self._outdated.append((slot.index, slot.generation))
            elif moves or number in ttls:
                self.sealed(slot, now)
        self._accounts.drop_empty(quotas)
        self._outdated.sort(key=lambda place: place[1])
        self._order_lasts = 0
        for number in list(self._accounts.by_number):
            self._shrink(number, now)

    def _renew_policies(self, before: Mapping[int, Quota], now: float) -> None:
        """Make the policies of namespaces with another one than before."""
        slots: dict[int, list[Slot]] = {
            number: []
            for number, account in self._accounts.by_number.items()
            if number not in before or not account.quota.has_policy_of(before[number])
        }
        for slot in self._store.all() if slots else ():
            if slot.account in slots:
                slots[slot.account].append(slot)
        for number, own in slots.items():
            self._order.renew(number, own, now)

    def _new_ttls(self, before: Mapping[int, Quota]) -> AbstractSet[int]:
        """Return the accounts with another time to live than before."""
        return {
            number
            for number, account in self._accounts.by_number.items()
            if number not in before or before[number].memory_ttl_s != account.quota.memory_ttl_s
        }

    def take_removed(self) -> list[Slot]:
        """Return the slots removed since the last call: clear their headers and report them."""
        removed, self.removed = self.removed, []
        return removed

    def give_to(self, slot: Slot, number: int, now: float) -> None:
        """Move a slot to another account."""
        if slot.account == number:
            return
        size = slot.extent.slot_bytes
        self._accounts.give_back(slot.account, size)
        self._order.move(slot, number, now)
        self._accounts.take(number, size)
        if slot.state is SlotState.SEALED and not slot.doomed:
            self._offer(slot)

    def make_room(
        self,
        facts: BlockFacts,
        parent: BlockKey,
        number: int,
        size: int,
        *,
        must: bool,
        now: float,
    ) -> Sequence[Slot] | None:
        """Evict an account's own leaves until one more slot fits its capacity.

        Args:
            facts: the new block.
            parent: block before the new block; it is not evicted.
            number: the account.
            size: size of the slot.
            must: whatever the worth of the new block.
            now: seconds.

        Returns:
            The victims; None if the block has to be refused. What was evicted in vain is among
            the removed slots then.
        """
        if not self._accounts.excess(number, size):
            return ()
        account = self._accounts.by_number.get(number)
        assert account is not None, number
        victims: list[Slot] = []
        fits = account.quota.evicts and size <= account.quota.capacity_bytes
        self._order.leaves.link(parent)
        while fits and self._accounts.excess(number, size):
            leaf = self._own_leaf(number, size, now)
            fits = leaf is not None and (must or self._is_worth(facts, leaf, size + number, now))
            if leaf is not None and fits:
                account.evicted_for_quota += 1
                self._evict(leaf)
                victims.append(leaf)
        if self._order.leaves.unlink(parent):
            above = self._store.find(parent)
            if above is not None:
                self._order.offer(above)
        if fits:
            return victims
        account.refused += 1
        self.removed += victims
        return None

    def _is_worth(self, facts: BlockFacts, leaf: Slot, lane: int, now: float) -> bool:
        return leaf.lane != lane or not self._admission.refuses(facts, lane, now)

    def next_leaf(self, size: int, now: float) -> Slot | None:
        """Return the next leaf of a size, of the account with the largest used part."""
        if not len(self._accounts):
            return self._evictor.next_leaf(size, now)
        if not self._order_lasts:
            self._order_lasts = _ORDER_LASTS
            self._by_pressure = self._accounts.by_pressure(
                self._extents.capacity_bytes, self._extents.used_bytes
            )
        self._order_lasts -= 1
        leaves = (self._evictor.next_leaf(size + account, now) for account in self._by_pressure)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _own_leaf(self, number: int, size: int, now: float) -> Slot | None:
        """Return an account's next leaf, of a size if there is one."""
        sizes = sorted(self._extents.sizes(), key=lambda each: each != size)
        leaves = (self._evictor.next_leaf(each + number, now) for each in sizes)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _shrink(self, number: int, now: float) -> None:
        account = self._accounts.by_number.get(number)
        assert account is not None, number
        while self._accounts.excess(number):
            leaf = self._own_leaf(number, 0, now)
            if leaf is None:
                return
            account.evicted_for_quota += 1
            self._evict(leaf)
            self.removed.append(leaf)

    def sealed(self, slot: Slot, now: float) -> None:
        """Schedule a sealed slot's end: now for an older version, or after the time to live."""
        account = self._accounts.by_number.get(slot.account)
        if account is None or slot.state is not SlotState.SEALED:
            return
        if self._accounts.place(slot.block.owner)[1]:
            self._outdated.append((slot.index, slot.generation))
        elif account.quota.memory_ttl_s:
            self._ttl.expect(slot, max(slot.used_at, now) + account.quota.memory_ttl_s)

    def remove_outdated(self) -> bool:
        """Remove some blocks of older versions, children first; return whether any went."""
        before = len(self.removed)
        later: list[tuple[int, int]] = []
        for _ in range(min(_REMOVED_AT_ONCE, len(self._outdated))):
            place = self._outdated.pop()
            slot = self._store.get(*place)
            if slot is None or not self._accounts.place(slot.block.owner)[1]:
                continue
            if slot.block.key in self._order.leaves.children or not evictable(slot):
                later.append(place)  # Its readers, and its children, go first.
                continue
            self._accounts.by_number[slot.account].evicted_for_version += 1
            self._evict(slot)
            self.removed.append(slot)
        self._outdated[:0] = reversed(later)
        return len(self.removed) > before

    def expire(self, now: float) -> None:
        """Remove the leaves that were not used for their namespace's time.

        Blocks that stay on disks only need a copy there first (``next_due_below``).
        """
        due = list(self._ttl.due(now))
        if due:
            self._due_below.clear()  # Blocks still without a copy are due again each second.
        for slot in due:
            account = self._accounts.by_number.get(slot.account)
            ttl_s = 0.0 if account is None else account.quota.memory_ttl_s
            if account is None or not ttl_s or slot.state is not SlotState.SEALED:
                continue
            ends = slot.used_at + ttl_s
            rests = account.quota.media == ON_DISK
            if slot.known and ends > now:
                self._ttl.expect(slot, ends)
            elif rests and self._evictor.has_lower_tier and not slot.clean:
                self._due_below.append((slot.index, slot.generation))
                self._ttl.expect(slot, now)
            elif slot.block.key in self._order.leaves.children or not evictable(slot):
                self._ttl.expect(slot, now)  # Its children go first, and its readers.
            else:
                account.evicted_for_ttl += not rests
                self._evict(slot)
                self.removed.append(slot)

    @property
    def some_due_below(self) -> bool:
        """Whether blocks wait for a copy in the lower tier, to leave memory."""
        return bool(self._due_below)

    def next_due_below(self) -> Slot | None:
        """Return a block to be copied to the lower tier before it leaves memory, or None.

        A block without a copy after that, because the lower tier is full, is due again a second
        later.
        """
        while self._due_below:
            slot = self._store.get(*self._due_below.popleft())
            if slot is not None and slot.state is SlotState.SEALED and not slot.clean:
                return slot
        return None
