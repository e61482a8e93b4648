"""Namespaces with quotas in one slot table: whatever happens, the ledger equals a recount.

The machine is that of the slot table (tests/property/test_slot_table.py), with tenants, quotas that
come, change and go, with policies and versions, and blocks that nobody uses.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from tests.fix_dmp import block_key, make_put
from tests.property.test_slot_table import NAMES, SlotTableMachine, new_table
from tierkv.dmp.segment.slots import Slot, SlotState, slot_bytes_for
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.ids import scope_of_version
from tierkv.policies.select import NAMESPACE_POLICIES

SIZE = slot_bytes_for(30_000, 1)
TEAMS = {"red": frozenset({"ann", "bob"}), "blue": frozenset({"cyd"})}
TENANTS = ("ann", "bob", "cyd", "dan")


class QuotaMachine(SlotTableMachine):
    """The model: what each tenant stored, and what its namespace may keep."""

    policy = "leaf_lru"
    has_lower_tier = False

    def __init__(self) -> None:
        super().__init__()
        self.quotas: dict[str, Quota] = {}

    def tenant_of(self, name: str) -> str:
        return TENANTS[NAMES.index(name) % len(TENANTS)]

    @rule()
    def restart(self) -> None:
        """A node has its quotas obeyed from the start (dmp/node/state.py::attach)."""
        super().restart()
        self.table.quotas.set(list(self.quotas.values()), self.now)
        self._collect()

    @rule()
    def tick(self) -> None:
        """Blocks of older versions go, all that may."""
        for _ in range(len(NAMES)):
            self.table.quotas.remove_outdated()
            self._collect()
        for quota in self.quotas.values():
            if quota.version:
                assert not self._own_leaves(quota), "the blocks have no version"

    @rule(
        team=st.sampled_from(sorted(TEAMS)),
        slots=st.integers(0, 5),
        ttl_s=st.sampled_from([0.0, 0.0, 5.0]),
        evicts=st.booleans(),
        exists=st.sampled_from([True, True, False]),
        eviction=st.sampled_from(["", *NAMESPACE_POLICIES]),
        version=st.sampled_from(["", "", "r2"]),
    )
    def quota(
        self, team: str, slots: int, ttl_s: float, evicts: bool, exists: bool, eviction: str,
        version: str,
    ) -> None:  # fmt: skip
        self._expire()
        self.quotas.pop(team, None)
        if exists:
            self.quotas[team] = Quota(
                team, TEAMS[team], slots * SIZE, ttl_s, evicts, eviction, version
            )
        self.table.quotas.set(list(self.quotas.values()), self.now)
        self._collect()
        for account in self.table.accounts:
            quota = account.quota
            if quota.capacity_bytes and account.used_bytes > quota.capacity_bytes:
                assert not self._own_leaves(quota), "a leaf could have gone"

    def _own_leaves(self, quota: Quota) -> list[Slot]:
        """Return the blocks of a namespace that may be evicted."""
        parents = {slot.block.parent for slot in self.live.values()}
        return [
            slot
            for key, slot in self.live.items()
            if slot.block.owner.tenant in quota.tenants
            and slot.state is SlotState.SEALED
            and key not in parents and key not in self.holds and slot not in self.pinned
            and not self._is_leased(key)
        ]  # fmt: skip

    def _assert_nothing_can_go(self, size: int, parent: object) -> None:
        """Leave that to the machine without quotas: here, other accounts may have leaves."""

    @invariant()
    def the_ledger_is_a_recount(self) -> None:
        for account in self.table.accounts:
            own = [
                slot for slot in self.table.store.all()
                if slot.block.owner.tenant in account.quota.tenants
                and slot.state is not SlotState.QUARANTINED
            ]  # fmt: skip
            assert account.used_bytes == sum(slot.extent.slot_bytes for slot in own)
            assert account.blocks == len(own)


def test_quotas_whatever_happens() -> None:
    run_state_machine_as_test(
        QuotaMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def put(table: SlotTable, name: str, tenant: str, parent: str | None = None) -> Slot | None:
    """Store a block; return its slot, or None."""
    block = make_put(name, parent, range_bytes=30_000, range_count=1, tenant=tenant)
    decision = table.reserve(block, deadline=1e9)
    if decision is None:
        return None
    assert table.seal(decision.slot.index, decision.slot.generation, now=table.now)
    return decision.slot


def names(table: SlotTable, *among: str) -> list[str]:
    return [name for name in among if table.store.find(block_key(name)) is not None]


def with_quota(**quota: object) -> SlotTable:
    table = new_table("leaf_lru", has_lower_tier=False)
    table.quotas.set([Quota("red", TEAMS["red"], **quota)], 0.0)  # type: ignore[arg-type]
    return table


def test_who_is_over_its_quota_loses_its_own_oldest_leaf_and_nobody_else_anything() -> None:
    table = with_quota(capacity_bytes=2 * SIZE)
    for name, tenant in (("x", "dan"), ("a1", "ann"), ("a2", "bob"), ("a3", "ann"), ("y", "dan")):
        assert put(table, name, tenant) is not None
    assert names(table, "x", "a1", "a2", "a3", "y") == ["x", "a2", "a3", "y"]
    (account,) = table.accounts
    assert (account.used_bytes, account.blocks, account.evicted_for_quota) == (2 * SIZE, 2, 1)


def test_a_salted_request_counts_for_its_tenant() -> None:
    table = with_quota(capacity_bytes=SIZE)
    put(table, "a1", "ann")
    put(table, "a2", "ann:salt-0123")
    assert names(table, "a1", "a2") == ["a2"]


@pytest.mark.parametrize(
    ("eviction", "gone"), [("fifo", "abc"), ("lru", "bcd"), ("lfu", "bcd"), ("leaf_lru", "bcd")]
)
def test_a_namespace_has_a_policy_of_its_own(eviction: str, gone: str) -> None:
    table = with_quota(capacity_bytes=4 * SIZE, eviction=eviction)
    for name in "abcd":
        put(table, name, "ann")
    table.now = 5.0
    assert table.find(block_key("a")) is not None  # A use that only FIFO ignores.
    for name in "xyz":
        table.now += 5.0
        put(table, name, "ann")
        assert table.find(block_key(name)) is not None
    assert "".join(sorted(set("abcd") - set(names(table, *"abcd")))) == gone


def test_a_ttl_policy_stores_nothing_while_all_blocks_are_young() -> None:
    table = with_quota(capacity_bytes=2 * SIZE, eviction="ttl", ttl_s=60.0)
    for name in "ab":
        put(table, name, "ann")
    table.now = 30.0
    assert put(table, "c", "ann") is None
    table.now = 70.0
    assert put(table, "c", "ann") is not None and names(table, *"abc") in (["a", "c"], ["b", "c"])


def test_another_policy_takes_over_the_blocks_that_are_there() -> None:
    table = with_quota(capacity_bytes=3 * SIZE, eviction="fifo")
    for name in "abc":
        table.now += 5.0
        put(table, name, "ann")
    table.now += 5.0
    table.find(block_key("a"))
    table.quotas.set([Quota("red", TEAMS["red"], 3 * SIZE, eviction="lru")], table.now)
    table.check_invariants()
    put(table, "d", "ann")
    assert names(table, *"abcd") == ["a", "c", "d"]


def test_blocks_of_an_older_version_go_children_first_and_are_not_stored_again() -> None:
    old, new = scope_of_version("ann", "r1"), scope_of_version("ann", "r2")
    table = with_quota(version="r1")
    for name, parent in (("a", None), ("b", "a"), ("c", "b")):
        put(table, name, old, parent)
    put(table, "x", "dan")
    kept = table.store.find(block_key("c"))
    assert kept is not None and table.hold(kept.index, kept.generation, until=50.0)
    table.quotas.set([Quota("red", TEAMS["red"], version="r2")], 1.0)
    assert put(table, "late", old) is None and put(table, "n", new) is not None
    while table.quotas.remove_outdated():
        """Children first."""
    assert names(table, *"abcnx") == ["a", "b", "c", "n", "x"], "a reader holds the last one"
    table.expire(51.0)
    while table.quotas.remove_outdated():
        """All of them."""
    assert names(table, *"abcnx") == ["n", "x"]
    (account,) = table.accounts
    assert (account.evicted_for_version, account.blocks, account.refused) == (3, 1, 1)
    gone = [slot.block.key for slot in table.quotas.take_removed()]
    assert gone == [block_key(name) for name in "cba"]
    table.check_invariants()


def test_a_salted_block_has_the_version_of_its_tenant() -> None:
    salted = "ann:salt-0123"
    table = with_quota(version="r1")
    assert put(table, "a", salted) is None
    assert put(table, "a", scope_of_version(salted, "r1")) is not None


def test_who_refuses_when_full_keeps_what_is_there() -> None:
    table = with_quota(capacity_bytes=2 * SIZE, evicts=False)
    stored = [put(table, name, "ann") is not None for name in ("a1", "a2", "a3")]
    assert stored == [True, True, False] and names(table, "a1", "a2", "a3") == ["a1", "a2"]
    (account,) = table.accounts
    assert account.refused == 1


def test_a_namespace_of_one_model_counts_only_blocks_of_the_model() -> None:
    table = new_table("leaf_lru", has_lower_tier=False)

    def store(name: str, model: str, tenant: str = "ann") -> None:
        block = make_put(name, range_bytes=30_000, range_count=1, tenant=tenant, model=model)
        decision = table.reserve(block, deadline=1e9)
        assert decision is not None
        assert table.seal(decision.slot.index, decision.slot.generation, now=table.now)

    for name, model in (("a", "large"), ("b", "small"), ("c", "large")):
        store(name, model)
    own = Quota("own", frozenset({"ann"}), SIZE, model="large")
    team = Quota("team", TEAMS["red"], version="r1")
    table.quotas.set([own, team], 1.0)
    assert names(table, *"abc") == ["b", "c"], "its oldest block, beyond its capacity"
    assert {a.quota.name: a.blocks for a in table.accounts} == {"own": 1, "team": 1}
    store("d", "large", "ann:salt-0123")
    assert names(table, *"bcd") == ["b", "d"], "without the version of the other namespace"
    while table.quotas.remove_outdated():
        """The block of the other namespace has no version."""
    assert names(table, *"bd") == ["d"]
    table.check_invariants()
    table.quotas.set([team], 2.0)
    assert {a.quota.name: a.blocks for a in table.accounts} == {"team": 1}
    table.check_invariants()


def test_a_block_larger_than_the_quota_evicts_nothing() -> None:
    table = with_quota(capacity_bytes=SIZE)
    put(table, "a1", "ann")
    large = make_put("a2", range_bytes=50_000, range_count=1, tenant="ann")
    assert table.reserve(large, deadline=1e9) is None
    assert names(table, "a1") == ["a1"]


def test_memory_that_ends_is_taken_from_who_uses_most_of_what_it_may() -> None:
    table = with_quota(capacity_bytes=4 * SIZE)
    for number in range(2):
        put(table, f"a{number}", "ann")
    for number in range(6):
        put(table, f"x{number}", "dan")  # The others' six slots of the node's eight.
    assert put(table, "a2", "ann") is not None
    assert names(table, "a0", "a1", "a2") == ["a0", "a1", "a2"]
    assert len(names(table, *(f"x{n}" for n in range(6)))) == 5


def test_a_lowered_quota_takes_effect_at_once_and_a_dropped_one_frees_the_name() -> None:
    table = with_quota(capacity_bytes=4 * SIZE)
    for number in range(4):
        put(table, f"a{number}", "ann")
    table.quotas.set([Quota("red", TEAMS["red"], SIZE)], 1.0)
    assert {slot.block.key for slot in table.quotas.take_removed()} == {
        block_key(f"a{number}") for number in range(3)
    }
    table.quotas.set([], 2.0)
    assert len(table.accounts) == 0 and names(table, "a3") == ["a3"]
    for number in range(9):
        put(table, f"b{number}", "ann")
    table.check_invariants()


def test_unused_blocks_end_children_first_and_used_ones_stay() -> None:
    table = with_quota(ttl_s=10.0)
    table.now = 100.0
    put(table, "a1", "ann")
    put(table, "a2", "ann", "a1")
    put(table, "a3", "ann")
    put(table, "x", "dan")
    table.now = 106.0
    assert table.find(block_key("a3")) is not None
    table.expire(112.5)
    table.expire(114.0)
    assert names(table, "a1", "a2", "a3", "x") == ["a3", "x"]
    gone = [slot.block.key for slot in table.quotas.take_removed()]
    assert gone == [block_key("a2"), block_key("a1")]
    held = table.store.find(block_key("a3"))
    assert held is not None
    table.now = 115.0
    table.hold(held.index, held.generation, until=200.0)
    table.expire(150.0)
    assert names(table, "a3") == ["a3"]  # A reader's hold outlives the time.
    table.expire(201.0)
    table.expire(203.0)
    assert names(table, "a3") == []


def test_uses_of_a_namespaces_blocks_are_counted_once_a_second() -> None:
    table = with_quota(capacity_bytes=3 * SIZE)
    own = put(table, "a", min(TEAMS["red"]))
    assert own is not None and put(table, "b", "stranger") is not None
    (account,) = table.accounts
    assert account.hits == 0
    for table.now in (5.0, 5.5, 7.0):
        assert table.find(block_key("a")) is own and table.find(block_key("b")) is not None
        table.pin_for_read(own)
        table.unpin([own])
    assert account.hits == 2
