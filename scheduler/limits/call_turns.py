"""Calls that wait for their callers' limits: in turn, and visible in ``tierkv.my_limits``.

A part of scheduler/limits/gate.py, used from one event loop. A statement under a smooth limit may
take hours; the views say how many calls wait, and when the next call goes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from tierkv.kvcore.call_limits import Subject


class CallsWaiting(NamedTuple):
    """Calls of one subject that wait in this process.

    Attributes:
        calls: number of calls without a turn, for a limit of the subject or of the call's others.
        next_s: seconds until the next call goes; None if no call waits, or a running call decides.
    """

    calls: int = 0
    next_s: float | None = None


NONE_WAIT: Final = CallsWaiting()


class CallTurns:
    """Turns of waiting calls, by the subjects of their limits."""

    def __init__(self) -> None:
        self._locks: dict[tuple[Subject, ...], asyncio.Lock] = {}
        self._waiting: Counter[Subject] = Counter()
        self._next_at: dict[Subject, float] = {}

    @contextmanager
    def counted(self, subjects: tuple[Subject, ...]) -> Iterator[None]:
        """Count a call as waiting."""
        self._waiting.update(subjects)
        try:
            yield
        finally:
            self._waiting.subtract(subjects)
            for subject in subjects:
                if not self._waiting[subject]:
                    del self._waiting[subject]

    @asynccontextmanager
    async def turn(self, subjects: tuple[Subject, ...]) -> AsyncIterator[None]:
        """Let waiting calls take one after the other.

        Otherwise a statement's last call would seem to wait for all calls at once.
        """
        lock = self._locks.setdefault(subjects, asyncio.Lock())
        async with lock:
            yield
        if not lock.locked() and self._locks.get(subjects) is lock:
            del self._locks[subjects]

    async def pause(self, subjects: tuple[Subject, ...], wait_s: float) -> None:
        """Wait before a call goes."""
        now_s = asyncio.get_running_loop().time()
        self._next_at |= dict.fromkeys(subjects, now_s + wait_s)
        try:
            await asyncio.sleep(wait_s)
        finally:
            for subject in subjects:
                self._next_at.pop(subject, None)

    def waiting(self, subject: Subject) -> CallsWaiting:
        """Return what waits for the limits of a subject."""
        at = self._next_at.get(subject)
        left_s = None if at is None else max(0.0, at - asyncio.get_running_loop().time())
        return CallsWaiting(self._waiting[subject], left_s)
