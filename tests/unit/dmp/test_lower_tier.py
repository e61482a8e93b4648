from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fix_dmp import (
    RANGE_BYTES,
    Rig,
    block_key,
    dirty_bytes,
    fetch,
    make_put,
    make_range,
    store,
)
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.slots.accounts import REST_AFTER_S, Quota
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import BlockRemoved, BlockStored
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import BlockNotFoundError, ChecksumError, PoolFullError, TransportError
from tierkv.kvcore.ids import scope_of_version
from tierkv.kvcore.node import TierStats
from tierkv.storage.l4 import L4Store

MakeRig = Callable[..., Rig]
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Callable[[], L4Store]:
    return lambda: L4Store.open(tmp_path / "disk", capacity_bytes=8 * MIB)


def tier_of(node: DmpNode, tier: Tier) -> TierStats:
    (found,) = [stats for stats in node.reports.report().tiers if stats.tier is tier]
    return found


def wait_until(done: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not done():  # pytest-timeout is the deadline
        pause.wait(0.005)


def fill(rig: Rig, count: int, *, prefix: str = "n") -> InprocPoolNode:
    """Store independent blocks one by one, each copied down before the next comes."""
    pool = InprocPoolNode(rig.node)
    for i in range(count):
        store(pool, f"{prefix}{i}")
        wait_until(lambda: dirty_bytes(rig.node._state.table) <= 1 * MIB // 2)
    return pool


def whole(name: str) -> list[bytes]:
    return [make_range(name, 0), make_range(name, 1)]


def test_what_memory_has_no_room_for_comes_back_from_disk(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.5)
    pool = fill(rig, 40)
    keys = [block_key(f"n{i}") for i in range(40)]
    assert pool.lookup(keys)[:20] == [None] * 20, "twenty slots hold the youngest twenty"
    for i in range(20):
        (place,) = pool.promote(keys[i : i + 1])
        assert place is not None
        assert fetch(pool, place) == whole(f"n{i}")
    assert tier_of(rig.node, Tier.L4).promoted_blocks == 20
    assert tier_of(rig.node, Tier.L2).demoted_blocks >= 20
    assert tier_of(rig.node, Tier.L4).read_bytes == 20 * 2 * RANGE_BYTES
    stats = pool.stats()
    assert (stats.disk.promoted_blocks, stats.disk.alloc_failures) == (20, 0)
    assert stats.disk.blocks_used >= 20 and stats.disk.used_bytes > 20 * 2 * RANGE_BYTES
    assert stats.memory == tier_of(rig.node, Tier.L2)
    assert pool.promote([block_key("never")]) == [None]


def test_what_comes_up_pushes_nothing_out_that_has_no_copy(make_rig: MakeRig, disk) -> None:
    # By age alone, so that each block that is asked for has been evicted and comes up again.
    rig = make_rig(open_lower=disk, demote_above=0.8, eviction_policy="leaf_lru")
    pool, state = InprocPoolNode(rig.node), rig.node._state

    def settled() -> bool:
        with state.lock:
            return state.table.exposed_bytes <= 0.8 * MIB or state.table.next_dirty() is None

    for i in range(60):
        store(pool, f"n{i}")
        wait_until(settled)
    for i in range(60):
        (place,) = pool.promote([block_key(f"n{i}")])
        assert place is not None, f"n{i} was pushed out by blocks that have a copy"
        assert fetch(pool, place) == whole(f"n{i}")
        wait_until(settled)


def test_the_directory_hears_what_rests_and_the_inventory_agrees(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.5)
    fill(rig, 40)
    known: dict[tuple[bytes, Tier], BlockStored] = {}
    for event in rig.journal.events:
        if isinstance(event, BlockStored):
            known[event.key, event.tier] = event
        else:
            known.pop((event.key, event.tier))
    assert known == {(stored.key, stored.tier): stored for stored in rig.node.reports.inventory()}
    resting = [stored for (_, tier), stored in known.items() if tier is Tier.L4]
    assert len(resting) >= 20 and all(stored.location is None for stored in resting)


def test_a_restart_without_memory_still_knows_the_disk(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.0)
    fill(rig, 10)
    wait_until(lambda: dirty_bytes(rig.node._state.table) == 0)
    rig.stop()
    rig.node.config.segment_file.unlink()
    rig = make_rig(open_lower=disk)
    assert {stored.tier for stored in rig.node.reports.inventory()} == {Tier.L4}
    pool = InprocPoolNode(rig.node)
    for i, place in enumerate(pool.promote([block_key(f"n{i}") for i in range(10)])):
        assert place is not None and fetch(pool, place) == whole(f"n{i}")


def test_a_restart_with_memory_copies_nothing_twice(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.0)
    fill(rig, 10)
    wait_until(lambda: dirty_bytes(rig.node._state.table) == 0)
    rig.restart()
    wait_until(lambda: dirty_bytes(rig.node._state.table) == 0)
    assert tier_of(rig.node, Tier.L2).demoted_blocks == 0
    assert tier_of(rig.node, Tier.L4).write_bytes == 0


class Tampered:
    """A lower tier whose puts and gets a test can change."""

    def __init__(self, inner: L4Store) -> None:
        self.inner = inner
        self.before_put: Callable[[], None] = lambda: None
        self.before_get: Callable[[], None] = lambda: None
        self.after_put: Callable[[], None] = lambda: None
        self.after_get: Callable[[memoryview], None] = lambda destination: None
        self.gets = 0

    def put(self, block, payload, **options) -> None:
        self.before_put()
        self.inner.put(block, payload, **options)
        self.after_put()

    def get_block(self, key, destination) -> bytes:
        self.gets += 1
        self.before_get()
        sums = self.inner.get_block(key, destination)
        self.after_get(destination)
        return sums

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


@pytest.fixture
def tampered(disk) -> Tampered:
    return Tampered(disk())


def opener(tier: Tampered) -> Callable[[], LowerTier]:
    return lambda: tier


def test_one_read_serves_all_who_ask_at_the_same_time(make_rig: MakeRig, tampered) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=0.5)
    pool = fill(rig, 40)
    gate = threading.Event()
    tampered.before_get = lambda: gate.wait(30) and None
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(pool.promote, [block_key("n0")]) for _ in range(8)]
        wait_until(lambda: tampered.gets == 1)
        gate.set()
        places = [future.result()[0] for future in asked]
    assert places[0] is not None and len(set(places)) == 1
    assert tampered.gets == 1
    assert fetch(pool, places[0]) == whole("n0")


def test_a_slow_disk_is_a_miss_and_the_block_is_there_later(make_rig: MakeRig, tampered) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=0.5, promote_timeout_s=0.05)
    pool = fill(rig, 40)
    gate = threading.Event()
    tampered.before_get = lambda: gate.wait(30) and None
    assert pool.promote([block_key("n0")]) == [None]
    gate.set()
    wait_until(lambda: pool.lookup([block_key("n0")]) != [None])


@pytest.mark.parametrize("error", [TransportError("EIO"), BlockNotFoundError("gone")])
def test_a_failed_read_is_a_miss_and_leaves_no_slot(make_rig: MakeRig, tampered, error) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=0.5)
    pool = fill(rig, 40)

    def fail() -> None:
        raise error

    tampered.before_get = fail
    assert pool.promote([block_key("n0"), block_key("n39")])[0] is None
    assert rig.node.reports.stats().slots_writing == 0


def test_a_full_disk_costs_blocks_but_no_reservation(make_rig: MakeRig, tampered) -> None:
    def full() -> None:
        raise PoolFullError("no space left on device")

    tampered.before_put = full
    rig = make_rig(open_lower=opener(tampered), demote_above=0.5)
    pool = InprocPoolNode(rig.node)
    for i in range(40):
        store(pool, f"n{i}")
    assert pool.promote([block_key("n0")]) == [None]
    assert rig.node.reports.stats().memory.blocks_used == 20


def test_a_block_that_leaves_the_disk_is_reported_and_goes_down_again(
    make_rig: MakeRig, disk
) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.0)
    pool = InprocPoolNode(rig.node)
    store(pool, "a")
    wait_until(lambda: dirty_bytes(rig.node._state.table) == 0)
    assert rig.node.demoter is not None and rig.node._lower is not None
    rig.node._lower.delete(block_key("a"))
    rig.node.demoter.gone_below([block_key("a")])
    assert rig.journal.events[-1] == BlockRemoved(block_key("a"), Tier.L4)
    rig.node.demoter.wake()
    wait_until(lambda: rig.node._lower.find(block_key("a")) is not None)


def test_a_lower_tier_that_can_not_be_opened_gives_the_segment_back(make_rig: MakeRig) -> None:
    def broken() -> LowerTier:
        raise TransportError("no disk")

    with pytest.raises(TransportError):
        make_rig(open_lower=broken)
    make_rig()


def spoil(rig: Rig, name: str) -> None:
    """Write over one byte of a sealed block, as failing memory or a late writer would."""
    slot = rig.node._state.table.store.peek(block_key(name))
    assert slot is not None
    rig.node.segment.span(slot.offset, 5, 6)[0] ^= 0xFF


def test_bad_bytes_never_go_down_with_good_checksums(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=1.0)
    pool = InprocPoolNode(rig.node)
    store(pool, "a")
    spoil(rig, "a")
    assert rig.node.demoter is not None and rig.node._lower is not None
    while rig.node.demoter.demote_one(limit_bytes=0):
        pass
    assert rig.node._lower.find(block_key("a")) is None
    assert rig.node.reports.stats().quarantined_slots == 1
    assert pool.promote([block_key("a")]) == [None]


def test_bytes_spoilt_while_they_go_down_are_refused_on_the_way_up(
    make_rig: MakeRig, tampered
) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=1.0)
    pool = InprocPoolNode(rig.node)
    store(pool, "a")
    tampered.before_put = lambda: spoil(rig, "a")
    assert rig.node.demoter is not None
    assert rig.node.demoter.demote_one(limit_bytes=0)
    rig.node.scrubber.run_round()
    assert pool.promote([block_key("a")]) == [None]


def test_bytes_spoilt_while_they_come_up_never_get_good_checksums(
    make_rig: MakeRig, tampered
) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=0.5)
    pool = fill(rig, 40)

    def spoil_slot(destination: memoryview) -> None:
        destination[7] ^= 0xFF

    tampered.after_get = spoil_slot
    (place,) = pool.promote([block_key("n0")])
    assert place is not None
    with pytest.raises(ChecksumError):
        fetch(pool, place)


def test_a_copy_that_is_gone_before_it_is_noted_is_no_copy(make_rig: MakeRig, tampered) -> None:
    rig = make_rig(open_lower=opener(tampered), demote_above=1.0)
    pool = InprocPoolNode(rig.node)
    store(pool, "a")
    demoter = rig.node.demoter
    assert demoter is not None

    def lose() -> None:
        tampered.inner.delete(block_key("a"))
        demoter.gone_below([block_key("a")])

    tampered.after_put = lose
    assert demoter.demote_one(limit_bytes=0)
    slot = rig.node._state.table.store.peek(block_key("a"))
    assert slot is not None and not slot.clean
    assert rig.journal.events[-1] == BlockRemoved(block_key("a"), Tier.L4)


def test_an_impossible_block_from_below_is_a_miss(make_rig: MakeRig, tampered) -> None:
    rig = make_rig(open_lower=opener(tampered))
    claimed = make_put("odd", tokens=1 << 31)
    tampered.find = lambda key: claimed
    assert InprocPoolNode(rig.node).promote([claimed.key]) == [None]
    assert rig.node.reports.stats().slots_writing == 0


def test_a_namespace_keeps_to_its_part_of_the_disk_and_loses_its_own_copies(
    make_rig: MakeRig, disk
) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.0)
    pool = InprocPoolNode(rig.node)
    share = 6 * make_put("r0").ranges.payload_bytes
    rig.node.set_quotas([Quota("red", frozenset({"ann"}), disk_capacity_bytes=share)])
    lower = rig.node._lower
    assert lower is not None
    for name in (f"{who}{i}" for i in range(30) for who in "rx"):
        store(pool, name, tenant="ann" if name[0] == "r" else "dan")
        wait_until(lambda: lower.find(block_key(name)) is not None)  # noqa: B023

    def used() -> tuple[int, int]:
        ((red),) = rig.node.reports.report().namespaces
        return red.disk_used_bytes, red.evicted_from_disk

    wait_until(lambda: used() == (share, 24))
    red = [block for block in lower.blocks() if block.owner.tenant == "ann"]
    assert sum(block.ranges.payload_bytes for block in red) == share
    assert len(lower.blocks()) == 36, "the neighbour keeps all its copies"

    rig.node.set_quotas([Quota("red", frozenset({"ann"}), version="r2")])
    wait_until(lambda: rig.node.reports.report().namespaces[0].evicted_for_version >= 6)
    wait_until(lambda: len(lower.blocks()) == 30)
    assert {block.owner.tenant for block in lower.blocks()} == {"dan"}
    assert pool.reserve([make_put("r99", tenant="ann")]) == [None]
    store(pool, "r99", tenant=scope_of_version("ann", "r2"))
    wait_until(lambda: lower.find(block_key("r99")) is not None)


def test_a_namespace_in_memory_only_has_no_copies_below(make_rig: MakeRig, disk) -> None:
    rig = make_rig(open_lower=disk, demote_above=0.0)
    pool, lower = InprocPoolNode(rig.node), rig.node._lower
    assert lower is not None
    store(pool, "r0", tenant="ann")
    wait_until(lambda: lower.find(block_key("r0")) is not None)
    rig.node.set_quotas([Quota("red", frozenset({"ann"}), media="memory")])
    wait_until(lambda: lower.find(block_key("r0")) is None)
    store(pool, "r1", tenant="ann")
    store(pool, "x1", tenant="dan")
    wait_until(lambda: lower.find(block_key("x1")) is not None)
    assert [block.owner.tenant for block in lower.blocks()] == ["dan"]
    assert all(pool.lookup([block_key("r0"), block_key("r1")]))


def test_a_namespace_on_disk_only_leaves_memory_and_comes_back(make_rig: MakeRig, disk) -> None:
    clock = ManualClock()
    rig = make_rig(open_lower=disk, demote_above=1.0, clock=clock)
    pool, lower = InprocPoolNode(rig.node), rig.node._lower
    assert lower is not None
    rig.node.set_quotas([Quota("red", frozenset({"ann"}), media="disk")])
    for name, parent in (("r0", None), ("r1", "r0"), ("r2", "r1")):
        store(pool, name, parent, tenant="ann")
    store(pool, "x1", tenant="dan")
    names = [block_key(name) for name in ("r0", "r1", "r2")]

    def later() -> None:
        for _ in range(4):  # Copies first, then children before parents.
            clock.advance(REST_AFTER_S)
            rig.node.tick()

    later()
    wait_until(lambda: all(lower.find(key) is not None for key in names))
    later()
    assert pool.lookup([*names, block_key("x1")])[:3] == [None, None, None]
    assert pool.lookup([block_key("x1")]) != [None]
    places = pool.promote(names)
    assert all(places)
    assert [fetch(pool, place)[0] for place in places if place] == [
        make_range(name, 0) for name in ("r0", "r1", "r2")
    ]
    rig.node.tick()
    assert all(pool.lookup(names)), "a reader has time"
    later()
    assert pool.lookup(names) == [None, None, None]
    usage = rig.node.reports.report().namespaces[0]
    assert (usage.used_bytes, usage.evicted_for_ttl, usage.disk_blocks) == (0, 0, 3)


def test_a_disk_that_takes_nothing_keeps_no_list_of_what_waits_for_it(
    make_rig: MakeRig, tampered
) -> None:
    clock = ManualClock()
    rig = make_rig(open_lower=opener(tampered), demote_above=1.0, clock=clock)
    rig.node.set_quotas([Quota("red", frozenset({"ann"}), media="disk")])
    assert rig.node.demoter is not None
    rig.node.demoter.stop()
    for number in range(5):
        store(InprocPoolNode(rig.node), f"r{number}", tenant="ann")
    for _ in range(50):
        clock.advance(REST_AFTER_S)
        rig.node.tick()
    assert len(rig.node._state.table.quotas._due_below) == 5
