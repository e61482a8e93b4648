"""Turns of transfers: bytes by weight, rates, classes and bounds, for any order of events."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dmp.node.turn_order import BURST_S, MOVE_PAUSE_S, TransferKind, Turn, TurnOrder
from tierkv.dmp.slots.accounts import Quota

MIB = 1 << 20
PLACES = 2
WINDOW = PLACES * (256 << 10)
SIZES = st.integers(1, 6 * MIB)


def order_of(quotas: dict[int, Quota], *, pinned_bytes: int = 64 * MIB) -> TurnOrder:
    order = TurnOrder(pinned_bytes=pinned_bytes, places=PLACES)
    order.set_quotas(quotas)
    return order


def quota(number: int, **changes: Any) -> Quota:
    return Quota(f"n{number}", frozenset({f"t{number}"}), **changes)


@given(
    st.lists(st.floats(0.1, 50.0), min_size=2, max_size=4),
    st.lists(SIZES, min_size=20, max_size=80),
)
def test_bytes_are_shared_by_weight_within_one_transfer(
    weights: list[float], sizes: list[int]
) -> None:
    order = order_of({n: quota(n, weight=weight) for n, weight in enumerate(weights, 1)})
    blockers = [Turn(0, TransferKind.READ, WINDOW) for _ in range(PLACES)]
    assert all(order.ask(blocker, 0.0) for blocker in blockers)
    for number in order.shares:
        for size in sizes:
            assert not order.ask(Turn(number, TransferKind.READ, size), 0.0)
    for blocker in blockers:
        order.end(blocker, 0.0)
    moved, left = dict.fromkeys(order.shares, 0), dict.fromkeys(order.shares, len(sizes))
    largest = max(sizes)
    while min(left.values()):
        # One at a time: a transfer as large as the window would share it with others.
        turn = order._next(0.0)
        assert turn is not None
        order.leave(turn)
        order._grant(turn, 0.0)
        order.end(turn, 0.0)
        moved[turn.account] += turn.size
        left[turn.account] -= 1
        for a, b in combinations(order.shares, 2):
            # Goyal, Vin, Cheng 1996, theorem 1.
            apart = abs(moved[a] / weights[a - 1] - moved[b] / weights[b - 1])
            assert apart <= largest / weights[a - 1] + largest / weights[b - 1] + 1.0


@given(
    st.floats(1e5, 1e8),
    st.floats(1.0, 1e4),
    st.lists(st.tuples(SIZES, st.floats(0.0, 3.0)), min_size=1, max_size=60),
)
def test_no_second_begins_more_than_its_rates_allow(
    bytes_per_s: float, requests_per_s: float, events: list[tuple[int, float]]
) -> None:
    order = order_of({1: quota(1, read_bytes_per_s=bytes_per_s, requests_per_s=requests_per_s)})
    now, given_turns, largest = 0.0, [], 0
    for size, pause in events:
        now += pause
        largest = max(largest, size)
        turn = Turn(1, TransferKind.READ, size)
        if order.may_begin(turn, now):
            assert order.ask(turn, now)
            given_turns.append((size, now))
            order.end(turn, now)
    for start, (_, began) in enumerate(given_turns):
        for stop in range(start, len(given_turns)):
            took_s = given_turns[stop][1] - began
            moved = sum(size for size, _ in given_turns[start : stop + 1])
            assert moved <= bytes_per_s * (took_s + BURST_S) * (1 + 1e-9) + largest
            assert stop + 1 - start <= requests_per_s * (took_s + BURST_S) * (1 + 1e-9) + 1


@given(st.data())
def test_all_get_their_turn_in_the_order_of_classes_and_within_the_bounds(
    data: st.DataObject,
) -> None:
    pinned = data.draw(st.sampled_from([5 * MIB, 64 * MIB]))
    order = order_of({1: quota(1, weight=3.0), 2: quota(2)}, pinned_bytes=pinned)
    now = 0.0
    moving: list[Turn] = []
    waiting: list[Turn] = []
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.001, 0.2]))
        action = data.draw(st.sampled_from(["ask", "end", "give_up", "go_on"]))
        if action == "ask":
            turn = Turn(
                data.draw(st.integers(0, 3)),
                data.draw(st.sampled_from(list(TransferKind))),
                data.draw(SIZES),
                counts=data.draw(st.booleans()),
            )
            (moving if order.ask(turn, now) else waiting).append(turn)
        elif action == "end" and moving:
            order.end(moving.pop(data.draw(st.integers(0, len(moving) - 1))), now)
        elif action == "give_up" and waiting:
            turn = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            order.leave(turn)
            if turn.continues:
                order.end(turn, now)
        elif action == "go_on" and moving:
            turn = moving[data.draw(st.integers(0, len(moving) - 1))]
            if not order.go_on(turn, data.draw(st.integers(1, turn.size)), now):
                moving.remove(turn)
                waiting.append(turn)
        for turn in order.give_turns(now):
            waiting.remove(turn)
            moving.append(turn)
        held = [*moving, *(turn for turn in waiting if turn.continues)]
        reads = [turn.size for turn in held if not turn.kind.writes]
        assert order.pinned == sum(reads)
        assert order.pinned <= pinned or len(reads) == 1
        fast = [turn.piece for turn in moving if turn in order._moving]
        assert order._window == sum(fast) and len(fast) == len(order._moving)
        assert order._window <= WINDOW + max(fast, default=0) or len(fast) <= PLACES
        assert order.waiting == len(waiting)
    while waiting:
        for turn in moving:
            order.end(turn, now)
        given_now = order.give_turns(now)
        first = given_now[0]
        moves = [turn for turn in waiting if turn.kind >= TransferKind.MOVE_OUT]
        best = min(turn.kind for turn in (moves if first in moves else waiting))
        assert first.kind == best, "a higher class waits"
        moving = given_now
        waiting = [turn for turn in waiting if turn not in given_now]


def test_a_slow_peer_keeps_no_place_from_others() -> None:
    order = order_of({1: quota(1)})
    slow, more = Turn(2, TransferKind.READ, WINDOW), Turn(2, TransferKind.READ, 1)
    assert order.ask(slow, 0.0) and order.ask(more, 0.0)
    other = Turn(3, TransferKind.READ, WINDOW)
    assert not order.ask(other, 0.0)
    assert order.give_turns(0.01) == []
    assert order.give_turns(1.0) == [other]
    assert order.end(slow, 1.0), "its next transfers do not count"
    assert not order.end(other, 1.0)


def test_reads_that_wait_for_memory_let_writes_pass() -> None:
    order = order_of({1: quota(1)}, pinned_bytes=10)
    assert order.ask(Turn(0, TransferKind.READ, 10), 0.0)
    read, write = Turn(0, TransferKind.READ, 1), Turn(0, TransferKind.WRITE, 1)
    assert not order.ask(read, 0.0)
    assert not order.ask(write, 0.0)
    assert order.give_turns(0.0) == [write]


def test_without_limits_more_move_at_a_time() -> None:
    order = order_of({})
    turns = [Turn(0, TransferKind.READ, 4 * MIB) for _ in range(9)]
    assert all(order.ask(turn, 0.0) for turn in turns)
    order.set_quotas({1: quota(1)})
    late = Turn(0, TransferKind.READ, 4 * MIB)
    assert not order.ask(late, 0.0)
    for turn in turns[:-1]:
        order.end(turn, 0.0)
    assert order.give_turns(0.0) == [late]


def transfer(order: TurnOrder, size: int, seconds: float, *, counts: bool = True) -> bool:
    """Move bytes alone; return whether the peer was slow."""
    turn = Turn(0, TransferKind.READ, size, counts=counts)
    assert order.ask(turn, 100.0)
    return order.end(turn, 100.0 + seconds)


def test_who_is_slow_depends_on_the_network() -> None:
    for byte_s in (1e-10, 8e-9):  # 10 GB/s, and half of 2 Gbit/s.
        order = order_of({1: quota(1)})
        assert not any(transfer(order, 4 * MIB, 4 * MIB * byte_s) for _ in range(200)[100:])
        assert not transfer(order, 4 * MIB, 4 * MIB * byte_s * 3)
        assert transfer(order, 4 * MIB, 4 * MIB * byte_s * 5 + 0.03)


def test_a_network_that_slows_down_for_all_has_an_order_again() -> None:
    order = order_of({1: quota(1)})
    for _ in range(200):
        transfer(order, 4 * MIB, 4 * MIB * 1e-9)
    counts, tries = False, 0
    while not counts:
        counts = not transfer(order, 4 * MIB, 4 * MIB * 1e-7, counts=counts)
        tries += 1
    assert 100 < tries < 1_000


def test_a_transfer_in_progress_goes_on_before_others_of_its_account() -> None:
    order = order_of({1: quota(1)})
    moving = [Turn(2, TransferKind.READ, 10 * MIB, piece=MIB) for _ in range(PLACES)]
    assert all(order.ask(turn, 0.0) for turn in moving)
    later, other = Turn(2, TransferKind.READ, MIB), Turn(3, TransferKind.READ, MIB)
    assert not order.ask(later, 0.0) and not order.ask(other, 0.0)
    assert not order.go_on(moving[0], MIB, 0.0)
    assert order.give_turns(0.0) == [other], "it had less"
    order.end(other, 0.0)
    assert order.give_turns(0.0) == [moving[0]]
    order.end(moving[0], 0.0)
    order.end(moving[1], 0.0)
    assert order.give_turns(0.0) == [later]
    assert order.pinned == MIB


def test_a_rate_is_a_bucket_of_a_second_and_a_new_rate_begins_full() -> None:
    order = order_of({1: quota(1, write_bytes_per_s=1_000.0)})
    write = Turn(1, TransferKind.WRITE, 5_000)
    assert order.ask(write, 1.0) and order.may_write(1, 1.0)
    order.end(write, 1.0)
    assert order.may_begin(Turn(1, TransferKind.READ, 5_000), 1.0)
    assert order.may_begin(Turn(1, TransferKind.WRITE, 5_000, charges=False), 1.0)
    assert [order.may_write(1, now) for now in (1.0, 4.9, 5.0)] == [
        False, False, True,
    ]  # fmt: skip
    assert order.shares[1].throttled == 2
    order.set_quotas({1: quota(1, write_bytes_per_s=2_000.0)})
    assert order.may_write(1, 1.0)


def test_a_read_without_memory_does_not_hold_up_the_one_that_will_free_it() -> None:
    order = order_of({1: quota(1), 2: quota(2)}, pinned_bytes=4 * MIB)
    begun = [Turn(2, TransferKind.READ, 2 * MIB, piece=MIB) for _ in range(PLACES)]
    assert all(order.ask(turn, 0.0) for turn in begun)
    starved = Turn(1, TransferKind.READ, MIB)
    assert not order.ask(starved, 0.0)
    for turn in begun:
        assert not order.go_on(turn, MIB, 0.0)
    assert set(order.give_turns(0.0)) == set(begun), "their memory is there already"
    for turn in begun:
        order.end(turn, 0.0)
    assert order.give_turns(0.0) == [starved]


def test_moves_come_after_all_others_and_get_a_turn_in_each_pause() -> None:
    order = order_of({1: quota(1)})
    first = [Turn(0, TransferKind.WRITE, WINDOW) for _ in range(PLACES)]
    assert all(order.ask(turn, 0.0) for turn in first)
    moves = [Turn(0, TransferKind.MOVE_IN, WINDOW), Turn(0, TransferKind.MOVE_OUT, WINDOW)]
    writes = [Turn(1, TransferKind.WRITE, WINDOW) for _ in range(60)]
    assert not any(order.ask(turn, 0.0) for turn in (*moves, *writes))
    now, given_turns, moving = 0.0, [], first
    while order.waiting:
        now += MOVE_PAUSE_S / 4
        order.end(moving.pop(0), now)
        begun = order.give_turns(now)
        moving += begun
        given_turns += [(now, turn.kind) for turn in begun]
    found = [at for at, kind in given_turns if kind >= TransferKind.MOVE_OUT]
    assert found == [MOVE_PAUSE_S, 2 * MOVE_PAUSE_S]
    kinds = [kind for _, kind in given_turns]
    assert kinds.index(TransferKind.MOVE_OUT) < kinds.index(TransferKind.MOVE_IN)
    assert kinds[:3] == [TransferKind.WRITE] * 3


def test_without_others_moves_wait_for_nothing() -> None:
    order = order_of({1: quota(1)})
    for _ in range(9):
        turn = Turn(0, TransferKind.MOVE_OUT, WINDOW)
        assert order.ask(turn, 0.0)
        order.end(turn, 0.0)
