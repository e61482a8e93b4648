from __future__ import annotations

import pytest

from tierkv.dmp.transport.verbs.rails import (
    COOLDOWN_S,
    MAX_COOLDOWN_S,
    Piece,
    RailHealth,
    cut,
    join,
    nearest,
    pair_ports,
    share_out,
)


def gid(text: str) -> str:
    return f"::ffff:{text}"


def trip(health: RailHealth, now: float) -> float:
    """Fail until tripped; returns the end of the cooldown."""
    while not health.failed(now, "no answer"):
        pass
    return health.tripped_until


def test_three_errors_in_ten_seconds_trip_a_rail() -> None:
    health = RailHealth()
    assert [health.failed(now, "x") for now in (0.0, 4.0, 9.9)] == [False, False, True]
    assert not health.is_usable(9.9)
    assert not health.is_usable(9.8 + COOLDOWN_S)
    assert health.is_usable(9.9 + COOLDOWN_S)


def test_errors_far_apart_do_not_trip() -> None:
    health = RailHealth()
    assert not any(health.failed(6.0 * i, "x") for i in range(20))


def test_a_rail_on_trial_trips_at_its_first_error_and_for_twice_as_long() -> None:
    health = RailHealth()
    now = 0.0
    lengths = []
    for _ in range(6):
        end = trip(health, now)
        lengths.append(end - now)
        now = end
        assert health.is_on_trial(now)
    assert lengths == [30.0, 60.0, 120.0, 240.0, MAX_COOLDOWN_S, MAX_COOLDOWN_S]


def test_a_success_on_trial_makes_it_healthy() -> None:
    health = RailHealth()
    now = trip(health, 0.0)
    health.succeeded(now)
    assert health == RailHealth(tripped_until=now)
    assert not health.failed(now, "x")


def test_cut_covers_the_piece_and_joins_back() -> None:
    piece = Piece(local=1_000, at=50, size=2_500)
    pieces = cut(piece, 1_000)
    assert [p.size for p in pieces] == [1_000, 1_000, 500]
    assert join(pieces) == [piece]


def test_join_needs_both_ends_to_follow() -> None:
    pieces = [Piece(0, 100, 8), Piece(8, 200, 8), Piece(16, 208, 8), Piece(32, 216, 8)]
    assert join(pieces) == [Piece(0, 100, 8), Piece(8, 200, 16), Piece(32, 216, 8)]
    assert join([]) == []


def test_share_out_balances_bytes_and_keeps_order() -> None:
    shares = share_out("abcdef", [8, 1, 1, 1, 8, 1], ["x", "y", "z"])
    assert shares == [("x", ["a"]), ("y", ["b", "d", "f"]), ("z", ["c", "e"])]
    assert share_out("a", [5], ["x", "y"]) == [("x", ["a"])]


def test_nearest_keeps_all_at_the_least_distance() -> None:
    assert nearest("abc", [1, 0, 0]) == ["b", "c"]
    assert nearest("abc", [0, 0, 0]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("local", "remote", "pairs"),
    [
        (["10.77.0.1", "10.78.0.1"], ["10.78.0.2", "10.77.0.2"], [(0, 1), (1, 0)]),
        (["10.77.0.1"], ["10.78.0.2", "10.77.0.2"], [(0, 1)]),
        (["10.77.0.1", "10.78.0.1"], ["10.79.0.9"], [(1, 0)]),
        ([], ["10.0.0.1"], []),
    ],
)
def test_ports_of_one_subnet_find_each_other(
    local: list[str], remote: list[str], pairs: list[tuple[int, int]]
) -> None:
    assert pair_ports([gid(a) for a in local], [gid(b) for b in remote]) == pairs
