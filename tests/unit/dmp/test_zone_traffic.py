"""Bytes between zones: what counts as another zone, and what the limit lets through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.ids import NO_ZONE, ZoneId
from tierkv.kvcore.node import NodeReport

A, B = ZoneId("a"), ZoneId("b")


def test_only_a_known_and_different_zone_is_another() -> None:
    here, nowhere = (ZoneTraffic(zone, clock=ManualClock()) for zone in (A, NO_ZONE))
    other = here.other(B)
    assert other is not None and (other.name, other.traffic) == (B, here)
    assert [here.other(A), here.other(NO_ZONE), nowhere.other(B)] == [None] * 3


def test_without_a_limit_all_is_counted_and_nothing_refused() -> None:
    traffic = ZoneTraffic(A, clock=ManualClock())
    traffic.received(1 << 40)
    traffic.sent(5)
    assert traffic.admit()
    told = traffic.told_in(NodeReport(transfer_bytes_in=7))
    assert (told.cross_zone_bytes_in, told.cross_zone_bytes_out) == (1 << 40, 5)
    assert (told.cross_zone_refusals, told.transfer_bytes_in) == (0, 7)


def test_a_large_transfer_is_paid_back_before_the_next_one_begins() -> None:
    clock = ManualClock()
    traffic = ZoneTraffic(A, clock=clock, bytes_per_s=100)
    assert traffic.admit()
    traffic.received(350)
    assert not traffic.admit() and not traffic.has_room
    clock.advance(2.5)
    assert not traffic.admit()
    clock.advance(0.1)
    assert traffic.admit()
    assert traffic.refusals == 2
    clock.advance(1_000)
    traffic.sent(100)
    assert not traffic.has_room  # An idle hour does not save up more than a second's bytes.


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500)), max_size=60))
def test_over_time_the_limit_holds(asked: list[tuple[float, int]]) -> None:
    clock = ManualClock()
    traffic = ZoneTraffic(A, clock=clock, bytes_per_s=100)
    largest = 0
    for pause_s, size in asked:
        clock.advance(pause_s)
        if traffic.admit():
            traffic.received(size)
            largest = max(largest, size)
    assert traffic.bytes_in <= 100 * (clock.now() - ManualClock().now()) + 100 + largest + 1e-6
