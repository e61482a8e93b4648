from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fix_dmp import RANGE_BYTES, Rig, block_key, fetch, make_put, make_range, store
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.range_codec import as_ref
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import BlockRemoved, BlockStored
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import ConfigError, TransportError
from tierkv.kvcore.node import NodeRole

MakeRig = Callable[..., Rig]


def test_sealed_blocks_are_reported_and_evicted_ones_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    place = store(pool, "a")
    assert rig.journal.events == [BlockStored(make_put("a"), Tier.L2, place)]
    for i in range(20):
        store(pool, f"n{i}")
    assert BlockRemoved(block_key("a"), Tier.L2) in rig.journal.events


def test_the_events_add_up_to_the_inventory(make_rig: MakeRig) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    for i in range(50):
        store(pool, f"n{i}", f"n{i - 1}" if i % 7 else None)
    known: dict[bytes, BlockStored] = {}
    for event in rig.journal.events:
        if isinstance(event, BlockStored):
            known[event.key] = event
        else:
            del known[event.key]
    assert known == {stored.key: stored for stored in rig.node.reports.inventory()}
    assert len(known) == 20


def test_expired_reservations_are_no_events(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    assert rig.node.puts.reserve([make_put("a")], deadline_s=1.0) != [None]
    clock.advance(2.0)
    rig.node.tick()
    assert rig.journal.events == []
    assert rig.node.reports.stats().memory.used_bytes == 0


def test_its_own_thread_ends_reservations(make_rig: MakeRig) -> None:
    rig = make_rig(tick_interval_s=0.01)
    assert isinstance(rig.clock, ManualClock)
    rig.node.puts.reserve([make_put("a")], deadline_s=1.0)
    rig.clock.advance(2.0)
    assert rig.node._ticker is not None
    while rig.node.reports.stats().slots_writing:  # pytest-timeout is the deadline
        rig.node._ticker.join(0.01)


def test_a_restart_keeps_blocks_in_a_new_incarnation(make_rig: MakeRig) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    for i in range(3):
        store(pool, f"n{i}")
    (writing,) = rig.node.puts.reserve([make_put("half")])
    before = rig.node.reports.inventory()
    old = rig.node.incarnation
    rig.restart()
    again = InprocPoolNode(rig.node)
    assert rig.node.incarnation > old
    assert [s.block for s in rig.node.reports.inventory()] == [s.block for s in before]
    assert rig.node.reports.stats().slots_writing == 0
    (place,) = again.lookup([block_key("n1")])
    assert place is not None
    assert fetch(again, place) == [make_range("n1", 0), make_range("n1", 1)]
    assert writing is not None
    store(again, "half")


def test_the_order_of_sealing_survives_two_restarts(make_rig: MakeRig) -> None:
    rig = make_rig()
    store(InprocPoolNode(rig.node), "first")
    rig.restart()
    for i in range(19):
        store(InprocPoolNode(rig.node), f"n{i}")
    rig.restart()
    store(InprocPoolNode(rig.node), "new")
    assert InprocPoolNode(rig.node).lookup([block_key("first")]) == [None]


def test_the_incarnation_grows_when_the_segment_is_lost(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    old = rig.node.incarnation
    rig.stop()
    rig.node.config.segment_file.unlink()
    clock.advance(5.0)
    rig = make_rig(clock=clock)
    assert rig.node.incarnation > old
    assert rig.node.reports.inventory() == []


def test_a_false_alarm_does_not_cost_the_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = store(InprocPoolNode(rig.node), "a")
    assert rig.node.gets.suspect([RangeRef(place, 0), RangeRef(place, 9)]) == [False, False]
    assert rig.node.reports.stats().quarantined_slots == 0


def test_a_quarantined_slot_stays_out_of_use_over_a_restart(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = store(InprocPoolNode(rig.node), "a")
    segment = rig.node.segment
    assert segment is not None
    segment.payload(place.slot, 48 << 10, 5, 6)[0] ^= 1
    assert rig.node.gets.suspect([RangeRef(place, 0)]) == [True]
    assert BlockRemoved(block_key("a"), Tier.L2) in rig.journal.events
    assert rig.node.reports.report().cache_errors == (("checksum_mismatch", 1),)
    segment = None
    rig.restart()
    assert rig.node.reports.stats().quarantined_slots == 1
    assert rig.node.reports.inventory() == []


def test_two_nodes_never_own_one_segment(make_rig: MakeRig, tmp_path: object) -> None:
    make_rig("dmp-a")
    with pytest.raises(ConfigError, match="owned by a running process"):
        make_rig("dmp-b", segment_path=f"{tmp_path}/dmp-a.seg")


def test_a_stopped_node_says_so_and_may_leave_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(remove_on_stop=True)
    path = rig.node.config.segment_file
    assert path.exists()
    rig.stop()
    assert not path.exists()
    with pytest.raises(TransportError, match="not running"):
        rig.node.gets.lookup([block_key("a")])


def test_it_describes_itself(make_rig: MakeRig) -> None:
    rig = make_rig()
    store(InprocPoolNode(rig.node), "a")
    info = rig.node.reports.info(data_address=rig.server.address)
    assert (info.role, info.capacity_bytes) == (NodeRole.DMP, 1 << 20)
    assert info.data_address.startswith("127.0.0.1:")
    report = rig.node.reports.report()
    (tier,) = report.tiers
    assert (tier.tier, tier.blocks_used, tier.stored_tokens) == (Tier.L2, 1, 64)
    assert tier.used_bytes == 48 << 10
    assert tier.write_bytes == 2 * RANGE_BYTES
    assert report.load.kv_usage == pytest.approx((48 << 10) / (1 << 20))


def test_reservations_and_holds_are_bounded_in_time(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(clock=clock)
    place = store(InprocPoolNode(rig.node), "a")
    rig.node.puts.reserve([make_put("b")], deadline_s=1e9)
    assert rig.node.gets.hold([place], ttl_s=1e9) == [True]
    clock.advance(3_601.0)
    rig.node.tick()
    assert rig.node.reports.stats().slots_writing == 0
    for i in range(25):
        store(InprocPoolNode(rig.node), f"n{i}")
    assert rig.node.gets.lookup([block_key("a")]) == [None]


def test_a_nameless_segment_leaves_nothing_even_while_it_is_used(make_rig: MakeRig) -> None:
    rig = make_rig(nameless=True)
    assert not rig.node.config.segment_file.exists()
    assert rig.node.reports.info().segment_path == ""
    pool = InprocPoolNode(rig.node)
    assert fetch(pool, store(pool, "a"))[1] == make_range("a", 1)


def test_a_dead_client_leaves_no_reservation_and_no_hold(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = rig.node
    kept = store(InprocPoolNode(node), "kept")
    node.puts.reserve([make_put("a"), make_put("b")], owner="dead")
    node.puts.reserve([make_put("c")], owner="alive")
    assert node.gets.hold([kept], ttl_s=60.0, owner="dead") == [True]
    node.puts.release_owner("dead")
    node.puts.release_owner("dead")
    assert node.reports.stats().slots_writing == 1
    assert all(node.puts.reserve([make_put("a"), make_put("b")]))
    for i in range(20):
        store(InprocPoolNode(node), f"n{i}")
    assert node.gets.lookup([block_key("kept")]) == [None], "its hold went with it"


def test_a_dead_clients_pinned_reservation_goes_with_the_pin(make_rig: MakeRig) -> None:
    node = make_rig().node
    (place,) = node.puts.reserve([make_put("a")], owner="dead")
    assert place is not None
    with node.puts.open_write(place, 0):
        node.puts.release_owner("dead")
        assert node.reports.stats().memory.used_bytes > 0
    assert node.reports.stats().memory.used_bytes == 0


def test_transfers_of_an_earlier_start_do_not_disturb_the_next(make_rig: MakeRig) -> None:
    rig = make_rig()
    node = rig.node
    place = store(InprocPoolNode(node), "a")
    (grant,) = node.puts.reserve([make_put("b")])
    assert grant is not None
    read = node.gets.begin_read([as_ref(RangeRef(place, 0))])
    write = node.puts.begin_write([as_ref(RangeRef(grant, 0))])
    node.puts.abort([grant])
    node.stop()
    node.start()
    node.gets.end_read(read)
    node.puts.end_write(write)
    node.check_invariants()
    assert node.drain(0.0), "no transfer of this start is open"
