"""A job and its parts as values, how far a job is, and the session through which jobs run.

dbfront/jobs/job_book.py reads and writes the values; embedded_jobs.py and
dbfront/postgres/statements/relayed_jobs.py implement JobSession.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.sql.jobs.job_command import JobOptions
from tierkv.sql.jobs.job_statement import JobStatement, KeyRange


class PartState(StrEnum):
    """What a part of a job is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    STOPPED = "stopped"  # at max_cost_tokens or max_failed


@dataclass(frozen=True, slots=True)
class JobPart:
    """A range of a job's keys; a runner works through the range from the lowest key.

    Attributes:
        number: from 1.
        bounds: keys of the part.
        at: the last key that is done; None before the first batch.
        run: secret of the runner that may write checkpoints; a new runner writes a new one.
        state: see PartState.
        examined, written, failed: rows of the source that are done, rows of the target, rows set
            aside.
        calls, prompt_tokens, hit_tokens, completion_tokens: of the part's AI calls.
        busy_s: seconds that runners have worked on it.
        updated_s: Unix time of the last checkpoint.
        error: why the part does not go on; empty otherwise.
    """

    number: int
    bounds: KeyRange
    at: str | None = None
    run: str = ""
    state: PartState = PartState.WAITING
    examined: int = 0
    written: int = 0
    failed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    completion_tokens: int = 0
    busy_s: float = 0.0
    updated_s: float = 0.0
    error: str = ""

    @property
    def left(self) -> KeyRange:
        """The keys that are not done."""
        return KeyRange(self.bounds.low if self.at is None else self.at, self.bounds.high)


@dataclass(frozen=True, slots=True)
class AiJob:
    """A job.

    Attributes:
        name: unique among the owner's jobs.
        statement: the text that runs.
        pieces: the text in pieces.
        options: how it runs.
        key_type: SQL type of the key.
        path: search path of the session that made it.
        total: rows of the source at the beginning.
        created_s: Unix time.
        parts: in order of their keys.
    """

    name: str
    statement: str
    pieces: JobStatement
    options: JobOptions
    key_type: str
    path: str
    total: int
    created_s: float
    parts: tuple[JobPart, ...] = ()

    @property
    def cost_tokens(self) -> int:
        """Tokens of prompts and answers so far."""
        return sum(part.prompt_tokens + part.completion_tokens for part in self.parts)

    @property
    def examined(self) -> int:
        """Rows of the source that are done."""
        return sum(part.examined for part in self.parts)

    @property
    def failed(self) -> int:
        """Rows set aside."""
        return sum(part.failed for part in self.parts)


@dataclass(frozen=True, slots=True)
class JobBatch:
    """The rows of a transaction: keys, and the number of rows when counted."""

    keys: KeyRange
    rows: int


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row set aside: the row's key, and the error of the row alone."""

    key: str
    sqlstate: str
    message: str


class JobSession(Protocol):
    """The session in which a job runs, on either database.

    1. ``execute`` runs a statement as the client would, AI calls included, and raises any error.
       ``stats`` are the counters of all calls of the session up to now, and only grow.
    2. ``own`` runs a statement of the front and returns the rows as text.
    3. Both take part in the transaction that ``execute("BEGIN")`` opens. ``abandon`` rolls it back
       in any state.
    4. ``lock`` returns whether this session alone holds a name now. The name is free again after
       ``unlock`` or after any end of the session. ``interrupt`` cancels the statement of
       a name's holder, if the holder is a session of this process.
    5. ``pause`` waits; CancelledByUserError if the client cancels meanwhile.
    6. ``tell`` shows the client a notice at once, and how much is done.
    7. ``owner`` owns the session's visible jobs; empty without logins. ``user`` is the client's
       name, ``tenant`` that of its calls.
    8. ``prepare`` comes first and makes the tables of jobs; an error if they can't be made here.
    """

    @property
    def owner(self) -> str: ...

    @property
    def user(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def stats(self) -> AiStats: ...

    @property
    def in_transaction(self) -> bool: ...

    @property
    def type_function(self) -> str: ...

    async def prepare(self) -> None: ...

    async def execute(self, sql: str) -> StatementResult: ...

    async def own(self, sql: str) -> Sequence[tuple[str | None, ...]]: ...

    async def abandon(self) -> None: ...

    async def search_path(self) -> str: ...

    async def lock(self, name: str) -> bool: ...

    async def unlock(self, name: str) -> None: ...

    async def interrupt(self, name: str) -> None: ...

    async def pause(self, seconds: float) -> None: ...

    def tell(self, notice: Notice | None, done: int, total: int) -> None: ...


TOLD_EVERY_S: Final = 5.0
"""Shortest time between two notices."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is.

    Attributes:
        done, total: rows of the source.
        rate: rows per second while runners worked; None before the first batch.
        eta_s: seconds left at this speed; None without a speed, or at the end.
        hit_ratio: share of prompt tokens that were not computed; None without prompts.
    """

    done: int
    total: int
    rate: float | None
    eta_s: float | None
    hit_ratio: float | None

    @classmethod
    def of(cls, parts: tuple[JobPart, ...], total: int) -> JobProgress:
        """Add the parts up; the speeds of parts running at the same time are added."""
        done = sum(part.examined for part in parts)
        running = [part for part in parts if part.state is PartState.RUNNING] or list(parts)
        rates = [part.examined / part.busy_s for part in running if part.busy_s > 0]
        rate = sum(rates) if rates else None
        if rate is not None and running == list(parts) and len(parts) > 1:
            rate = done / max(sum(part.busy_s for part in parts), 1e-9)
        total = max(total, done)
        left = total - done
        prompts = sum(part.prompt_tokens for part in parts)
        return cls(
            done,
            total,
            rate,
            left / rate if rate and left else None,
            sum(part.hit_tokens for part in parts) / prompts if prompts else None,
        )


def progress_notice(job: AiJob) -> Notice:
    """Return the notice about a running job."""
    progress = JobProgress.of(job.parts, job.total)
    share = 100 * progress.done // max(progress.total, 1)
    text = f"job {job.name}: {progress.done} of {progress.total} rows ({share} %)"
    if progress.rate is not None:
        text += f", {progress.rate:.1f} rows/s"
    if progress.eta_s is not None:
        text += f", {_duration(progress.eta_s)} left"
    if progress.hit_ratio is not None:
        text += f", {100 * progress.hit_ratio:.0f} % of prompt tokens from the cache"
    if job.failed:
        text += f", {job.failed} set aside"
    return Notice("NOTICE", text)


def end_notice(job: AiJob, now_rows: int) -> Notice:
    """Return the notice about a job that is done.

    Args:
        job: the job.
        now_rows: rows that the source has at the end.
    """
    written = sum(part.written for part in job.parts)
    text = f"job {job.name} is done: {job.examined} rows read, {written} written"
    detail = hint = ""
    if job.failed:
        text += f", {job.failed} set aside"
        hint = (
            f"See tierkv.job_failures for the reasons. RESUME AI JOB {job.name} WITH "
            "(retry_failed = true) asks again."
        )
    if now_rows != job.examined:
        detail = (
            f"The source changed: it has {now_rows} rows now. RESUME reads new rows with higher "
            "keys; new rows with lower keys are not read."
        )
    return Notice("NOTICE", text, detail=detail, hint=hint)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"
