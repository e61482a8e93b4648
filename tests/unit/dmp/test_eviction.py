from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_dmp import block_key, make_put
from tierkv.dmp.segment.slots import Slot
from tierkv.dmp.slots.eviction import SAME_USE_S
from tierkv.dmp.slots.slot_table import SlotTable
from tierkv.kvcore.block import BlockSpec, Expectation, Outlook
from tierkv.kvcore.block_event import HoldOrder, LeaseId
from tierkv.policies.eviction import BlockFacts, LeafLru

SLOT = 32 << 10


class Picky(LeafLru):
    """Leaf-LRU that wants only blocks of which something is expected, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[BlockFacts] = []

    def used(self, handle: int, facts: BlockFacts, now: float) -> None:
        self.told.append(facts)
        super().used(handle, facts, now)

    def admits(self, facts: BlockFacts, now: float) -> bool:
        return facts.outlook.expectation > Expectation.UNKNOWN


@pytest.fixture
def policy() -> Picky:
    return Picky()


@pytest.fixture
def table(policy: Picky) -> Iterator[SlotTable]:
    made = SlotTable(
        extent_count=2,
        extent_bytes=2 * SLOT,
        slots_per_extent=2,
        make_policy=lambda size, quota: policy,
        lease_share=0.5,
    )
    yield made
    made.check_invariants()


def small(name: str, parent: str | None = None, **changes: object) -> BlockSpec:
    return make_put(name, parent, range_bytes=1000, range_count=1, **changes)


def put(table: SlotTable, name: str, parent: str | None = None, **changes: object) -> Slot:
    decision = table.reserve(small(name, parent, **changes), deadline=1e9)
    assert decision is not None
    assert table.seal(decision.slot.index, decision.slot.generation, now=table.now)
    return decision.slot


def fill(table: SlotTable) -> None:
    for name in "abcd":
        put(table, name)


def test_a_block_worth_less_than_the_victim_is_refused_and_counted(table: SlotTable) -> None:
    fill(table)
    assert table.reserve(small("e"), deadline=1e9) is None
    assert (table.admission.refused_puts, table.alloc_failures, table.evicted_blocks) == (1, 0, 0)
    assert put(table, "f", expectation=Expectation.TURN)
    assert table.store.peek(block_key("a")) is None


def test_somebody_who_waits_for_a_block_gets_it(table: SlotTable) -> None:
    fill(table)
    assert table.reserve(small("e"), deadline=1e9, must=True) is not None
    assert table.reserve(small("f", expectation=Expectation.ROWS), deadline=1e9) is not None


def test_what_lies_behind_a_refused_block_is_refused(table: SlotTable) -> None:
    fill(table)
    assert table.reserve(small("e"), deadline=1e9) is None
    for name, parent in (("f", "e"), ("g", "f")):
        wanted = small(name, parent, expectation=Expectation.TURN)
        assert table.reserve(wanted, deadline=1e9) is None
    assert table.admission.refused_puts == 3
    put(table, "e", expectation=Expectation.TURN)
    put(table, "f", "e", expectation=Expectation.TURN)
    put(table, "g", "f", expectation=Expectation.TURN)


def test_an_announced_use_that_came_is_expected_no_more(table: SlotTable, policy: Picky) -> None:
    put(table, "a", expectation=Expectation.TURN, expected_in_s=2.0, depth=3, tail=True)
    put(table, "b", expectation=Expectation.ROWS)
    for _ in range(2):
        table.now += SAME_USE_S
        assert table.find(block_key("a")) and table.find(block_key("b"))
        assert table.find(block_key("a")), "the same use again"
    first, of_b, *later = policy.told
    assert first == BlockFacts(block_key("a"), None, Outlook(Expectation.TURN, 2.0, 3, tail=True))
    assert of_b.outlook.expectation is Expectation.ROWS
    assert [facts.outlook.expectation for facts in later] == [
        Expectation.UNKNOWN,
        Expectation.ROWS,
    ] * 2
    assert later[0].outlook.expected_in_s is None and later[0].outlook.depth == 3


def test_leases_keep_blocks_but_never_more_than_their_share(table: SlotTable) -> None:
    fill(table)
    keys = tuple(block_key(name) for name in "zabc")
    table.leases.carry_out(HoldOrder(LeaseId(7), keys, 10.0), 0.0)
    assert (table.leases.blocks, table.leases.refused) == (2, 1)
    for name in "efgh":
        put(table, name, expectation=Expectation.TURN)
    assert table.store.peek(block_key("a")) and table.store.peek(block_key("b"))
    table.leases.carry_out(HoldOrder(LeaseId(7), (), 30.0), 9.0)
    table.expire(38.9)
    assert table.leases.blocks == 2
    table.expire(39.0)
    assert table.leases.blocks == 0
    put(table, "i", expectation=Expectation.TURN)
    assert table.store.peek(block_key("a")) is None


def test_an_ended_lease_keeps_nothing_and_one_with_bad_bytes_neither(table: SlotTable) -> None:
    fill(table)
    bad = table.store.peek(block_key("b"))
    assert bad is not None
    table.leases.carry_out(HoldOrder(LeaseId(7), (block_key("a"), bad.block.key), 10.0), 0.0)
    table.quarantine(bad.index, bad.generation)
    assert table.leases.blocks == 1
    table.leases.carry_out(HoldOrder(LeaseId(7), (), 0.0), 1.0)
    assert table.leases.blocks == 0
    put(table, "e", expectation=Expectation.TURN)
    assert table.store.peek(block_key("a")) is None


def test_a_leased_block_keeps_its_extent_from_another_size(table: SlotTable) -> None:
    fill(table)
    table.leases.carry_out(HoldOrder(LeaseId(7), (block_key("a"),), 10.0), 0.0)
    decision = table.reserve(
        make_put("big", range_bytes=2 * SLOT - 8, range_count=1), deadline=1e9, must=True
    )
    assert decision is not None
    assert {victim.block.key for victim in decision.victims} == {block_key("c"), block_key("d")}


def test_what_was_read_while_somebody_looked_for_the_oldest_is_found_again() -> None:
    table = SlotTable(
        extent_count=2, extent_bytes=2 * SLOT, slots_per_extent=2, has_lower_tier=True
    )
    first, *others = [put(table, name) for name in "abcd"]
    table.now += SAME_USE_S
    table.pin_for_read(first)
    made = table.reserve(small("e"), deadline=1e9)
    assert made is not None and made.victims == (others[0],)
    table.unpin([first])
    table.check_invariants()
