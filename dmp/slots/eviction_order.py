"""The order of eviction: a policy per slot size chooses among leaves.

A part of the pure core, used by dmp/slots/slot_table.py and dmp/slots/evictor.py. Policies do not
know the blocks found at a restart until their first use; until then these blocks are evicted before
all others, oldest first. If a policy names a block that is held, pinned or has children, the block
is withdrawn, and offered again when the obstacle ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from tierkv.dmp.segment.slots import Slot, SlotState
from tierkv.dmp.slots.leaf_queue import LeafQueue
from tierkv.dmp.slots.slot_store import SlotStore
from tierkv.kvcore.block import Expectation
from tierkv.policies.eviction import NO_FACTS, BlockFacts, EvictionPolicy, whole_seconds

MakePolicy = Callable[[int], EvictionPolicy]
"""Makes the policy for slots of a size in bytes."""

SAME_USE_S: Final = 1.0
"""Uses of a block within this time count as one use."""


def evictable(slot: Slot) -> bool:
    """Return True if no holder, pin or lease needs the slot's bytes."""
    return slot.state is SlotState.SEALED and not (slot.holders or slot.pins or slot.leased)


class EvictionOrder:
    """Chooses the next eviction victim.

    Attributes:
        leaves: children of all blocks; queues the leaves that no policy knows, by last use, and all
            leaves once ``by_age`` is set.
        by_age: whether ``oldest`` is needed: when blocks are copied to a lower tier, and when slots
            of several sizes compete for extents.
        _policies: policy by slot size, made when the size first occurs.
    """

    def __init__(self, make_policy: MakePolicy, *, by_age: bool) -> None:
        self.by_age = by_age
        self.leaves = LeafQueue(self._is_queued_by_age)
        self._make_policy = make_policy
        self._policies: dict[int, EvictionPolicy] = {}

    def entered(self, slot: Slot, now: float) -> None:
        """Add a sealed block."""
        slot.known = True
        slot.used_at = now
        if slot.facts is NO_FACTS:
            slot.facts = BlockFacts.of(slot.block)
        policy = self._policy(slot.extent.slot_bytes)
        policy.entered(slot.index, slot.facts, whole_seconds(now))

    def used(self, slot: Slot, now: float) -> None:
        """Note a use of a sealed block; the policy learns of a restored block at its first use.

        Uses within a second count as one: a load looks a block up and then reads the block layer by
        layer.
        """
        if not slot.known:
            self.entered(slot, now)
            self.offer(slot)
        elif now - slot.used_at >= SAME_USE_S:
            slot.used_at = now
            if slot.facts.outlook.expectation is not Expectation.UNKNOWN:
                slot.facts = _still_expected(slot.facts)
            policy = self._policies[slot.extent.slot_bytes]
            policy.used(slot.index, slot.facts, whole_seconds(now))

    def left(self, slot: Slot, now: float) -> None:
        """Forget a removed block."""
        if slot.known:
            self._policies[slot.extent.slot_bytes].left(slot.index, whole_seconds(now))
            slot.known = slot.offered = False

    def offer(self, slot: Slot) -> None:
        """Make a slot an eviction candidate, if the slot is an evictable leaf."""
        if slot.known and not slot.offered and self._may_go(slot):
            slot.offered = True
            self._policies[slot.extent.slot_bytes].offer(slot.index)
        if self.by_age or not slot.known:
            self.leaves.offer(slot, slot.extent.slot_bytes)

    def queue_by_age(self, slots: Iterable[Slot]) -> None:
        """Begin to keep all leaves by age; O(slots)."""
        self.by_age = True
        for slot in slots:
            self.leaves.offer(slot, slot.extent.slot_bytes)

    def next(self, size: int, store: SlotStore, now: float) -> Slot | None:
        """Return the next victim of a size, a leaf; amortised one policy call per offered slot."""
        oldest = self.leaves.oldest(size, store.get)
        if oldest is not None and not oldest.known:
            return oldest
        policy, now = self._policies.get(size), whole_seconds(now)
        while policy is not None and (index := policy.victim(now)) is not None:
            slot = store.at(index)
            assert slot is not None and slot.known, index
            if self._may_go(slot):
                return slot
            policy.withdraw(index)
            slot.offered = False
        return None

    def oldest(self, size: int, store: SlotStore) -> Slot | None:
        """Return the least recently used leaf of a size; requires ``by_age``."""
        return self.leaves.oldest(size, store.get)

    def admits(self, facts: BlockFacts, size: int, now: float) -> bool:
        """Return True if a block is worth more than the victim that ``next`` just named."""
        policy = self._policies.get(size)
        return policy is None or policy.admits(facts, whole_seconds(now))

    def sizes(self) -> Iterator[int]:
        """Iterate over the slot sizes that have a policy."""
        return iter(self._policies)

    def _policy(self, size: int) -> EvictionPolicy:
        policy = self._policies.get(size)
        if policy is None:
            policy = self._policies[size] = self._make_policy(size)
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
