"""What every Clock does, numbered as in kvcore/clock.py."""

from __future__ import annotations

import datetime

import pytest

from tierkv.kvcore.clock import Clock, ManualClock, SystemClock

CLOCKS = pytest.mark.parametrize("make", [SystemClock, ManualClock])


@CLOCKS
def test_1_now_never_goes_back(make: type[Clock]) -> None:
    clock = make()
    seen = [clock.now() for _ in range(1_000)]
    assert seen == sorted(seen)


@CLOCKS
def test_2_wall_is_a_time_of_this_century(make: type[Clock]) -> None:
    year = datetime.datetime.fromtimestamp(make().wall(), datetime.UTC).year
    assert 2020 < year < 2100


def test_a_manual_clock_moves_when_told_and_only_forward() -> None:
    clock = ManualClock(1.0, epoch=100.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (3.5, 103.5)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-0.1)
