"""A bounded queue of calls to the pool, and the threads for the calls.

Used by integrations/pool_door.py alone. Each call has a future, which always ends with a value. A
failed or impossible call ends with the call's default, and a waiting engine never receives an
exception. The threads are daemons and never keep an engine's process alive.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Call(Generic[T]):
    """One call to the pool.

    Attributes:
        work: the function to run in a thread.
        default: the answer if the call can't be made or fails.
        name: kind of call, for counting.
        answer: ends with the result of ``work``, or with the default.
    """

    work: Callable[[], T]
    default: T
    name: str
    answer: Future[T] = field(default_factory=Future)

    def refuse(self) -> None:
        """End the call with its default."""
        self._end(self.default)

    def run(self) -> Exception | None:
        """Run the call, unless it was cancelled; return the exception if it failed."""
        if not self.answer.set_running_or_notify_cancel():
            return None
        try:
            value, failure = self.work(), None
        except Exception as error:  # noqa: BLE001 - an engine never sees an error of its cache
            value, failure = self.default, error
        self._end(value)
        return failure

    def _end(self, value: T) -> None:
        # The owner cancelled the call in the meantime and expects no result.
        with contextlib.suppress(InvalidStateError):
            self.answer.set_result(value)


class WorkQueue:
    """Queued calls and the threads that make them; thread-safe.

    Attributes:
        _urgent: queued calls that a step of the engine waits for; taken first.
        _calls: the other queued calls, oldest first.
        _running: number of running calls.
    """

    def __init__(
        self, threads: int, *, limit: int, on_failure: Callable[[str, Exception], None]
    ) -> None:
        self._limit = limit
        self._on_failure = on_failure
        self._urgent: deque[Call[Any]] = deque()
        self._calls: deque[Call[Any]] = deque()
        self._running = 0
        self._closed = False
        lock = threading.Lock()
        self._change = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"tierkv-pool-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Call[Any], *, urgent: bool = False) -> bool:
        """Queue a call. Return False, without any effect, if the queue is full or closed."""
        with self._change:
            if self._closed or len(self._urgent) + len(self._calls) >= self._limit:
                return False
            (self._urgent if urgent else self._calls).append(call)
            self._change.notify()
        return True

    def drop(self) -> None:
        """End all queued calls with their defaults."""
        with self._change:
            dropped = [*self._urgent, *self._calls]
            self._urgent.clear()
            self._calls.clear()
        for call in dropped:
            call.refuse()

    def close(self, *, timeout_s: float) -> bool:
        """Refuse new calls, end queued ones, wait for running ones; False if the wait timed out."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self.drop()
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, timeout_s)

    def _work(self) -> None:
        while (call := self._take()) is not None:
            failure = call.run()
            if failure is not None:
                self._on_failure(call.name, failure)
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _take(self) -> Call[Any] | None:
        with self._change:
            self._change.wait_for(lambda: self._urgent or self._calls or self._closed)
            if self._closed:
                return None
            self._running += 1
            return (self._urgent or self._calls).popleft()
