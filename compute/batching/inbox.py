"""A thread's inbox: any thread posts actions, the owner runs them between its own work.

Used by the engine. Actions run in the order of posting. An action that raises ends the owner's
loop, and must therefore not fail on anything a caller can cause.
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
    """An action, and the action to run instead if the owner has ended."""

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
        """Whether a posted action has not run yet."""
        return not self._actions.empty()

    def post(self, action: _Action, *, refused: _Action | None = None) -> None:
        """Have the owner run an action soon; ``refused`` runs instead if the action never will."""
        posted = _Posted(action, refused)
        with self._lock:
            if not self._closed:
                self._actions.put(posted)
                return
        posted.refuse()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Have the owner run a function and return the result in a future.

        The future fails with TransportError when the owner ends first.
        """
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # The caller has left; setting a result would raise in the owner's loop.
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - passed to the caller by the future.
                future.set_exception(error)

        def refused() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(TransportError("the engine is not running"))

        self.post(run, refused=refused)
        return future

    def close(self) -> None:
        """Refuse queued and future actions; the owner's last act."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while True:
                self._actions.get_nowait().refuse()

    def run_pending(self, *, wait: bool, timeout_s: float | None) -> None:
        """Run all posted actions; with ``wait``, first wait for an action up to ``timeout_s``."""
        try:
            if wait:
                self._actions.get(timeout=timeout_s).run()
            while True:
                self._actions.get_nowait().run()
        except queue.Empty:
            return
