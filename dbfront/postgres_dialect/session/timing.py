"""``statement_timeout``: the time limit of a statement, and streams of rows within the limit.

session/session.py starts the timer with each statement. The wire starts the timer earlier and stops
the timer later, so sending rows counts as well. An outer start covers the inner starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tierkv.dbfront.statement_results import Column, RowStream, StatementResult
from tierkv.kvcore.errors import CancelledByUserError, DeadlineError


@dataclass(slots=True)
class TimeLeft:
    """Remaining seconds of a statement; 0 at the start means no limit."""

    seconds: float


class StatementTimer:
    """The timer of one session."""

    def __init__(self, cancel: Callable[[], Awaitable[None]]) -> None:
        """Create the timer; ``cancel`` stops the session's statement."""
        self._cancel = cancel
        self._counts = False

    @contextmanager
    def running(self, left: TimeLeft) -> Iterator[None]:
        """Cancel the enclosed work at the time limit; reduce ``left`` by the time used.

        Raises:
            DeadlineError: the time limit cancelled the statement.
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
    """A RowStream with PostgreSQL's column names and within the statement's time limit."""

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
