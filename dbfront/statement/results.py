"""A statement's result on its way to the client: the command tag, and rows handed to the reader.

The executor converts the engine's raw result with ``client_result``. Sessions create one
StatementRows per streamed statement. Back-pressure: the statement puts rows and waits until the
reader has taken the rows, so a slow reader slows the statement down. The reader waits for rows or
for the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from tierkv.dbfront.databases.duckdb_connection import EngineResult
from tierkv.dbfront.statement_results import Column, Notice, StatementResult
from tierkv.sql.plan.plan import Explain, StatementPlan
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import StatementKind

_COUNT_ONLY: Final = (
    (Column("Count", "BIGINT"),),
    (Column("Success", "BOOLEAN"),),
)
_ROW_KINDS: Final = frozenset({StatementKind.QUERY, StatementKind.SHOW})
_COUNTED: Final = {
    StatementKind.INSERT: "INSERT 0",
    StatementKind.UPDATE: "UPDATE",
    StatementKind.DELETE: "DELETE",
    StatementKind.MERGE: "MERGE",
    StatementKind.COPY: "COPY",
    StatementKind.CREATE_TABLE_AS: "SELECT",
}
_OBJECTS: Final = (
    "TABLE",
    "VIEW",
    "INDEX",
    "SCHEMA",
    "SEQUENCE",
    "TYPE",
    "MACRO",
    "FUNCTION",
    "DATABASE",
    "SECRET",
)


def client_result(
    plan: StatementPlan, result: EngineResult, notices: tuple[Notice, ...] = ()
) -> StatementResult:
    """Convert an engine result to the client's result."""
    counts_only = result.columns in _COUNT_ONLY and plan.returning_sql is None
    if plan.explain is Explain.NO and plan.kind not in _ROW_KINDS and counts_only:
        count = result.rows[0][0] if result.rows else 0
        return StatementResult(command_tag(plan, count), notices=notices)
    tag = command_tag(plan, len(result.rows))
    return StatementResult(tag, result.columns, result.rows, notices)


def command_tag(plan: StatementPlan, count: int) -> str:
    """Return PostgreSQL's command tag for a statement with ``count`` rows."""
    if plan.explain is not Explain.NO:
        return "EXPLAIN"
    if plan.kind is StatementKind.QUERY:
        return f"SELECT {count}"
    if plan.kind in _COUNTED:
        return f"{_COUNTED[plan.kind]} {count}"
    words = [token.upper for token in tokenize(plan.text)[:8]]
    if plan.kind in (StatementKind.CREATE, StatementKind.DROP, StatementKind.ALTER):
        return f"{words[0]} {next((word for word in words if word in _OBJECTS), '')}".strip()
    if words[:2] == ["FORCE", "CHECKPOINT"]:
        return "CHECKPOINT"  # DuckDB's FORCE is only an adverb.
    return words[0] if words else ""


Rows = Sequence[tuple[Any, ...]]


class RowsNotWantedError(Exception):
    """The reader takes no further rows, so the statement may end. Never leaves the executor."""


class StatementRows:
    """Implements RowStream for the reader; the statement calls ``begin`` and ``put``.

    Attributes:
        columns: set by ``begin``.
        result: result of the statement, without rows; None until the statement has ended.
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
        """Announce rows with these columns; return when the reader wants the first rows.

        Raises:
            RowsNotWantedError: the reader closed.
        """
        self.columns, self._begun = columns, True
        await self._until_wanted()

    async def put(self, rows: Rows) -> None:
        """Hand rows over; return when the reader has taken the rows and wants more.

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
        """Wait until the statement of ``task`` produces rows, else return the statement's result.

        Cancelling the wait stops the statement.
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
        """Wait for rows and return them; an empty answer is the end.

        Raises:
            TierKVError: the statement failed; rows returned earlier are valid.
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
        """Run the statement to its end now and keep the remaining rows for the reader.

        An error of the statement is kept for the reader as well.
        """
        assert self._task is not None, "started comes first"
        self._keeping = True
        self._wanted.set()
        await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stop the statement: let it end if the reader is awaited, otherwise cancel the task."""
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
            self._task.exception()  # Mark the exception as retrieved.

    async def _change(self, task: asyncio.Task[StatementResult]) -> None:
        """Wait until rows arrive or the statement ends."""
        self._changed.clear()
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()


def release(task: asyncio.Task[Any], work: Coroutine[Any, Any, Any]) -> None:
    """Release the resources of a finished statement, even if the client is gone."""
    work.close()  # A task cancelled before its first step never starts the coroutine.
    if not task.cancelled():
        task.exception()  # After a hang-up asyncio would log the exception as never retrieved.
