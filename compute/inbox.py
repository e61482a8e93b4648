"""A thread's inbox: other threads put actions in, the owner runs them between its own work.

Used by the engine. Actions run in the order they came; one that raises ends the owner's loop, so
they must not fail on anything a caller can cause.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class Inbox:
    """A queue of actions for one owner thread."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, action: Callable[[], None]) -> None:
        """Have the owner run an action soon."""
        self._actions.put(action)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the owner run a function and hand its result over."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future.
                future.set_exception(error)

        self.post(run)
        return future

    def run_pending(self, *, wait: bool, timeout_s: float | None) -> None:
        """Run everything posted; with ``wait``, first wait for something up to ``timeout_s``."""
        try:
            if wait:
                self._actions.get(timeout=timeout_s)()
            while True:
                self._actions.get_nowait()()
        except queue.Empty:
            return
