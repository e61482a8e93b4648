"""The slot table against a naive model: same answers, no slot twice, children before parents."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dmp.extents import slot_bytes_for
from dmp.slot_table import SlotTable
from dmp.slots import Slot, SlotState
from kvcore.block_key import ROOT_PARENT
from kvcore.ids import BlockKey
from tests.fix_dmp import block_key, make_put

EXTENT_BYTES = 128 << 10
SIZES = (30_000, 50_000)
"""Slots of 32 KiB (four in an extent) and 52 KiB (two in an extent)."""

NAMES = [f"n{i:02}" for i in range(16)]


class SlotTableMachine(RuleBasedStateMachine):
    """The model: what is written, sealed, held and pinned, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(extent_count=2, extent_bytes=EXTENT_BYTES, slots_per_extent=4)
        self.now = 0.0
        self.live: dict[BlockKey, Slot] = {}
        self.parents: dict[BlockKey, BlockKey] = {}
        self.deadlines: dict[BlockKey, float] = {}
        self.holds: dict[BlockKey, tuple[int, float]] = {}
        self.pinned: list[Slot] = []
        self.dead: list[tuple[int, int]] = []

    def _gone(self, slot: Slot) -> None:
        key = slot.put.key
        if self.live.get(key) is slot:
            del self.live[key]
            self.holds.pop(key, None)
        self.dead.append((slot.index, slot.generation))

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

    @rule(
        name=st.sampled_from(NAMES),
        parent=st.sampled_from([None, *NAMES]),
        size=st.sampled_from(SIZES),
    )
    def reserve_one(self, name: str, parent: str | None, size: int) -> None:
        self.reserve(name, parent, size)

    def reserve(self, name: str, parent: str | None, size: int) -> None:
        self._expire()
        key = block_key(name)
        parent = parent if parent and parent < name else None
        parent_key = block_key(parent) if parent else ROOT_PARENT
        put = make_put(name, parent, range_bytes=size, range_count=1)
        before = dict(self.live)
        free_before = EXTENT_BYTES * 2 - self.table.extents.used_bytes
        decision = self.table.reserve(put, deadline=self.now + 10)
        if key in before:
            assert decision is None
            return
        if decision is None:
            self._assert_nothing_can_go(size, parent_key)
            return
        assert decision.slot.extent.slot_bytes == slot_bytes_for(size, 1)
        assert not decision.victims or free_before < EXTENT_BYTES * 2
        gone: set[BlockKey] = set()
        for victim in decision.victims:
            self._assert_evictable(victim, gone)
            gone.add(victim.put.key)
            self._gone(victim)
        assert parent_key not in gone
        self.live[key] = decision.slot

    def _assert_evictable(self, victim: Slot, gone: set[BlockKey]) -> None:
        key = victim.put.key
        assert self.live[key] is victim and victim.state is SlotState.SEALED
        assert key not in self.holds and victim not in self.pinned
        children = {k for k, s in self.live.items() if s.put.parent == key}
        assert children <= gone, "a parent went before its child"

    def _assert_nothing_can_go(self, size: int, parent: BlockKey) -> None:
        """No unused leaf of the same size is left; it would have been a victim."""
        for key, slot in self.live.items():
            same = self.table.extents.of(slot.index).slot_bytes == slot_bytes_for(size, 1)
            has_child = any(s.put.parent == key for s in self.live.values())
            busy = key in self.holds or slot in self.pinned or slot.state is not SlotState.SEALED
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
            del self.live[slot.put.key]
        else:
            assert freed is slot
            self._gone(slot)

    @rule(name=st.sampled_from(NAMES))
    def find(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        sealed = slot if slot is not None and slot.state is SlotState.SEALED else None
        assert self.table.find(block_key(name)) is sealed

    @rule(name=st.sampled_from(NAMES), ttl=st.sampled_from([1.0, 20.0]))
    def hold(self, name: str, ttl: float) -> None:
        self._expire()
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        held = self.table.hold(slot.index, slot.generation, until=self.now + ttl)
        assert held == (slot.state is SlotState.SEALED)
        if held:
            count, until = self.holds.get(slot.put.key, (0, 0.0))
            self.holds[slot.put.key] = (count + 1, max(until, self.now + ttl))

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        self._expire()
        slot = self.live.get(block_key(name))
        if slot is None:
            return
        self.table.release(slot.index, slot.generation)
        count, until = self.holds.pop(slot.put.key, (0, 0.0))
        if count > 1:
            self.holds[slot.put.key] = (count - 1, until)

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
        freed = self.table.unpin(slot)
        assert (freed is slot) == (slot.doomed and slot not in self.pinned)
        if freed is not None:
            self._gone(slot)

    @rule(name=st.sampled_from(NAMES[:2]))
    def quarantine(self, name: str) -> None:
        slot = self.live.get(block_key(name))
        if slot is None or slot.state is not SlotState.SEALED:
            return
        assert self.table.quarantine(slot.index, slot.generation) is slot
        del self.live[slot.put.key]
        self.holds.pop(slot.put.key, None)

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


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
