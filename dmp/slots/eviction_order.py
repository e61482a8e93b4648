"""In which order blocks go: a policy per slot size chooses among leaves.

A part of the pure core, used by dmp/slots/slot_table.py and dmp/slots/evictor.py. Blocks that a
restart found are unknown to the policies until somebody uses them; until then they go before all
others, oldest first. What is held, pinned or has children when a policy names it is taken off its
list, and offered again when that ends.
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
"""Uses of a block that follow each other so soon are one."""


def evictable(slot: Slot) -> bool:
    """Whether nobody needs a slot's bytes right now."""
    return slot.state is SlotState.SEALED and not (slot.holders or slot.pins or slot.leased)


class EvictionOrder:
    """Who goes next.

    Attributes:
        leaves: children of all blocks; queues the leaves that no policy knows, by last use, and
            once ``by_age`` is set all leaves.
        by_age: whether ``oldest`` is wanted: when blocks are copied to a lower tier, and when slots
            of several sizes compete for extents.
        _policies: by slot size, made when it is first met.
    """

    def __init__(self, make_policy: MakePolicy, *, by_age: bool) -> None:
        self.by_age = by_age
        self.leaves = LeafQueue(self._is_queued_by_age)
        self._make_policy = make_policy
        self._policies: dict[int, EvictionPolicy] = {}

    def entered(self, slot: Slot, now: float) -> None:
        """Take a sealed block in."""
        slot.known = True
        slot.used_at = now
        if slot.facts is NO_FACTS:
            slot.facts = BlockFacts.of(slot.block)
        policy = self._policy(slot.extent.slot_bytes)
        policy.entered(slot.index, slot.facts, whole_seconds(now))

    def used(self, slot: Slot, now: float) -> None:
        """Take in that a sealed block was used; one found at a restart is known from then on.

        Uses within a second are one: a load looks a block up and then reads it layer by layer.
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
        """Take in that a block can't be found any more."""
        if slot.known:
            self._policies[slot.extent.slot_bytes].left(slot.index, whole_seconds(now))
            slot.known = slot.offered = False

    def offer(self, slot: Slot) -> None:
        """Let a slot go from now on, if it may."""
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
        """Return the leaf of a size that goes next; amortised one question per slot offered."""
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
        """Return the leaf of a size that was not used for longest; wants ``by_age``."""
        return self.leaves.oldest(size, store.get)

    def admits(self, facts: BlockFacts, size: int, now: float) -> bool:
        """Whether a block is worth more than the one that ``next`` just named."""
        policy = self._policies.get(size)
        return policy is None or policy.admits(facts, whole_seconds(now))

    def sizes(self) -> Iterator[int]:
        """Name the slot sizes that have a policy."""
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
    """Say what is expected after a use: the one announced has come, but rows follow each other."""
    outlook = facts.outlook
    if outlook.expectation is Expectation.ROWS and outlook.expected_in_s is None:
        return facts
    outlook = replace(outlook, expectation=Expectation.UNKNOWN, expected_in_s=None)
    return replace(facts, outlook=outlook)
