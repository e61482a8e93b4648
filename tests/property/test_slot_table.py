"""The slot table against a naive model: same answers, no slot twice, children before parents.

Also when clients die, when leases keep blocks, when blocks go down to disk, and when the node
starts again; under every policy there is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fix_dmp import block_key, make_put, restored_rows
from tierkv.dmp.segment.slots import Slot, SlotState, slot_bytes_for
from tierkv.dmp.slots.eviction import policy_for
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import NO_OUTLOOK, ROOT_PARENT, Expectation
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.select import PRODUCTION_POLICIES

EXTENT_BYTES = 128 << 10
SIZES = (30_000, 50_000)
"""Slots of 32 KiB (four in an extent) and 52 KiB (two in an extent)."""

NAMES = [f"n{i:02}" for i in range(16)]


OWNERS = ["", "client-a", "client-b"]


def new_table(policy: str, *, has_lower_tier: bool) -> SlotTable:
    return SlotTable(
        extent_count=2,
        extent_bytes=EXTENT_BYTES,
        slots_per_extent=4,
        has_lower_tier=has_lower_tier,
        make_policy=lambda size, quota: policy_for(
            quota, policy, slot_bytes=size, capacity_bytes=2 * EXTENT_BYTES
        ),
        lease_share=0.4,
    )


class SlotTableMachine(RuleBasedStateMachine):
    """The model: what is written, sealed, held, leased and pinned, by name."""

    policy = "leaf_lru"
    has_lower_tier = True

    def __init__(self) -> None:
        super().__init__()
        self.table = new_table(self.policy, has_lower_tier=self.has_lower_tier)
        self.leases: dict[int, tuple[set[BlockKey], float]] = {}
        self.clean: set[BlockKey] = set()
        self.quarantined: list[Slot] = []
        self.now = 0.0
        self.live: dict[BlockKey, Slot] = {}
        self.parents: dict[BlockKey, BlockKey] = {}
        self.holds: dict[BlockKey, tuple[Counter[str], float]] = {}
        self.pinned: list[Slot] = []
        self.dead: list[tuple[int, int]] = []

    def tenant_of(self, name: str) -> str:
        """Return whose block it is."""
        return "default"

    def _collect(self) -> None:
        """Take note of what a namespace's quota removed."""
        for slot in self.table.quotas.take_removed():
            assert slot.state is SlotState.SEALED and slot not in self.pinned
            assert slot.block.key not in self.holds and not self._is_leased(slot.block.key)
            self._gone(slot)

    def _refusals(self) -> int:
        return sum(account.refused for account in self.table.accounts)

    def _gone(self, slot: Slot) -> None:
        key = slot.block.key
        if self.live.get(key) is slot:
            del self.live[key]
            self.holds.pop(key, None)
            self.clean.discard(key)
            self._not_leased(key)
        self.dead.append((slot.index, slot.generation))

    def _not_leased(self, key: BlockKey) -> None:
        for keys, _ in self.leases.values():
            keys.discard(key)

    def _is_leased(self, key: BlockKey) -> bool:
        return any(key in keys for keys, _ in self.leases.values())

    def _expire(self) -> None:
        for slot in self.table.expire(self.now):
            assert slot.state is SlotState.WRITING
            assert slot.deadline <= self.now
            self._gone(slot)
        for key, slot in list(self.live.items()):
            if slot.state is SlotState.WRITING and slot.deadline <= self.now:
                assert slot.doomed and slot in self.pinned
                del self.live[key]
        for key, (_, until) in list(self.holds.items()):
            if until <= self.now:
                del self.holds[key]
        for lease, (_, until) in list(self.leases.items()):
            if until <= self.now:
                del self.leases[lease]
        self._collect()

    @rule(
        name=st.sampled_from(NAMES),
        parent=st.sampled_from([None, *NAMES]),
        size=st.sampled_from(SIZES),
        owner=st.sampled_from(OWNERS),
        expectation=st.sampled_from(Expectation),
    )
    def reserve_one(
        self, name: str, parent: str | None, size: int, owner: str, expectation: Expectation
    ) -> None:
        self.reserve(name, parent, size, owner, expectation)

    def reserve(
        self,
        name: str,
        parent: str | None,
        size: int,
        owner: str = "",
        expectation: Expectation = Expectation.UNKNOWN,
    ) -> None:
        self._expire()
        key = block_key(name)
        parent = parent if parent and parent < name else None
        parent_key = block_key(parent) if parent else ROOT_PARENT
        put = make_put(
            name, parent, range_bytes=size, range_count=1, expectation=expectation, depth=1,
            tenant=self.tenant_of(name),
        )  # fmt: skip
        refused_before, over_before = self.table.admission.refused_puts, self._refusals()
        before = dict(self.live)
        free_before = EXTENT_BYTES * 2 - self.table.extents.used_bytes
        decision = self.table.reserve(put, deadline=self.now + 10, owner=owner)
        self._collect()
        if key in before:
            assert decision is None
            return
        if self._refusals() > over_before:
            assert decision is None
            return
        if self.table.admission.refused_puts > refused_before:
            assert decision is None and expectation is not Expectation.ROWS
            return
        if decision is None:
            self._assert_nothing_can_go(size, parent_key)
            return
        assert decision.slot.extent.slot_bytes == slot_bytes_for(size, 1)
        assert not decision.victims or free_before < EXTENT_BYTES * 2
        gone: set[BlockKey] = set()
        for victim in decision.victims:
            self._assert_evictable(victim, gone)
            gone.add(victim.block.key)
            self._gone(victim)
        assert parent_key not in gone
        self.live[key] = decision.slot

    def _assert_evictable(self, victim: Slot, gone: set[BlockKey]) -> None:
        key = victim.block.key
        assert self.live[key] is victim and victim.state is SlotState.SEALED
        assert key not in self.holds and victim not in self.pinned
        assert not self._is_leased(key), "a lease was broken"
        children = {k for k, s in self.live.items() if s.block.parent == key}
        assert children <= gone, "a parent went before its child"

    def _assert_nothing_can_go(self, size: int, parent: BlockKey) -> None:
        """No unused leaf of the same size is left; it would have been a victim."""
        for key, slot in self.live.items():
            same = self.table.extents.of(slot.index).slot_bytes == slot_bytes_for(size, 1)
            has_child = any(s.block.parent == key for s in self.live.values())
            busy = key in self.holds or slot in self.pinned or slot.state is not SlotState.SEALED
            busy = busy or self._is_leased(key)
            assert not same or has_child or busy or key == parent, "a leaf could have gone"

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8),
        chained=st.booleans(),
        size=st.sampled_from(SIZES),
    )
    def store(self, names: list[str], chained: bool, size: int) -> None:
        """What clients do all day: whole blocks, often in chains."""
        parent = None
        for name in names:
            self.reserve(name, parent, size)
            self.seal(name)
            parent = name if chained else None

    @rule(name=st.sampled_from(NAMES))
    def seal(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        may = (
            slot.state is SlotState.WRITING and slot.deadline > self.now and slot not in self.pinned
        )
        assert (self.table.seal(slot.index, slot.generation, now=self.now) is slot) == may

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        freed = self.table.abort(slot.index, slot.generation)
        if slot.state is not SlotState.WRITING:
            assert freed is None
        elif slot in self.pinned:
            assert freed is None and slot.doomed
            del self.live[slot.block.key]
        else:
            assert freed is slot
            self._gone(slot)

    @rule(name=st.sampled_from(NAMES))
    def find(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        sealed = slot if slot is not None and slot.state is SlotState.SEALED else None
        assert self.table.find(block_key(name)) is sealed

    @rule(
        name=st.sampled_from(NAMES), ttl=st.sampled_from([1.0, 20.0]), owner=st.sampled_from(OWNERS)
    )
    def hold(self, name: str, ttl: float, owner: str) -> None:
        self._expire()
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        until = self.now + ttl
        held = self.table.hold(slot.index, slot.generation, until=until, owner=owner)
        assert held == (slot.state is SlotState.SEALED)
        if held:
            holders, before = self.holds.setdefault(slot.block.key, (Counter(), 0.0))
            holders[owner] += 1
            self.holds[slot.block.key] = (holders, max(before, until))

    @rule(name=st.sampled_from(NAMES), owner=st.sampled_from(OWNERS))
    def release(self, name: str, owner: str) -> None:
        self._expire()
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        self.table.release(slot.index, slot.generation, owner=owner)
        self._release(slot.block.key, owner, 1)

    def _release(self, key: BlockKey, owner: str, count: int) -> None:
        holders, until = self.holds.get(key, (Counter(), 0.0))
        holders.subtract({owner: min(count, holders[owner])})
        self.holds[key] = (+holders, until)
        if not self.holds[key][0]:
            del self.holds[key]

    @rule(
        lease=st.integers(1, 3),
        names=st.lists(st.sampled_from(NAMES), max_size=4),
        ttl_s=st.sampled_from([0.0, 2.0, 20.0]),
    )
    def lease(self, lease: int, names: list[str], ttl_s: float) -> None:
        self._expire()
        keys = tuple(block_key(name) for name in names)
        self.table.leases.carry_out(HoldOrder(LeaseId(lease), keys, ttl_s), self.now)
        if not keys and not ttl_s:
            self.leases.pop(lease, None)
            return
        kept = self.leases.pop(lease, (set(), 0.0))[0]
        kept |= {key for key in keys if (slot := self.live.get(key)) and slot.leased}
        if kept:
            self.leases[lease] = (kept, self.now + ttl_s)
        leased = [slot for key, slot in self.live.items() if self._is_leased(key)]
        assert all(slot.leased for slot in leased)
        assert sum(slot.extent.slot_bytes for slot in leased) <= 0.4 * 2 * EXTENT_BYTES

    @rule(owner=st.sampled_from(OWNERS[1:]))
    def a_client_dies(self, owner: str) -> None:
        self._expire()
        freed = set(self.table.release_owner(owner))
        for key, slot in list(self.live.items()):
            self._release(key, owner, 1 << 30)
            if slot.state is SlotState.WRITING and slot in freed:
                self._gone(slot)
                freed.remove(slot)
            elif slot.doomed:
                assert slot in self.pinned, "only pinned reservations outlive their owner"
                del self.live[key]
        assert not freed
        assert all(slot.owner != owner for slot in self.live.values())

    @rule(spare=st.booleans())
    def copy_down(self, spare: bool) -> None:
        """What the demoter does: the next block without a copy below, children first."""
        if not self.has_lower_tier:
            return
        slot = self.table.next_dirty()
        dirty = {k for k, s in self.live.items() if k not in self.clean}
        sealed = {k for k in dirty if self.live[k].state is SlotState.SEALED}
        free = {k for k in sealed if not any(self.live[c].block.parent == k for c in dirty)}
        if slot is None:
            assert not free, "a block without a copy was overlooked"
            return
        assert slot.block.key in free
        self.table.clean.mark(slot, spare=spare)
        self.clean.add(slot.block.key)

    @rule(name=st.sampled_from(NAMES))
    def the_copy_below_is_lost(self, name: str) -> None:
        slot = self.table.store.peek(block_key(name))
        if slot is not None:
            self.table.clean.unmark(slot)
            self.clean.discard(slot.block.key)

    @rule()
    def restart(self) -> None:
        """Sealed blocks come back in a new table, and nothing else."""
        sealed = self.table.store.sealed()
        rows = restored_rows(sealed)
        before = self.table
        self.table = new_table(self.policy, has_lower_tier=self.has_lower_tier)
        self.table.now = self.now
        sizes = before.extents.slot_sizes()
        refused = self.table.restore(sizes, rows, self._kept(), generation=before.generation)
        assert refused == []
        self.live = {}
        for slot in sealed:
            again = self.table.store.peek(slot.block.key)
            kept = replace(slot.block, outlook=NO_OUTLOOK)
            assert again is not None and again.block == kept, "the segment knows no hints"
            assert (again.index, again.generation) == (slot.index, slot.generation)
            self.live[slot.block.key] = again
        assert self.table.store.counts[SlotState.SEALED] == len(sealed)
        self.holds, self.pinned, self.clean, self.leases = {}, [], set(), {}

    def _kept(self) -> list[Slot]:
        return [Slot(s.index, s.generation, s.block, s.state) for s in self.quarantined]

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is not None and len(self.pinned) < 3:
            self.table.pin(slot)
            self.pinned.append(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        freed = self.table.unpin([slot])
        assert (freed == [slot]) == (slot.doomed and slot not in self.pinned)
        if freed:
            self._gone(slot)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        freed = self.table.drop(slot)
        assert (freed is slot) == (slot not in self.pinned)
        self._gone(slot)

    @rule(name=st.sampled_from(NAMES[:2]))
    def quarantine(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is None or slot.state is not SlotState.SEALED:
            return
        assert self.table.quarantine(slot.index, slot.generation) is slot
        self.quarantined.append(slot)
        del self.live[slot.block.key]
        self.holds.pop(slot.block.key, None)
        self.clean.discard(slot.block.key)
        self._not_leased(slot.block.key)

    @rule(step=st.sampled_from([0.5, 6.0, 30.0]))
    def wait(self, step: float) -> None:
        self.now += step
        self._expire()

    @invariant()
    def holds_together(self) -> None:
        self.table.check_invariants()
        places = [(slot.index, slot.generation) for slot in self.live.values()]
        assert len({index for index, _ in places}) == len(places), "a slot holds two blocks"
        for index, generation in places:
            assert self.table.get(index, generation) is not None
        for index, generation in self.dead:
            assert self.table.get(index, generation) is None, "an old reference came back"


@pytest.mark.parametrize("has_lower_tier", [True, False], ids=["above a disk", "alone"])
@pytest.mark.parametrize("policy", sorted(PRODUCTION_POLICIES))
def test_slots_under_any_policy(policy: str, has_lower_tier: bool) -> None:
    names = {"policy": policy, "has_lower_tier": has_lower_tier}
    run_state_machine_as_test(
        type("Machine", (SlotTableMachine,), names),
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
