"""The queue of AI jobs in a front: the log, the worker, and the doors of the jobs.

Over an embedded database the log is a file beside the database, and the worker opens sessions as
the keepers do. Behind PostgreSQL the log is in ``front.shared_state`` if that is set,
and the worker logs in through ``front.queue_door``, as any client does.

``ray_runner`` runs jobs with ``runner = 'ray'``: a driver program hands the parts to a Ray that
runs already. tierkv/on_ray/job_driver.py is a process of its own, because Ray's client library
starts threads and signal handlers, which don't belong into a front. Killing the driver ends its
tasks, and with the tasks their sessions at the fronts.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tierkv.dbfront.accounts.statistic_tables import MEMORY
from tierkv.dbfront.jobs.job import AiJob
from tierkv.dbfront.jobs.job_commands import RunParts
from tierkv.dbfront.jobs.queued_job import (
    GROUP,
    QUEUE,
    DoorSession,
    JobDoor,
    JobEntries,
    JobQueue,
    QueuedJob,
)
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.queue.queue_worker import QueueWorker
from tierkv.dbfront.queue.work_log import WorkLog
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import ConfigError, SqlError
from tierkv.settings import IN_MEMORY, FrontSettings

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")


def work_log(settings: FrontSettings) -> tuple[WorkLog, bool]:
    """Return the log of a front, which opens when first used, and whether it outlives the front."""
    clock = SystemClock()
    if settings.postgres and settings.shared_state:
        from tierkv.dbfront.queue.valkey_log import ValkeyLog  # optional client

        return ValkeyLog(settings.shared_state, clock), True
    place = settings.stats_path if settings.postgres else settings.database
    if not place or place == IN_MEMORY:
        return FileLog(MEMORY, clock), False
    return FileLog(f"{Path(place).expanduser()}.queue", clock), True


class FrontQueue:
    """The log and the worker of a front process.

    Attributes:
        log: of this front, or of several; who stops the queue closes the log later.
        lasts: the log outlives this process.
        front: names this process among all consumers.
        jobs: the queue as statements see it; None: no worker could run the jobs.
        postgres_door: how the front logs in behind PostgreSQL; None: not at all.
    """

    def __init__(self, settings: FrontSettings, sql: DialectServer) -> None:
        """Prepare; nothing runs before ``start``.

        Args:
            settings: of the front.
            sql: opens sessions over the embedded database.

        Raises:
            ConfigError: ``front.queue_door`` is set without psycopg, or is no DSN.
        """
        self.log, self.lasts = work_log(settings)
        self.front = f"{socket.gethostname()[:100]}:{os.getpid()}"
        self._settings = settings
        self._worker: asyncio.Task[None] | None = None
        self._door: JobDoor | None = None
        self.postgres_door: PostgresDoor | None = None
        user = ""
        if not settings.postgres:
            self._door = EmbeddedDoor(sql)
        elif settings.queue_door:
            self._door = self.postgres_door = PostgresDoor(settings.queue_door)
            user = self.postgres_door.user
        self.jobs = (
            None if self._door is None else JobQueue(self._add, lambda u: door_refusal(u, user))
        )

    def start(self) -> None:
        """Begin to take jobs."""
        if self._door is None:
            return
        worker = QueueWorker(
            self.log,
            JobEntries(self._door),
            queue=QUEUE,
            group=GROUP,
            front=self.front,
            claim_s=self._settings.queue_claim_s,
            alone=not self._settings.postgres,
        )
        self._worker = asyncio.create_task(worker.run(), name="job-queue")

    async def stop(self) -> None:
        """Give the running job back to the queue."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
            self._worker = None

    async def _add(self, job: QueuedJob) -> None:
        await self.log.add(QUEUE, job.to_json())


def door_refusal(user: str, door_user: str) -> str:
    """Return why a door can't open a user's sessions; empty if it can."""
    if not door_user or user == door_user:
        return ""
    return f"front.queue_door logs in as {door_user}, so it can't work as {user}"


class EmbeddedDoor:
    """Implements JobDoor over the embedded database of this process."""

    def __init__(self, sql: DialectServer) -> None:
        self._sql = sql

    @asynccontextmanager
    async def open(self, job: QueuedJob) -> AsyncIterator[DoorSession]:
        async with self._sql.background_session(job.user, job.path) as session:
            yield _EmbeddedSession(session.execute, session.execute_own)


class _EmbeddedSession:
    """A session of the front's keepers; ``own`` may read the tables of jobs."""

    def __init__(
        self,
        execute: Callable[[str], Awaitable[object]],
        own: Callable[[str], Awaitable[Sequence[tuple[Any, ...]]]],
    ) -> None:
        self._execute = execute
        self._own = own

    async def execute(self, sql: str) -> object:
        return await self._execute(sql)

    async def own(self, sql: str) -> Sequence[tuple[object, ...]]:
        return await self._own(sql)


class PostgresDoor:
    """Implements JobDoor through the SQL door of a front over PostgreSQL.

    Attributes:
        user: as whom the DSN logs in; empty: as the user of each job.
    """

    def __init__(self, dsn: str) -> None:
        """Read a DSN.

        Raises:
            ConfigError: psycopg is missing, or the DSN is unreadable.
        """
        try:
            from psycopg import Error  # optional
            from psycopg.conninfo import conninfo_to_dict
        except ImportError:
            raise ConfigError(
                "front.queue_door needs psycopg", hint="Run `pip install 'tierkv[postgres]'`."
            ) from None
        try:
            self._login = conninfo_to_dict(dsn)
        except Error as error:
            raise ConfigError(
                f"front.queue_door is no DSN: {' '.join(str(error).split())}",
                hint="Write host=front1,front2 port=5433.",
            ) from None
        self.user = str(self._login.get("user") or "")

    @asynccontextmanager
    async def open(self, job: QueuedJob) -> AsyncIterator[DoorSession]:
        import psycopg

        login = {"user": job.user, "connect_timeout": "10", "application_name": "tierkv queue"}
        login |= {name: str(value) for name, value in self._login.items()}
        login["dbname"] = job.database
        connection = await _told(psycopg.AsyncConnection.connect(**login, autocommit=True))  # type: ignore[arg-type]
        try:
            session = _PostgresSession(connection)
            if job.owner != job.user:
                owner = job.owner.replace('"', '""')
                await session.execute(f'SET ROLE "{owner}"')
            path = job.path.replace("'", "''")
            await session.execute(f"SELECT set_config('search_path', '{path}', false)")
            yield session
        finally:
            await connection.close()


class _PostgresSession:
    """A session through a front's door."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def execute(self, sql: str) -> object:
        return await _told(self._connection.execute(sql.encode()))

    async def own(self, sql: str) -> Sequence[tuple[object, ...]]:
        cursor = await _told(self._connection.execute(sql.encode()))
        return [] if cursor.description is None else await _told(cursor.fetchall())


async def _told(work: Awaitable[T]) -> T:
    """Wait for psycopg.

    Raises:
        SqlError: its error; 08006 if no server has told a state.
    """
    import psycopg

    try:
        return await work
    except psycopg.Error as error:
        text = error.diag.message_primary or " ".join(str(error).split())
        state = error.sqlstate or _lost_state(error)
        raise SqlError(text[:2_000], sqlstate=state) from None


def _lost_state(error: Exception) -> str:
    """Return the SQLSTATE of a failed login, left out by psycopg."""
    text = str(error)
    refused = ("password", "authentication", "no pg_hba.conf", "does not exist", "not permitted")
    return "28000" if any(each in text for each in refused) else "08006"


_CPUS_PER_TASK: Final = 0.1
"""A task waits for a front most of the time."""

_MOST_SHOWN: Final = 2_000


def ray_runner(settings: FrontSettings) -> RunParts | None:
    """Return the runner of jobs on Ray; None without ``front.ray_address``."""
    if not settings.ray_address or not settings.ray_door:
        return None

    async def run_parts(job: AiJob, look: Callable[[], Awaitable[None]]) -> None:
        retries = " WITH (retry_failed = true)" if job.options.retry_failed else ""
        request = {
            "address": settings.ray_address,
            "door": settings.ray_door,
            "cpus": _CPUS_PER_TASK,
            "statements": [
                f'RUN AI JOB "{job.name}" PARTITION {part.number}{retries}' for part in job.parts
            ],
        }
        await _run_driver(json.dumps(request).encode(), look)

    return run_parts


async def _run_driver(request: bytes, look: Callable[[], Awaitable[None]]) -> None:
    """Run the driver to its end.

    Raises:
        SqlError: the error of a partition; 58000, Ray is not there.
    """
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tierkv.on_ray.job_driver",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    ending = asyncio.create_task(driver.communicate(request))
    try:
        while not ending.done():
            await look()
        told, trouble = ending.result()
    finally:
        ending.cancel()
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    if driver.returncode == 0:
        return
    try:
        sqlstate, _, message = json.loads(told or b"")["error"].partition(" ")
    except ValueError:
        lines = trouble.decode("utf-8", "replace").strip().splitlines()
        raise SqlError(
            "jobs can't be run on Ray",
            sqlstate="58000",
            detail=lines[-1][:_MOST_SHOWN] if lines else "",
            hint="Check front.ray_address, and that tierkv[ray] is installed here.",
        ) from None
    raise SqlError(message[:_MOST_SHOWN], sqlstate=sqlstate)
