"""Calls to the pool: bounded, never raising, every future ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from tierkv.integrations.pool_keeper import Call, WorkQueue


class Gate:
    """Work that waits until the gate is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> str:
        self.entered.set()
        assert self.open.wait(10)
        return "through"


@contextmanager
def make_queue(
    threads: int = 1, limit: int = 4
) -> Iterator[tuple[WorkQueue, list[tuple[str, str]]]]:
    failures: list[tuple[str, str]] = []
    queue = WorkQueue(
        threads, limit=limit, on_failure=lambda name, error: failures.append((name, str(error)))
    )
    yield queue, failures
    assert queue.close(timeout_s=10)


def put(queue: WorkQueue, value: object, *, urgent: bool = False) -> Future[object]:
    call: Call[object] = Call(lambda: value, None, "test")
    assert queue.put(call, urgent=urgent)
    return call.answer


def test_answers_come_from_threads() -> None:
    with make_queue(threads=4) as (queue, _):
        assert [put(queue, n).result(10) for n in range(20)] == list(range(20))


def test_what_raises_ends_with_the_default_and_is_told() -> None:
    with make_queue() as (queue, failures):
        call: Call[float] = Call(lambda: 1 / 0, -1.0, "divide")
        assert queue.put(call) and call.answer.result(10) == -1.0
        assert put(queue, 1).result(10) == 1  # The thread lives.
        assert failures == [("divide", "division by zero")]


def test_a_full_queue_takes_no_more() -> None:
    gate = Gate()
    with make_queue(limit=2) as (queue, _):
        first = Call(gate.pass_through, "", "gate")
        assert queue.put(first) and gate.entered.wait(10)
        waiting = [Call(lambda: 1, 0, "w") for _ in range(3)]
        assert [queue.put(call) for call in waiting] == [True, True, False]
        assert not waiting[2].answer.done()  # The caller ends it.
        gate.open.set()
        assert [call.answer.result(10) for call in waiting[:2]] == [1, 1]


def test_urgent_calls_go_first() -> None:
    gate = Gate()
    order: list[str] = []
    with make_queue() as (queue, _):
        assert queue.put(Call(gate.pass_through, "", "gate")) and gate.entered.wait(10)
        calls = [
            Call(lambda name=name: order.append(name), None, name)  # type: ignore[misc]
            for name in ("store", "lookup")
        ]
        queue.put(calls[0])
        queue.put(calls[1], urgent=True)
        gate.open.set()
        calls[0].answer.result(10)
    assert order == ["lookup", "store"]


def test_dropped_calls_end_with_their_default_and_running_ones_go_on() -> None:
    gate = Gate()
    with make_queue() as (queue, _):
        running = Call(gate.pass_through, "", "gate")
        assert queue.put(running) and gate.entered.wait(10)
        waiting = Call(lambda: 1, 0, "w")
        queue.put(waiting)
        queue.drop()
        assert waiting.answer.result(0) == 0
        gate.open.set()
        assert running.answer.result(10) == "through"


def test_closing_waits_for_what_runs_only_so_long() -> None:
    gate = Gate()
    with make_queue() as (queue, _):
        assert queue.put(Call(gate.pass_through, "", "gate")) and gate.entered.wait(10)
        waiting = Call(lambda: 1, 0, "w")
        queue.put(waiting)
        assert not queue.close(timeout_s=0.01)
        assert waiting.answer.result(0) == 0
        assert not queue.put(Call(lambda: 1, 0, "late"))
        gate.open.set()


def test_a_cancelled_call_is_not_made() -> None:
    gate = Gate()
    made: list[int] = []
    with make_queue() as (queue, _):
        assert queue.put(Call(gate.pass_through, "", "gate")) and gate.entered.wait(10)
        call = Call(lambda: made.append(1), None, "w")
        queue.put(call)
        assert call.answer.cancel()
        last = Call(lambda: 2, 0, "last")
        queue.put(last)
        gate.open.set()
        assert last.answer.result(10) == 2 and made == []
        call.refuse()  # Does not raise either.
