"""``statement_timeout``: how long a statement may run, and rows that come within that time.

session/session.py starts the timer with each statement; the wire starts it earlier and stops it
later, so that sending rows counts as well. An outer start covers the inner ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tierkv.dbfront.contracts import Column, RowStream, StatementResult
from tierkv.kvcore.errors import CancelledByUserError, DeadlineError


@dataclass(slots=True)
class TimeLeft:
    """Seconds that a statement may still run; 0 at the start is forever."""

    seconds: float


class StatementTimer:
    """The timer of one session."""

    def __init__(self, cancel: Callable[[], Awaitable[None]]) -> None:
        """``cancel`` stops the session's statement."""
        self._cancel = cancel
        self._counts = False

    @contextmanager
    def running(self, left: TimeLeft) -> Iterator[None]:
        """Cancel what runs inside when the time is over; ``left`` is shorter afterwards.

        Raises:
            DeadlineError: the statement was cancelled for its time.
        """
        if self._counts or not left.seconds:
            yield
            return
        loop = asyncio.get_running_loop()
        cancels: list[asyncio.Future[None]] = []

        def expire() -> None:
            cancels.append(asyncio.ensure_future(self._cancel()))

        started_s, timer = loop.time(), loop.call_later(left.seconds, expire)
        self._counts = True
        try:
            yield
        except CancelledByUserError:
            if not cancels:
                raise
            raise DeadlineError("canceling statement due to statement timeout") from None
        finally:
            self._counts = False
            timer.cancel()
            left.seconds = max(left.seconds - (loop.time() - started_s), 1e-3)


class NamedRows:
    """Rows that come, under PostgreSQL's names and within the statement's time; a RowStream."""

    def __init__(
        self, rows: RowStream, columns: tuple[Column, ...], timer: StatementTimer, left: TimeLeft
    ) -> None:
        self.columns = columns
        self.close = rows.close
        self._rows = rows
        self._timer = timer
        self._left = left

    @property
    def result(self) -> StatementResult | None:
        return self._rows.result

    async def next_rows(self) -> Sequence[tuple[Any, ...]]:
        with self._timer.running(self._left):
            return await self._rows.next_rows()
