"""Jobs in the queue: an entry names the job to run, the job's own tables have the checkpoints.

JobCommands adds jobs to a JobQueue. JobEntries, the handler of the queue's worker, runs the open
partitions through a JobDoor: a session of the job's user goes on, batch after batch, behind the
last checkpoint of a killed worker.

Two workers can't harm a job. The lock of a partition ends with the session of the runner; a
second worker gets 55006 and waits. A runner without the partition's secret writes nothing.

An error of the job (a failing batch, a limit, a cancel) is the job's end: state and reason are in
tierkv.jobs. An error before the job, for example a refused login, is a failed delivery; the job of
a dead letter is failed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from tierkv.dbfront.jobs.job import PartState
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy
from tierkv.dbfront.queue.queue_worker import UnreadableEntryError
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import SCHEMA

QUEUE: Final = "jobs"
GROUP: Final = "fronts"
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
_ENDED_EARLY: Final = (PartState.FAILED, PartState.STOPPED, PartState.CANCELLED)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue: which, whose, and where.

    Attributes:
        name: the job.
        owner: owner of the job's row; empty without logins.
        user: whose session runs the job.
        database: in which the job is.
        path: search path of the session.
        ticket: an entry whose ticket is not the job's own is stale: the job was resumed since.
    """

    name: str
    owner: str
    user: str
    database: str
    path: str
    ticket: str

    def to_json(self) -> str:
        """Return the text of an entry."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> QueuedJob | None:
        """Read an entry; None for one that no front has written."""
        try:
            fields = json.loads(text)
            found = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, TypeError, KeyError):
            return None
        return found if all(isinstance(each, str) for each in asdict(found).values()) else None


@dataclass(frozen=True, slots=True)
class JobQueue:
    """The queue as statements see it.

    Attributes:
        add: adds an entry; QueueLostError if the log is away, SqlError if the queue is full.
        refusal: returns why the worker can't run the jobs of a user; empty if it can.
    """

    add: Callable[[QueuedJob], Awaitable[None]]
    refusal: Callable[[str], str]


class DoorSession(Protocol):
    """A session of a job's user. Both methods raise TierKVError."""

    async def execute(self, sql: str) -> object:
        """Run a statement as a client would."""
        ...

    async def own(self, sql: str) -> Sequence[tuple[object, ...]]:
        """Run a statement about the tables of jobs; return its rows."""
        ...


class JobDoor(Protocol):
    """Opens sessions for the worker of the queue."""

    def open(self, job: QueuedJob) -> AbstractAsyncContextManager[DoorSession]:
        """Log in as the job's user, with the job's search path.

        Raises:
            TierKVError: on entering, the session can't be opened.
        """
        ...


class JobEntries:
    """Implements EntryHandler: runs the job of an entry through a session of the job's user."""

    def __init__(self, door: JobDoor) -> None:
        self._door = door

    async def run(self, body: str) -> None:
        """Run the open partitions; see EntryHandler."""
        await self._until_ended(_read(body))

    async def give_up(self, body: str, reason: str) -> None:
        """Note the reason in the tables of jobs; see EntryHandler."""
        job = _read(body)
        open_states = f"'{PartState.WAITING}', '{PartState.RUNNING}'"
        async with self._door.open(job) as session:
            if await _open_parts(session, job):
                await session.own(
                    f"UPDATE {SCHEMA}.parts SET state = '{PartState.FAILED}', run = '', "
                    f"error = {literal(reason)} WHERE {_is(job)} AND state IN ({open_states})"
                )

    async def _until_ended(self, job: QueuedJob) -> None:
        """Run a job to the end, and try again while the database or the door is away.

        Raises:
            TierKVError: the job can't be run here.
        """
        pause_s = _FIRST_PAUSE_S
        while not await self._attempt(job):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attempt(self, job: QueuedJob) -> bool:
        """Run the open partitions; return False if another try may succeed."""
        try:
            async with self._door.open(job) as session:
                for number in await _open_parts(session, job):
                    await session.execute(f'RUN AI JOB "{job.name}" PARTITION {number}')
            return True
        except TierKVError as error:
            failure = error
        try:
            async with self._door.open(job) as session:
                if not await _open_parts(session, job):
                    return True  # The error is in tierkv.jobs.
        except TierKVError as error:
            failure = error
        if remedy(failure) is JobRemedy.WAIT or failure.sqlstate == "55006":
            return False
        raise failure


def _read(body: str) -> QueuedJob:
    job = QueuedJob.from_json(body)
    if job is None:
        raise UnreadableEntryError("no front has written this entry")
    return job


async def _open_parts(session: DoorSession, job: QueuedJob) -> list[int]:
    """Return the partitions to run; none if the job is gone, has ended, or was resumed since."""
    rows = await session.own(f"SELECT options FROM {SCHEMA}.jobs WHERE {_is(job)}")
    if not rows or json.loads(str(rows[0][0])).get("ticket") != job.ticket:
        return []
    parts = await session.own(
        f"SELECT part, state FROM {SCHEMA}.parts WHERE {_is(job)} ORDER BY part"
    )
    if any(state in _ENDED_EARLY for _, state in parts):
        return []
    return [int(str(part)) for part, state in parts if state != PartState.DONE]


def _is(job: QueuedJob) -> str:
    return f"owner = {literal(job.owner)} AND job = {literal(job.name)}"
