"""Jobs in sessions of the embedded database; implements JobSession.

dbfront/postgres_dialect/session/session.py makes an EmbeddedJobs per statement about a job. One
process has the database open and knows all running jobs: ``RunningJobs``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.dbfront.accounts.statistics import AiStats, StatementProgress
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.jobs.job_errors import cancelled_by_client, pause_unless
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import UserError
from tierkv.sql.jobs.job_tables import MAKE_TABLES
from tierkv.sql.jobs.kv_index_command import IndexedText

if TYPE_CHECKING:
    from tierkv.dbfront.jobs.job_commands import RunParts
    from tierkv.dbfront.jobs.queued_job import JobQueue


@dataclass(frozen=True, slots=True)
class WriteMark:
    """How many rows were written to a table by name, and how many writes had no known number."""

    rows: int = 0
    uncounted: int = 0

    def plus(self, rows: int | None) -> WriteMark:
        """Return the mark after one more transaction; None: its number of rows is not known."""
        if rows is None:
            return WriteMark(self.rows, self.uncounted + 1)
        return WriteMark(self.rows + rows, self.uncounted)


class WrittenTables:
    """The tables with KV indexes, or of AI tables, written to since the last look.

    Attributes:
        watched: names of tables whose writes matter; set by the keeper.
        changed: set when a watched table was written to, or an index or AI table was changed.
        indexes: all indexes, for EXPLAIN; set by the keeper.
        numbers: number of the table in the catalogue by digest of the index, since this start.
    """

    def __init__(self) -> None:
        self.watched: frozenset[str] = frozenset()
        self.indexes: tuple[IndexedText, ...] = ()
        self.changed = asyncio.Event()
        self.numbers: dict[str, int] = {}
        self._written: set[str] = set()
        self._marks: dict[str, WriteMark] = {}
        self._seen: dict[str, tuple[str, WriteMark]] = {}

    @property
    def counts(self) -> bool:
        """Whether rows of any table are counted."""
        return bool(self._marks)

    def mark(self, table: str) -> WriteMark:
        """Return what was written to a table up to now, and count its rows from now on."""
        return self._marks.setdefault(table.lower(), WriteMark())

    def seen(self, digest: str, table: str, mark: WriteMark) -> None:
        """Note that an index has all rows that were written before a mark."""
        self._seen[digest] = (table.lower(), mark)

    def unseen(self, digest: str) -> int | None:
        """Return the rows written since the mark of an index; None: not known."""
        table, mark = self._seen.get(digest, ("", WriteMark()))
        now = self._marks.get(table)
        return None if now is None or now.uncounted > mark.uncounted else now.rows - mark.rows

    def forget(self, digest: str) -> None:
        """Drop what is known about an index, and count the rows of its table no more."""
        self.numbers.pop(digest, None)
        table, _ = self._seen.pop(digest, ("", None))
        if table not in {other for other, _ in self._seen.values()}:
            self._marks.pop(table, None)

    def count(self, rows: Mapping[str, int | None]) -> None:
        """Count the rows of a committed transaction by table; None: not known how many."""
        for name, number in rows.items():
            if (mark := self._marks.get(name.lower())) is not None:
                self._marks[name.lower()] = mark.plus(number)

    def note(self, names: Iterable[str]) -> None:
        """Note the commit of a transaction with writes to tables."""
        lower = {name.lower() for name in names}
        found = {name for name in self.watched if name.lower() in lower}
        if found:
            self._written |= found
            self.changed.set()

    def wake(self, name: str) -> None:
        """Have what depends on a table looked at, whether the table is watched already or not."""
        self._written.add(name)
        self.changed.set()

    def waits(self, name: str) -> bool:
        """Return whether a table will be looked at anyway."""
        return name in self._written

    def take(self) -> set[str]:
        """Return the tables written to since the last call."""
        written, self._written = self._written, set()
        return written


def _nobody(client: ClientInfo) -> str:
    """Return the owner of jobs where nobody logs in."""
    return ""


@dataclass(slots=True)
class RunningJobs:
    """State of jobs shared by the sessions of a database.

    Attributes:
        owner_of: returns the owner of a client's jobs.
        clock: for checkpoints.
        tenant_of: returns the tenant of a client's calls.
        run_parts: hands parts to a cluster; None: no cluster is known.
        holders: the sessions with running jobs, by held name.
        read: runs a query of the front over all sessions' data; None: nothing refreshes by itself.
        sources: tables written to, for AI tables; its event is set after each change of one.
        written: tables written to, for KV indexes.
        jobs_changed: set after each CREATE and RESUME of a background job.
        keeps: background work is done here: the keepers run.
        queue: takes queued jobs; None: no worker takes them here.
        making: held while a session makes the tables, if they do not exist.
    """

    owner_of: Callable[[ClientInfo], str] = _nobody
    clock: Clock = field(default_factory=SystemClock)
    run_parts: RunParts | None = None
    holders: dict[str, EmbeddedJobs] = field(default_factory=dict)
    read: Callable[[str], list[tuple[Any, ...]]] | None = None
    sources: WrittenTables = field(default_factory=WrittenTables)
    written: WrittenTables = field(default_factory=WrittenTables)
    jobs_changed: asyncio.Event = field(default_factory=asyncio.Event)
    keeps: bool = False
    queue: JobQueue | None = None
    making: asyncio.Lock = field(default_factory=asyncio.Lock)
    tenant_of: Callable[[ClientInfo], str] = lambda client: client.user


class EmbeddedJobs:
    """A client's session, with the interface of a job."""

    type_function = "typeof"

    def __init__(
        self,
        inner: SqlSession,
        execute: Callable[[str], Awaitable[StatementResult]],
        client: ClientInfo,
        running: RunningJobs,
    ) -> None:
        """Wrap a session; nothing runs before ``prepare``.

        Args:
            inner: the engine's session.
            execute: runs a statement of the client.
            client: whose jobs the session sees.
            running: shared by the sessions of the database.
        """
        self.owner = running.owner_of(client)
        self.user = client.user
        self.tenant = running.tenant_of(client)
        self.stats = AiStats()
        self._inner = inner
        self._execute = execute
        self._running = running
        self._cancelled = asyncio.Event()
        self._report: Callable[[StatementProgress], None] | None = None

    @property
    def in_transaction(self) -> bool:
        """See JobSession."""
        return self._inner.transaction_status != "I"

    async def prepare(self) -> None:
        """See JobSession."""
        self._cancelled.clear()
        async with self._running.making:
            for text in MAKE_TABLES:
                await self._inner.execute_own(text)

    async def execute(self, sql: str) -> StatementResult:
        """See JobSession."""
        if self._cancelled.is_set():
            raise cancelled_by_client()
        before, self._report = self._inner.last_ai_stats, self._inner.on_progress or self._report
        self._inner.on_progress = None  # The client sees the progress of the job instead.
        try:
            return await self._execute(sql)
        except UserError as error:
            error.position = 0  # The client did not write this text.
            raise
        finally:
            self._inner.on_progress = self._report
            if self._inner.last_ai_stats is not before:
                self.stats.add(self._inner.last_ai_stats)

    async def own(self, sql: str) -> Sequence[tuple[str | None, ...]]:
        """See JobSession."""
        rows = await self._inner.execute_own(sql)
        return [tuple(None if value is None else str(value) for value in row) for row in rows]

    async def abandon(self) -> None:
        """See JobSession."""
        if self._inner.transaction_status != "I":
            await self._execute("ROLLBACK")

    async def search_path(self) -> str:
        """See JobSession."""
        ((path,),) = await self.own("SELECT current_setting('search_path')")
        return path or ""

    async def lock(self, name: str) -> bool:
        """See JobSession."""
        return self._running.holders.setdefault(name, self) is self

    async def unlock(self, name: str) -> None:
        """See JobSession."""
        if self._running.holders.get(name) is self:
            del self._running.holders[name]

    async def interrupt(self, name: str) -> None:
        """See JobSession."""
        holder = self._running.holders.get(name)
        if holder is not None:
            await holder.cancel()

    async def cancel(self) -> None:
        """Cancel the job of this session, inside or between statements."""
        self._cancelled.set()
        await self._inner.cancel()

    async def pause(self, seconds: float) -> None:
        """See JobSession."""
        await pause_unless(self._cancelled, seconds)

    def tell(self, notice: Notice | None, done: int, total: int) -> None:
        """See JobSession."""
        if self._report is not None:
            self._report(StatementProgress("llm", 0, done, total, self.stats, notice))
