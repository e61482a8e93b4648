"""``DialectServer``: opens sessions that speak PostgreSQL's SQL, over an engine's own sessions.

The front creates one server over its database. The wire, REST and ``tierkv.connect()`` open their
sessions here, so a statement has the same meaning through each. The catalog is created when a
statement first names the catalog, or at the first session if views of the database file name the
catalog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.jobs.embedded_jobs import RunningJobs
from tierkv.dbfront.postgres_dialect.catalog.install import SharedCatalog
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.postgres_dialect.session.session import DialectSession, WireNeeds
from tierkv.dbfront.sql_session import SqlServer

if TYPE_CHECKING:
    from tierkv.dbfront.jobs.keepers import DueTable, OpenJob

_NAMED_BY_CLIENTS: Final = (
    f"SELECT 1 FROM duckdb_views() WHERE NOT internal AND contains(sql, '{DATABASE}') UNION ALL "
    "SELECT 1 FROM duckdb_functions() WHERE NOT internal AND function_type LIKE '%macro' "
    f"AND contains(macro_definition, '{DATABASE}') LIMIT 1"
)


class DialectServer:
    """Opens sessions; implements SqlServer."""

    def __init__(
        self, engine: SqlServer, *, keeps_tables: bool = False, jobs: RunningJobs | None = None
    ) -> None:
        """Wrap an engine, which ``close`` closes.

        Args:
            engine: opens the underlying sessions.
            keeps_tables: the database, and perhaps its views, existed before this process.
            jobs: what the sessions share about jobs; by default nobody owns jobs.
        """
        self._engine = engine
        self._jobs = jobs or RunningJobs()
        self._catalog = SharedCatalog(engine)
        self._unread = keeps_tables
        self._keeping: list[asyncio.Task[None]] = []

    async def open_session(
        self, client: ClientInfo, wire: WireNeeds | None = None
    ) -> DialectSession:
        """Open a session; ``wire`` is given for a client of the wire protocol.

        Raises:
            UserError: a ``tierkv.*`` setting among the client's options is unusable.
        """
        inner = await self._engine.open_session(client)
        if self._unread:
            self._unread = False
            if await inner.execute_own(_NAMED_BY_CLIENTS):
                await self._catalog.need()
        return DialectSession(inner, client, self._catalog, wire, self._jobs)

    def start_keepers(self) -> None:
        """Refresh AI tables when they are due, and run background jobs, until ``close``."""
        from tierkv.dbfront.jobs.keepers import AiTableKeeper, JobKeeper, KvIndexKeeper

        jobs = self._jobs
        read_now = jobs.read
        if read_now is not None:

            async def read(sql: str) -> list[tuple[Any, ...]]:
                return await asyncio.to_thread(read_now, sql)

            tables = AiTableKeeper(read, self._refresh, jobs.clock, jobs.sources)
            keeper = JobKeeper(read, self._run_job, jobs.jobs_changed)
            indexes = KvIndexKeeper(read, self._refresh_index, jobs.clock, jobs.written)
            jobs.keeps = True
            self._keeping = [asyncio.create_task(each.run()) for each in (tables, indexes, keeper)]

    async def _refresh(self, table: DueTable) -> None:
        async with self.background_session(table.user, table.path) as session:
            await session.execute(f'REFRESH AI TABLE "{table.name}"')

    async def _refresh_index(self, index: DueTable) -> None:
        async with self.background_session(index.user, index.path) as session:
            await session.execute(f'REFRESH KV INDEX "{index.name}"')

    async def _run_job(self, job: OpenJob) -> None:
        async with self.background_session(job.user, job.path) as session:
            for number in job.partitions:
                await session.execute(f'RUN AI JOB "{job.name}" PARTITION {number}')

    @asynccontextmanager
    async def background_session(self, user: str, path: str) -> AsyncIterator[DialectSession]:
        """Open a session of the front, as a user and with a search path."""
        session = await self.open_session(ClientInfo(user, application_name="tierkv background"))
        try:
            doubled = path.replace("'", "''")
            await session.execute_own(f"SET search_path = '{doubled}'")
            yield session
        finally:
            await session.close()

    async def close(self) -> None:
        """Close the engine with all its sessions."""
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        await self._catalog.close()
        await self._engine.close()
