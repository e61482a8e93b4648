"""Which block is evicted, and whether a new block is worth the place of the next victim.

Parts of the pure core: this module only chooses, and dmp/slots/slot_table.py evicts. A policy per
lane (slot size and account) chooses among leaves; the evictor takes the next leaf of a lane, or a
whole colder extent. Held, pinned and unsealed blocks are never evicted, and no block is evicted
before its children. If a policy names a block that is held, pinned or has children, the block is
withdrawn, and offered again when the obstacle ends. Policies do not know the blocks found at a
restart until their first use; until then these blocks are evicted before all others, oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from tierkv.dmp.config import SLOT_ALIGN
from tierkv.dmp.segment.slots import Extent, ExtentTable, Slot, SlotState
from tierkv.dmp.slots.accounts import Accounts, Quota
from tierkv.dmp.slots.leaf_queue import LeafQueue
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore.block import BlockSpec, Expectation
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.classic import TTL_S
from tierkv.policies.eviction import NO_FACTS, BlockFacts, EvictionPolicy, whole_seconds
from tierkv.policies.select import make_policy

MakePolicy = Callable[[int, Quota | None], EvictionPolicy]
"""Makes the policy for slots of a size in bytes, of the namespace with a quota; None: of others."""


def policy_for(
    quota: Quota | None, default: str, *, slot_bytes: int, capacity_bytes: int
) -> EvictionPolicy:
    """Return the policy for slots of a size: the namespace's own, or the node's.

    Args:
        quota: of the namespace of the slots; None for those of tenants without limits.
        default: name of the node's policy.
        slot_bytes: the size.
        capacity_bytes: slot bytes of the node.
    """
    if quota is None or not quota.eviction:
        return make_policy(default, capacity_bytes // slot_bytes)
    capacity_bytes = min(capacity_bytes, quota.capacity_bytes or capacity_bytes)
    return make_policy(quota.eviction, capacity_bytes // slot_bytes, ttl_s=quota.ttl_s or TTL_S)


SAME_USE_S: Final = 1.0
"""Uses of a block within this time count as one use."""

_Families = dict[BlockKey, set[int]]

_REMEMBERED: Final = 8_192
"""Refused blocks whose children are refused too; older refusals are forgotten."""


def evictable(slot: Slot) -> bool:
    """Return True if no holder, pin or lease needs the slot's bytes."""
    return slot.state is SlotState.SEALED and not (slot.holders or slot.pins or slot.leased)


class EvictionOrder:
    """Chooses the next eviction victim of a lane: of a slot size and a namespace's account.

    Attributes:
        leaves: children of all blocks; queues the leaves that no policy knows, by last use, and all
            leaves once ``by_age`` is set.
        by_age: whether ``oldest`` is needed: when blocks are copied to a lower tier, and when slots
            of several sizes compete for extents.
        _policies: policy by lane, made when the lane first occurs.
    """

    def __init__(self, make_policy: MakePolicy, accounts: Accounts, *, by_age: bool) -> None:
        self.by_age = by_age
        self.leaves = LeafQueue(self._is_queued_by_age)
        self._make_policy = make_policy
        self._accounts = accounts
        self._policies: dict[int, EvictionPolicy] = {}

    def entered(self, slot: Slot, now: float) -> None:
        """Add a sealed block."""
        slot.known = True
        slot.used_at = now
        if slot.facts is NO_FACTS:
            slot.facts = BlockFacts.of(slot.block)
        policy = self._policy(slot.lane)
        policy.entered(slot.index, slot.facts, whole_seconds(now))

    def used(self, slot: Slot, now: float) -> None:
        """Note a use of a sealed block; the policy learns of a restored block at its first use.

        Uses within a second count as one: a load looks a block up and then reads the block layer by
        layer.
        """
        if slot.account and (not slot.known or now - slot.used_at >= SAME_USE_S):
            account = self._accounts.by_number.get(slot.account)
            if account is not None:
                account.hits += 1
        if not slot.known:
            self.entered(slot, now)
            self.offer(slot)
        elif now - slot.used_at >= SAME_USE_S:
            slot.used_at = now
            if slot.facts.outlook.expectation is not Expectation.UNKNOWN:
                slot.facts = _still_expected(slot.facts)
            policy = self._policies[slot.lane]
            policy.used(slot.index, slot.facts, whole_seconds(now))

    def left(self, slot: Slot, now: float) -> None:
        """Forget a removed block."""
        if slot.known:
            self._policies[slot.lane].left(slot.index, whole_seconds(now))
            slot.known = slot.offered = False

    def offer(self, slot: Slot) -> None:
        """Make a slot an eviction candidate, if the slot is an evictable leaf."""
        if slot.known and not slot.offered and self._may_go(slot):
            slot.offered = True
            self._policies[slot.lane].offer(slot.index)
        if self.by_age or not slot.known:
            self.leaves.offer(slot, slot.lane)

    def queue_by_age(self, slots: Iterable[Slot]) -> None:
        """Begin to keep all leaves by age; O(slots)."""
        self.by_age = True
        for slot in slots:
            self.leaves.offer(slot, slot.lane)

    def next(self, lane: int, store: SlotStore, now: float) -> Slot | None:
        """Return the next victim of a lane, a leaf; amortised one policy call per offered slot."""
        oldest = self.leaves.oldest(lane, store.get)
        if oldest is not None and not oldest.known:
            return oldest
        policy, now = self._policies.get(lane), whole_seconds(now)
        while policy is not None and (index := policy.victim(now)) is not None:
            slot = store.at(index)
            assert slot is not None and slot.known, index
            if self._may_go(slot):
                return slot
            policy.withdraw(index)
            slot.offered = False
        return None

    def oldest(self, lane: int, store: SlotStore) -> Slot | None:
        """Return the least recently used leaf of a lane; requires ``by_age``."""
        return self.leaves.oldest(lane, store.get)

    def admits(self, facts: BlockFacts, lane: int, now: float) -> bool:
        """Return True if a block is worth more than the victim that ``next`` just named."""
        policy = self._policies.get(lane)
        return policy is None or policy.admits(facts, whole_seconds(now))

    def lanes(self) -> Iterator[int]:
        """Iterate over the lanes that have a policy."""
        return iter(self._policies)

    def move(self, slot: Slot, account: int, now: float) -> None:
        """Give a slot to another account, as a block that was just used there."""
        known = slot.known
        self.left(slot, now)
        self.leaves.forget(slot.index)
        slot.account = account
        if known:
            self.entered(slot, now)

    def renew(self, account: int, slots: Iterable[Slot], now: float) -> None:
        """Give an account's blocks to new policies, in order of their last use."""
        for lane in [lane for lane in self._policies if lane % SLOT_ALIGN == account]:
            del self._policies[lane]
        for slot in sorted(slots, key=lambda slot: slot.last_used):
            if slot.known:
                slot.offered = False
                self._policy(slot.lane).entered(slot.index, slot.facts, whole_seconds(now))
                self.offer(slot)

    def _policy(self, lane: int) -> EvictionPolicy:
        policy = self._policies.get(lane)
        if policy is None:
            account = self._accounts.by_number.get(lane % SLOT_ALIGN)
            quota = None if account is None else account.quota
            policy = self._policies[lane] = self._make_policy(lane - lane % SLOT_ALIGN, quota)
        return policy

    def _may_go(self, slot: Slot) -> bool:
        return slot.block.key not in self.leaves.children and evictable(slot)

    def _is_queued_by_age(self, slot: Slot) -> bool:
        return (self.by_age or not slot.known) and evictable(slot)

    def check_invariants(self, slots: Sequence[Slot], named: Sequence[Slot]) -> None:
        """Assert that children add up and that no leaf is forgotten; O(slots)."""
        self.leaves.check_invariants(slots, [slot.block.parent for slot in named])
        for slot in slots:
            assert slot.offered or not slot.known or not self._may_go(slot), f"not offered: {slot}"
            assert slot.known or not slot.offered, slot
            assert slot.state is SlotState.SEALED or not slot.known, slot


def _still_expected(facts: BlockFacts) -> BlockFacts:
    """Return the facts after a use: the announced use has happened, but more rows may follow."""
    outlook = facts.outlook
    if outlook.expectation is Expectation.ROWS and outlook.expected_in_s is None:
        return facts
    outlook = replace(outlook, expectation=Expectation.UNKNOWN, expected_in_s=None)
    return replace(facts, outlook=outlook)


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
        self.has_lower_tier = has_lower_tier
        self._families: _Families | None = None

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

    def next_leaf(self, lane: int, now: float) -> Slot | None:
        """Return the next leaf of a lane to evict.

        With a lower tier, a block without a copy is evicted only if the oldest leaf has no copy
        either: blocks that were copied ahead of time go first (dmp/slots/leaf_queue.py), and
        nothing is lost.
        """
        leaf = self._order.next(lane, self._store, now)
        if leaf is not None and self.has_lower_tier and not leaf.clean:
            oldest = self._order.oldest(lane, self._store)
            if oldest is not None and oldest.clean:
                return oldest
        return leaf

    def _oldest_use(self, size: int) -> int:
        if not self._order.by_age:
            self._order.queue_by_age(self._store.all())
        lanes = [lane for lane in self._order.leaves.lanes() if lane - lane % SLOT_ALIGN == size]
        oldest = [self._order.oldest(lane, self._store) for lane in lanes]
        return min((slot.last_used for slot in oldest if slot is not None), default=0)

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

    def _known_families(self) -> _Families:
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


class Admission:
    """Refuses blocks, and the blocks that follow a refused block.

    The policy of a slot size compares the new block with its victim.

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

    def refuses(self, facts: BlockFacts, lane: int, now: float) -> bool:
        """Return True if a block is worth less than the victim just named by the eviction order."""
        if facts.outlook.expectation is Expectation.ROWS:  # The block will be read soon.
            return False
        if self._order.admits(facts, lane, now):
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
