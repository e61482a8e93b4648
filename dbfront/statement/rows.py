"""Rows of a running statement, handed from its task to whoever reads them.

The statement puts rows and waits until they are taken, so that a slow reader slows the statement
down; the reader waits for rows or for the end. Sessions make one per streamed statement.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from tierkv.dbfront.contracts import Column, StatementResult

Rows = Sequence[tuple[Any, ...]]


class RowsNotWantedError(Exception):
    """Nobody takes further rows; the statement may end. It never leaves the executor."""


class StatementRows:
    """See the contract RowStream; ``begin`` and ``put`` are the statement's side.

    Attributes:
        columns: known once it has begun.
        result: the statement's, without rows; None until it ended.
    """

    def __init__(self) -> None:
        self.columns: tuple[Column, ...] = ()
        self.result: StatementResult | None = None
        self._task: asyncio.Task[StatementResult] | None = None
        self._ready: deque[Rows] = deque()
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._begun = self._keeping = self._closing = False

    async def begin(self, columns: tuple[Column, ...]) -> None:
        """Rows of these columns will come; returns when the first are wanted.

        Raises:
            RowsNotWantedError: the reader closed.
        """
        self.columns, self._begun = columns, True
        await self._until_wanted()

    async def put(self, rows: Rows) -> None:
        """Hand rows over; returns when they were taken and more are wanted.

        Raises:
            RowsNotWantedError: the reader closed.
        """
        self._ready.append(rows)
        self._wanted.clear()
        await self._until_wanted()

    async def _until_wanted(self) -> None:
        self._changed.set()
        while not (self._keeping or self._closing or self._wanted.is_set()):
            await self._wanted.wait()
        if self._closing:
            raise RowsNotWantedError

    async def started(self, task: asyncio.Task[StatementResult]) -> StatementResult | None:
        """Wait until the statement of ``task`` has begun to give rows; else return its result.

        Whoever is cancelled while waiting stops the statement.
        """
        self._task = task
        try:
            while not self._begun and not task.done():
                await self._change(task)
        except asyncio.CancelledError:
            await self.close()
            raise
        return None if self._begun else await task

    async def next_rows(self) -> Rows:
        """Wait for rows and take them; none are left when the answer is empty.

        Raises:
            TierKVError: the statement failed; rows that were taken before were right.
        """
        assert self._task is not None, "started comes first"
        while not self._ready and not self._task.done():
            self._wanted.set()
            await self._change(self._task)
        if self._ready:
            return self._ready.popleft()
        self.result = await self._task
        return ()

    async def keep_rest(self) -> None:
        """Run the statement to its end now and keep its rows for the reader.

        Its error, if it has one, is the reader's too.
        """
        assert self._task is not None, "started comes first"
        self._keeping = True
        self._wanted.set()
        await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stop the statement: gently while it waits for its reader, else wherever it is."""
        if self._task is None:
            return
        if not self._task.done():
            self._closing = True
            if self._begun and (self._ready or not self._wanted.is_set()):
                self._wanted.set()
            else:
                self._task.cancel()
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # Nobody else asks for it.

    async def _change(self, task: asyncio.Task[StatementResult]) -> None:
        """Wait until rows come or the statement ends."""
        self._changed.clear()
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()


def release(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Free what a statement leaves when its task ends, whether or not its client is still there."""
    work.close()  # A task that is cancelled before its first step never comes to its work.
    if not task.cancelled():
        task.exception()  # After a hang-up no code asks for it, and asyncio would log it.
