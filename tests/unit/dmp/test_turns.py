"""Turns with threads: who waits in vain leaves nothing behind, and who is next is woken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tierkv.dmp.node.turn_order import TransferKind, Turn
from tierkv.dmp.node.turns import Turns
from tierkv.dmp.slots.accounts import Quota
from tierkv.kvcore.clock import Clock, ManualClock, SystemClock
from tierkv.kvcore.errors import TransportError

MIB = 1 << 20


def turns_of(clock: Clock, *names: str) -> Turns:
    turns = Turns(clock, pinned_bytes=64 * MIB, places=1)
    turns.set_quotas({n: Quota(name, frozenset({name})) for n, name in enumerate(names, 1)})
    return turns


def test_a_wait_in_vain_leaves_nothing_behind() -> None:
    turns = turns_of(ManualClock(), "red")
    moving = Turn(1, TransferKind.READ, MIB)
    turns.take(moving, timeout_s=0.0)
    with pytest.raises(TransportError, match="too many bytes"):
        turns.take(Turn(1, TransferKind.READ, MIB), timeout_s=0.0)
    assert (turns.waiting, turns.pinned_bytes) == (0, MIB)
    other = Turn(2, TransferKind.READ, MIB)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(turns.take, other, timeout_s=60.0)
        while not turns.waiting:  # pytest-timeout is the deadline
            threading.Event().wait(0.001)
        with pytest.raises(TransportError):
            turns.go_on(moving, MIB, timeout_s=0.0)
        waits.result()
    turns.end(moving)
    turns.end(other)
    assert (turns.waiting, turns.pinned_bytes) == (0, 0)


def test_all_get_their_turn_whatever_the_number_of_threads() -> None:
    turns = turns_of(SystemClock(), "red", "blue")

    def run(number: int) -> int:
        turn = Turn(number % 3, TransferKind(number % 3), MIB, piece=MIB // 4)
        turns.take(turn, timeout_s=60.0)
        for _ in range(3):
            turns.go_on(turn, MIB // 4, timeout_s=60.0)
        turns.end(turn)
        return turn.size

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(run, range(300))) == 300 * MIB
    assert (turns.waiting, turns.pinned_bytes) == (0, 0)
