"""The keepers behind PostgreSQL: AI tables and KV indexes are refreshed as their owners.

Triggers on their tables notify a channel (dbfront/jobs/source_watch.py). One front of a database
listens, the one whose session has an advisory lock, and logs in through ``front.queue_door`` for
each refresh. After a lost connection another front, or this front, begins anew and looks at all
indexes: a change that was told to nobody is not missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tierkv.dbfront.jobs.embedded_jobs import WrittenTables
from tierkv.dbfront.jobs.job_errors import told
from tierkv.dbfront.jobs.keepers import TOLD_INDEXES, AiTableKeeper, DueTable, KvIndexKeeper
from tierkv.dbfront.jobs.queued_job import QueuedJob
from tierkv.dbfront.jobs.source_watch import TABLE_DIGEST, TABLES_CHANGED
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import TierKVError
from tierkv.parts.job_queue import PostgresDoor, door_refusal
from tierkv.sql.jobs.job_tables import CHANNEL, KEEPERS_LOCK, SCHEMA

if TYPE_CHECKING:
    import psycopg

_LOOK_S: Final = 3.0
"""Pause before another try to get the lock, or to connect."""

_NOT_SEEN: Final = (
    "the user of front.postgres does not see what others keep: let the user who ran `tierkv "
    "postgres-sql` own the tables, or give it BYPASSRLS"
)
_log = logging.getLogger("tierkv.front")


class PostgresKeepers:
    """Refreshes what is due in the database of ``front.postgres``."""

    def __init__(self, dsn: str, door: PostgresDoor) -> None:
        """Note what to use; nothing runs before ``start``.

        Args:
            dsn: PostgreSQL itself; its user sees the tables of jobs of all users.
            door: opens sessions of the owners through a front.
        """
        from psycopg.conninfo import conninfo_to_dict  # optional

        login = conninfo_to_dict(dsn)
        self._database = str(login.get("dbname") or login.get("user") or "")
        self._dsn = dsn
        self._door = door
        self._blind = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, or to wait for the end of the front that listens."""
        self._task = asyncio.create_task(self._run(), name="postgres-keepers")

    async def stop(self) -> None:
        """Stop; a refresh that runs is left, and is repeated by the next front."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def refusal(self, user: str, database: str) -> str:
        """Return why nothing of a user is refreshed here; empty if it is."""
        if database != self._database:
            return f"the front refreshes in database {self._database} only"
        return _NOT_SEEN if self._blind else door_refusal(user, self._door.user)

    async def _run(self) -> None:
        import psycopg

        while True:
            try:
                await self._serve()
            except psycopg.Error as error:
                _log.warning("refreshes wait for PostgreSQL: %s", " ".join(str(error).split()))
            except Exception:  # noqa: BLE001 - outermost loop: the keepers must outlive any bug
                _log.exception("the keepers begin anew")
            await asyncio.sleep(_LOOK_S)

    async def _serve(self) -> None:
        """Get the lock, and refresh until a connection is lost."""
        import psycopg

        name = "tierkv keeper"
        async with await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, application_name=name
        ) as heard:
            while True:
                if await self._has_lock(heard):
                    break
                await asyncio.sleep(_LOOK_S)
            await heard.execute(f"LISTEN {CHANNEL}".encode())
            async with await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, application_name=name
            ) as reader:
                await self._keep(heard, reader)

    async def _has_lock(self, heard: psycopg.AsyncConnection[Any]) -> bool:
        cursor = await heard.execute(
            "SELECT pg_try_advisory_lock(%s), row_security_active(%s)",
            (KEEPERS_LOCK, f"{SCHEMA}.kv_indexes"),
        )
        row = await cursor.fetchone()
        assert row is not None
        has_lock, self._blind = row
        return bool(has_lock)

    async def _keep(
        self, heard: psycopg.AsyncConnection[Any], reader: psycopg.AsyncConnection[Any]
    ) -> None:
        clock, written, sources = SystemClock(), WrittenTables(), WrittenTables()
        reading = asyncio.Lock()

        async def read(sql: str) -> Sequence[tuple[Any, ...]]:
            async with reading:
                return await (await reader.execute(sql.encode())).fetchall()

        async def tell(digest: str | None) -> None:
            """Show that writes wait to be looked at; None: perhaps in all tables."""
            only = "" if digest is None else " AND md5(owner || '/' || name) = %s"
            async with reading:
                await reader.execute(
                    f"UPDATE {SCHEMA}.kv_index_progress SET told = 1 WHERE told = 0{only}".encode(),
                    [] if digest is None else [digest],
                )

        await tell(None)

        async def listen() -> None:
            async for heard_of in heard.notifies():
                if heard_of.payload == TABLES_CHANGED:
                    sources.changed.set()
                elif heard_of.payload.startswith(TABLE_DIGEST):
                    sources.wake(heard_of.payload)
                else:
                    if not written.waits(heard_of.payload):
                        await tell(heard_of.payload)
                    written.wake(heard_of.payload)

        async def note(table: str, due: DueTable, error: str) -> None:
            """Show an error where the owner looks; a refresh without a session can't."""
            async with reading:
                await reader.execute(
                    f"UPDATE {SCHEMA}.{table} SET error = %s, state = CASE state WHEN 'fresh' THEN "
                    "'stale' ELSE state END WHERE owner = %s AND name = %s".encode(),
                    (error, due.user, due.name),
                )

        refresher = self._refresher("AI TABLE", partial(note, "ai_tables"))
        tables = AiTableKeeper(read, refresher, clock, sources)
        refresher = self._refresher("KV INDEX", partial(note, "kv_indexes"))
        indexes = KvIndexKeeper(read, refresher, clock, written, query=TOLD_INDEXES)
        tasks = [asyncio.create_task(each) for each in (listen(), tables.run(), indexes.run())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _refresher(self, kind: str, note: Callable[[DueTable, str], Awaitable[None]]) -> Any:
        async def refresh(due: DueTable) -> None:
            job = QueuedJob(due.name, due.user, due.login, self._database, due.path, "")
            entered = False
            try:
                async with self._door.open(job) as session:
                    entered = True
                    quoted = due.name.replace('"', '""')
                    await session.execute(f'REFRESH {kind} "{quoted}"')
            except TierKVError as error:
                if not entered:
                    await note(due, told(error))
                raise

        return refresh
