from __future__ import annotations

from collections.abc import Iterator

import pytest

from dmp.extents import slot_bytes_for
from dmp.slots import Slot, SlotState, SlotTable
from tests.fix_dmp import block_key, make_put

SLOT = 32 << 10


@pytest.fixture
def table() -> Iterator[SlotTable]:
    made = SlotTable(extent_count=2, extent_bytes=2 * SLOT, slots_per_extent=2)
    yield made
    made.check_invariants()


def put(table: SlotTable, name: str, parent: str | None = None, size: int = 1000) -> Slot:
    decision = table.reserve(make_put(name, parent, range_bytes=size, range_count=1), deadline=1e9)
    assert decision is not None
    assert table.seal(decision.slot.index, decision.slot.generation, now=0.0) is decision.slot
    return decision.slot


def victims_of(table: SlotTable, name: str, parent: str | None = None, size: int = 1000) -> list:
    decision = table.reserve(make_put(name, parent, range_bytes=size, range_count=1), deadline=1e9)
    assert decision is not None
    return [victim.put.key for victim in decision.victims]


def test_slot_sizes_are_whole_pages_and_hold_the_checksums() -> None:
    assert slot_bytes_for(1, 1) == SLOT
    assert slot_bytes_for(32_760, 1) == SLOT
    assert slot_bytes_for(32_761, 1) == SLOT + 4096
    assert slot_bytes_for(1 << 20, 32) == (32 << 20) + 4096


def test_leaves_go_first_and_parents_last(table: SlotTable) -> None:
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "c")):
        put(table, name, parent)
    order = []
    for name in ("w", "x", "y", "z"):
        order += victims_of(table, name)
    assert order == [block_key(n) for n in "dcba"]


def test_the_least_recently_used_leaf_goes(table: SlotTable) -> None:
    for name in "abcd":
        put(table, name)
    assert table.find(block_key("a")) is not None
    assert victims_of(table, "e") == [block_key("b")]


def test_a_parent_is_not_evicted_for_its_own_child(table: SlotTable) -> None:
    for name in "abcd":
        put(table, name)
    assert victims_of(table, "child", "a") == [block_key("b")]


def test_a_chain_longer_than_the_pool_is_refused_not_eaten(table: SlotTable) -> None:
    parent = None
    for name in "abcd":
        put(table, name, parent)
        parent = name
    too_much = table.reserve(make_put("e", "d", range_bytes=1000, range_count=1), deadline=1e9)
    assert too_much is None
    assert table.alloc_failures == 1
    assert all(table.find(block_key(n)) for n in "abcd")


def test_held_pinned_and_unsealed_blocks_stay(table: SlotTable) -> None:
    held, pinned = put(table, "held"), put(table, "pinned")
    assert table.hold(held.index, held.generation, until=10.0)
    table.pin(pinned)
    writing = table.reserve(make_put("writing", range_bytes=1000, range_count=1), deadline=1e9)
    assert writing is not None
    put(table, "plain")
    assert victims_of(table, "next") == [block_key("plain")]
    assert table.reserve(make_put("more", range_bytes=1, range_count=1), deadline=1e9) is None
    table.unpin(pinned)
    assert victims_of(table, "more") == [block_key("pinned")]
    assert table.expire(11.0) == []
    assert victims_of(table, "again") == [block_key("held")]


def test_an_expired_pinned_slot_is_freed_with_its_last_pin(table: SlotTable) -> None:
    decision = table.reserve(make_put("a"), deadline=5.0)
    assert decision is not None
    slot = decision.slot
    table.pin(slot)
    assert table.expire(5.0) == []
    assert table.get(slot.index, slot.generation) is None
    assert table.extents.used_bytes > 0
    assert table.unpin(slot) is slot
    assert table.extents.used_bytes == 0


def test_an_empty_extent_changes_its_size(table: SlotTable) -> None:
    for name in "abcd":
        put(table, name)
    assert table.extents.slots_total == 4
    assert set(victims_of(table, "big", size=2 * SLOT - 8)) == {block_key("a"), block_key("b")}
    assert table.extents.slots_total == 3


def test_another_size_takes_the_coldest_extent_with_its_descendants(table: SlotTable) -> None:
    put(table, "a")
    put(table, "b")
    put(table, "c", "a")
    put(table, "d")
    victims = victims_of(table, "big", size=2 * SLOT - 8)
    assert set(victims) == {block_key("a"), block_key("b"), block_key("c")}
    assert victims.index(block_key("c")) < victims.index(block_key("a"))


def test_a_quarantined_slot_is_never_used_again(table: SlotTable) -> None:
    bad = put(table, "bad")
    assert table.quarantine(bad.index, bad.generation) is bad
    assert table.find(block_key("bad")) is None
    for i in range(10):
        assert put(table, f"n{i}").index != bad.index


def test_generations_never_repeat(table: SlotTable) -> None:
    seen = set()
    for i in range(20):
        slot = put(table, f"n{i}")
        seen.add((slot.index, slot.generation))
    assert len(seen) == 20


def test_restore_keeps_one_copy_of_a_block(table: SlotTable) -> None:
    one = Slot(0, 3, make_put("a", range_bytes=1, range_count=1), SlotState.SEALED)
    two = Slot(1, 7, make_put("a", range_bytes=1, range_count=1), SlotState.SEALED)
    assert table.restore([3, 7, 0, 0], [SLOT, 0], [one, two]) == [two]
    assert table.sealed() == [one]
