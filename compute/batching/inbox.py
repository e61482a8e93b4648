"""A thread's inbox: other threads put actions in, the owner runs them between its own work.

Used by the engine. Actions run in the order they came; one that raises ends the owner's loop, so
they must not fail on anything a caller can cause.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tierkv.kvcore.errors import TransportError

_T = TypeVar("_T")
_Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Posted:
    """An action, and what happens instead when its owner ended."""

    run: _Action
    refused: _Action | None

    def refuse(self) -> None:
        if self.refused is not None:
            self.refused()


class Inbox:
    """A queue of actions for one owner thread; after ``close`` actions are refused, never lost."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[_Posted] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether something was posted that did not run yet."""
        return not self._actions.empty()

    def post(self, action: _Action, *, refused: _Action | None = None) -> None:
        """Have the owner run an action soon; ``refused`` runs instead if it never will."""
        posted = _Posted(action, refused)
        with self._lock:
            if not self._closed:
                self._actions.put(posted)
                return
        posted.refuse()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the owner run a function and hand its result over.

        The future fails with TransportError when the owner ends first.
        """
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # Whoever waited is gone; a result would raise in the owner's loop.
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the future.
                future.set_exception(error)

        def refused() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(TransportError("the engine is not running"))

        self.post(run, refused=refused)
        return future

    def close(self) -> None:
        """Refuse what is still queued and everything that comes; the owner's last act."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                self._actions.get_nowait().refuse()

    def run_pending(self, *, wait: bool, timeout_s: float | None) -> None:
        """Run everything posted; with ``wait``, first wait for something up to ``timeout_s``."""
        try:
            if wait:
                self._actions.get(timeout=timeout_s).run()
            while True:
                self._actions.get_nowait().run()
        except queue.Empty:
            return
