from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from tests.fix_dmp import RANGE_BYTES, Rig, block_key, store
from tierkv.dmp.node.scrubber import _SHORTEST_PAUSE_S, ScrubPlan
from tierkv.dmp.node.state import DamageLog
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.kvcore.block import Tier
from tierkv.kvcore.block_event import BlockRemoved
from tierkv.kvcore.clock import SystemClock

MakeRig = Callable[..., Rig]


def test_the_plan_goes_round_in_the_order_of_memory() -> None:
    plan = ScrubPlan(1000)
    plan.begin([7, 2, 5])
    assert [plan.next() for _ in range(4)] == [2, 5, 7, None]
    assert plan.rounds == 1


def test_the_plan_keeps_its_rate() -> None:
    plan = ScrubPlan(1000)
    plan.checked(500, now=10.0)
    assert plan.wait_s(10.0) == 0.5
    plan.checked(500, now=10.25)
    assert plan.wait_s(10.25) == 0.75
    assert plan.wait_s(99.0) == 0.0
    plan.checked(100, now=99.0)
    assert plan.wait_s(99.0) == pytest.approx(0.1), "an idle time is no credit"


def test_the_plan_takes_a_fiftieth_of_the_time_for_small_blocks() -> None:
    plan = ScrubPlan(1 << 30)
    plan.checked(4096, now=10.0, took_s=0.001)
    assert plan.wait_s(10.0) == pytest.approx(0.05)
    plan.checked(1 << 30, now=20.0, took_s=0.001)
    assert plan.wait_s(20.0) == pytest.approx(1.0), "the rate is the tighter bound"


def test_short_pauses_are_added_up(make_rig: MakeRig) -> None:
    rig = make_rig(scrub_rate_bytes_per_s=0)
    pool = InprocPoolNode(rig.node)
    for name in ("a", "b", "c", "d"):
        store(pool, name)
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return False

    scrubber = rig.node.scrubber
    block_s = _SHORTEST_PAUSE_S * 0.4
    scrubber._plan, scrubber._stopping = ScrubPlan(int(2 * RANGE_BYTES / block_s)), Stop()
    scrubber._plan.begin(rig.node._state.table.store.indices())
    scrubber._run_paced()
    paused = [pause for pause in pauses if pause]
    assert len(pauses) == 4 and len(paused) == 2 and min(paused) >= _SHORTEST_PAUSE_S


def test_an_alarm_is_raised_once_an_hour() -> None:
    damage = DamageLog(3)
    assert [damage.note(now) for now in (0.0, 10.0, 20.0, 30.0)] == [False, False, True, False]
    assert [damage.note(now) for now in (3700.0, 3701.0, 3702.0)] == [False, False, True]
    assert [damage.note(20_000.0), damage.count] == [False, 8]


def flip(rig: Rig, slot: int, at: int) -> None:
    size = rig.node._state.table.extents.of(slot).slot_bytes
    rig.node.segment.payload(slot, size, at, at + 1)[0] ^= 0x10


def test_a_round_finds_what_nobody_read(make_rig: MakeRig) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    places = [store(pool, f"n{i}") for i in range(6)]
    assert rig.node.scrubber.run_round() == 0
    flip(rig, places[2].slot, at=RANGE_BYTES + 5)
    assert rig.node.scrubber.run_round() == 1
    assert rig.journal.events[-1] == BlockRemoved(block_key("n2"), Tier.L2)
    assert pool.lookup([block_key("n2"), block_key("n3")]) == [None, places[3]]
    assert rig.node.reports.stats().quarantined_slots == 1
    assert dict(rig.node.reports.report().cache_errors) == {"checksum_mismatch": 1}
    assert "1 slots quarantined" in rig.node.reports.report().tiers[0].medium
    assert rig.node.scrubber.checked_bytes == 12 * 2 * RANGE_BYTES


def test_a_quarantined_slot_is_tested_and_used_again_restarts_included(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = store(InprocPoolNode(rig.node), "n0")
    flip(rig, place.slot, at=5)
    assert rig.node.scrubber.run_round() == 1
    rig.restart()
    assert rig.node.reports.stats().quarantined_slots == 1
    assert [rig.node.scrubber.run_round() for _ in range(2)] == [0, 0]
    assert rig.node.reports.stats().quarantined_slots == 0
    assert rig.node.reports.stats().memory.used_bytes == 0
    rig.node._state.table.check_invariants()
    again = store(InprocPoolNode(rig.node), "n1")
    assert (again.slot, again.generation > place.generation) == (place.slot, True)


def test_a_test_gives_the_lock_back_between_pieces(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.dmp.node.scrubber._PIECE_BYTES", RANGE_BYTES)
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    place = store(pool, "n0")
    flip(rig, place.slot, at=5)
    assert [rig.node.scrubber.run_round() for _ in range(2)] == [1, 0]
    stored = []
    plan = rig.node.scrubber._plan
    checked = plan.checked

    def between(size_bytes: int, now: float) -> None:
        stored.append(store(pool, f"between {len(stored)}"))
        checked(size_bytes, now)

    monkeypatch.setattr(plan, "checked", between)
    assert rig.node.scrubber.run_round() == 0
    assert len(stored) > 2
    assert rig.node.reports.stats().quarantined_slots == 0
    assert place.slot not in {other.slot for other in stored}, "in use again after its test only"
    rig.node._state.table.check_invariants()


def test_a_slot_that_fails_in_one_piece_stays_out(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.dmp.node.scrubber._PIECE_BYTES", RANGE_BYTES)
    answers = [True, False]
    monkeypatch.setattr("tierkv.dmp.node.scrubber.keeps_patterns", lambda memory: answers.pop(0))
    rig = make_rig()
    flip(rig, store(InprocPoolNode(rig.node), "n0").slot, at=5)
    assert [rig.node.scrubber.run_round() for _ in range(3)] == [1, 0, 0]
    assert answers == [] and rig.node.reports.stats().quarantined_slots == 1


def test_a_slot_is_a_suspect_in_one_use_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    flip(rig, store(InprocPoolNode(rig.node), "n0").slot, at=5)
    scrubber, table = rig.node.scrubber, rig.node._state.table
    assert [scrubber.run_round() for _ in range(2)] == [1, 0]
    ((index, generation),) = scrubber._suspects.items()
    slot = table.store.at(index)
    assert slot is not None and slot.generation == generation
    table.heal(slot)
    scrubber.run_round()
    assert scrubber._suspects == {}


def test_a_slot_that_keeps_going_bad_stays_out(make_rig: MakeRig) -> None:
    rig = make_rig()
    for life in range(4):
        flip(rig, store(InprocPoolNode(rig.node), f"n{life}").slot, at=5)
        assert [rig.node.scrubber.run_round() for _ in range(3)] == [1, 0, 0]
    assert rig.node.reports.stats().quarantined_slots == 1
    other = store(InprocPoolNode(rig.node), "other")
    assert rig.node.scrubber.run_round() == 0
    assert InprocPoolNode(rig.node).lookup([block_key("other")]) == [other]


def test_a_scrub_is_no_use_and_does_not_change_who_goes_next(make_rig: MakeRig) -> None:
    rig = make_rig()
    pool = InprocPoolNode(rig.node)
    for i in range(20):
        store(pool, f"n{i}")
    assert rig.node.scrubber.run_round() == 0
    store(pool, "new")
    assert pool.lookup([block_key("n0")]) == [None]
    assert rig.node._state.table.pinned == 0


def test_the_thread_finds_it_too_and_many_raise_an_alarm(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(clock=SystemClock(), scrub_rate_bytes_per_s=1 << 30, damage_alert_per_hour=2)
    pool = InprocPoolNode(rig.node)
    with caplog.at_level(logging.ERROR):
        for i in range(2):
            flip(rig, store(pool, f"n{i}").slot, at=3)
        while rig.node._state.damage.count < 2:  # pytest-timeout is the deadline
            assert rig.node.scrubber._thread is not None
            rig.node.scrubber._thread.join(0.01)
    assert "may be failing" in caplog.text


def test_a_slot_larger_than_a_second_of_the_rate_is_paid_for_in_full(make_rig: MakeRig) -> None:
    rig = make_rig(scrub_rate_bytes_per_s=0)
    store(InprocPoolNode(rig.node), "a")
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return True

    scrubber = rig.node.scrubber
    scrubber._plan, scrubber._stopping = ScrubPlan(1_000), Stop()
    scrubber._plan.begin(rig.node._state.table.store.indices())
    scrubber._run_paced()
    assert pauses == [2 * RANGE_BYTES / 1_000]
