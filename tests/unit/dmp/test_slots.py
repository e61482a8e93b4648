from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.fix_dmp import block_key, dirty_bytes, make_put
from tierkv.dmp.segment.geometry import SLOT_DTYPE
from tierkv.dmp.segment.restored import RestoredSlots
from tierkv.dmp.segment.slots import Slot, slot_bytes_for
from tierkv.dmp.slots.eviction import SAME_USE_S
from tierkv.dmp.slots.slot_table import SlotTable

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
    return [victim.block.key for victim in decision.victims]


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
    table.now = SAME_USE_S
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
    table.unpin([pinned])
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
    assert table.unpin([slot]) == [slot]
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


def restored(*names: tuple[int, int, str]) -> RestoredSlots:
    """Slots as a segment gives them back: number, generation, block; oldest first."""
    rows = np.zeros(8, SLOT_DTYPE)
    for index, generation, name in names:
        wanted = make_put(name, range_bytes=1, range_count=1)
        rows[index]["generation"] = generation
        rows[index]["key"], rows[index]["parent"] = wanted.key, wanted.parent
        rows[index]["range_bytes"], rows[index]["range_count"] = 1, 1
        rows[index]["tokens"] = wanted.tokens
        rows[index]["names"] = wanted.owner.model.encode(), wanted.owner.tenant.encode()
    indices = np.array([index for index, _, _ in names])
    return RestoredSlots.of(indices, rows[indices])


def test_restore_keeps_one_copy_of_a_block(table: SlotTable) -> None:
    rows = restored((0, 3, "a"), (2, 5, "b"), (1, 7, "a"))
    assert table.restore([SLOT, SLOT], rows, [], generation=9) == [1]
    assert [(s.index, s.generation, s.block) for s in table.store.sealed()] == [
        (0, 3, make_put("a", range_bytes=1, range_count=1)),
        (2, 5, make_put("b", range_bytes=1, range_count=1)),
    ]
    assert put(table, "c").generation == 10


def test_restored_blocks_go_oldest_seal_first(table: SlotTable) -> None:
    rows = restored((3, 1, "a"), (0, 2, "b"), (2, 3, "c"), (1, 4, "d"))
    assert table.restore([SLOT, SLOT], rows, [], generation=4) == []
    assert table.find(block_key("b")) is not None
    order = []
    for name in ("w", "x", "y", "z"):
        order += victims_of(table, name)
    assert order == [block_key(n) for n in "acdb"]


def test_restored_families_are_known_when_another_size_asks(table: SlotTable) -> None:
    rows = restored((0, 1, "a"), (1, 2, "b"), (2, 3, "c"), (3, 4, "d"))
    table.restore([SLOT, SLOT], rows, [], generation=4)
    victims = victims_of(table, "big", size=2 * SLOT - 8)
    assert set(victims) == {block_key("a"), block_key("b")}


def test_a_dead_owner_keeps_nothing_and_others_keep_theirs(table: SlotTable) -> None:
    held = put(table, "held")
    assert table.hold(held.index, held.generation, until=10.0, owner="dead")
    assert table.hold(held.index, held.generation, until=10.0, owner="alive")
    wanted = make_put("a", range_bytes=1, range_count=1)
    decision = table.reserve(wanted, deadline=1e9, owner="dead")
    assert decision is not None
    assert table.release_owner("dead") == [decision.slot]
    assert held.holders == {"alive": 1}
    assert table.release_owner("dead") == []
    table.release(held.index, held.generation, owner="dead")
    assert held.holders == {"alive": 1}, "one owner can't release another's hold"


@pytest.fixture
def tiered() -> Iterator[SlotTable]:
    made = SlotTable(extent_count=2, extent_bytes=2 * SLOT, slots_per_extent=2, has_lower_tier=True)
    yield made
    made.check_invariants()


def test_blocks_go_down_in_the_order_of_eviction(tiered: SlotTable) -> None:
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None)):
        put(tiered, name, parent)
    order = []
    while (slot := tiered.next_dirty()) is not None:
        order.append(slot.block.key)
        tiered.clean.mark(slot)
    assert order == [block_key(n) for n in "cbad"]
    assert dirty_bytes(tiered) == 0


def test_a_copied_block_that_is_used_is_no_reserve_any_more(tiered: SlotTable) -> None:
    a, b = put(tiered, "a"), put(tiered, "b")
    assert tiered.exposed_bytes == dirty_bytes(tiered) == 2 * a.extent.slot_bytes
    tiered.clean.mark(a)
    assert tiered.exposed_bytes == a.extent.slot_bytes
    tiered.clean.mark(b, spare=False)  # It was just brought up.
    assert (tiered.exposed_bytes, dirty_bytes(tiered)) == (b.extent.slot_bytes, 0)
    assert tiered.find(a.block.key) is a
    assert tiered.exposed_bytes == 2 * a.extent.slot_bytes


def test_a_block_whose_copy_below_is_lost_goes_down_again(tiered: SlotTable) -> None:
    a = put(tiered, "a")
    tiered.clean.mark(a)
    assert tiered.next_dirty() is None
    tiered.clean.unmark(a)
    assert tiered.next_dirty() is a


def test_a_dirty_child_keeps_its_parent_above(tiered: SlotTable) -> None:
    a = put(tiered, "a")
    tiered.clean.mark(a)
    b = put(tiered, "b", "a")
    assert tiered.next_dirty() is b
    tiered.clean.unmark(a)
    assert tiered.next_dirty() is b
    tiered.clean.mark(b)
    assert tiered.next_dirty() is a


def test_a_workload_that_only_promotes_leaves_no_queue_behind() -> None:
    table = SlotTable(
        extent_count=2, extent_bytes=2 * SLOT, slots_per_extent=2, has_lower_tier=True
    )
    for number in range(2_000):
        table.clean.mark(put(table, f"n{number}"))
    queues = (table._order.leaves, table.clean._dirty)
    assert all(len(lane) < 200 for q in queues if q is not None for lane in q._lanes.values())
    table.check_invariants()


def test_deadlines_that_count_no_more_are_forgotten(table: SlotTable) -> None:
    kept = put(table, "kept")
    assert table.hold(kept.index, kept.generation, until=5e8, owner="a")
    for number in range(5_000):
        slot = put(table, f"n{number}")
        assert table.hold(slot.index, slot.generation, until=1e9, owner="a")
        table.release(slot.index, slot.generation, owner="a")
    assert len(table._deadlines) < 2_000
    assert kept.holders
    table.expire(5e8)
    assert not kept.holders, "what counts is still looked at"


def test_a_block_can_not_be_its_own_ancestor(table: SlotTable) -> None:
    put(table, "a", "c")
    put(table, "b", "a")
    assert table.reserve(make_put("c", "b", range_bytes=1000, range_count=1), deadline=1e9) is None
    put(table, "c", "d")
    order = []
    for name in ("w", "x", "y", "z"):
        order += victims_of(table, name)
    assert order == [block_key(name) for name in "bac"], "a chain goes, a ring never would"
