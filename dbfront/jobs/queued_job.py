"""A job in the queue, as the text of an entry; and the interface of a front to the queue.

JobCommands adds jobs to a JobQueue; job_entries.py runs those of the queue, each through a JobDoor.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Final, Protocol

QUEUE: Final = "jobs"
GROUP: Final = "fronts"


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
