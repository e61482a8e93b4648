"""Runs a part of a job: batch after batch, each in a transaction with a checkpoint.

``PartRunner.run`` is the story. A batch with a failing row is halved until the row stands
alone; the row is then set aside, and the part goes on behind the row. While a node or the database
is away, a batch is tried again. The answers of a session are kept while a job runs: halves and
second tries pay for no answer twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tierkv.dbfront.jobs.job import AiJob, FailedRow, JobBatch, JobPart, JobSession, PartState
from tierkv.dbfront.jobs.job_book import JobBook
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy, told
from tierkv.dbfront.jobs.job_source import JobSource
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import CallLimitError, CancelledByUserError, SqlError, TierKVError
from tierkv.sql.jobs.job_statement import KeyRange, literal

FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
TRIES_FOR_S: Final = 300.0
"""A batch is tried again for this long before its part fails."""


T = TypeVar("T")


async def try_again(session: JobSession, clock: Clock, work: Callable[[], Awaitable[T]]) -> T:
    """Do work, again and again while a node or the database is away.

    Raises:
        TierKVError: another error of the work, or the last one after TRIES_FOR_S.
    """
    pause_s, since = FIRST_PAUSE_S, clock.now()
    while True:
        try:
            return await work()
        except TierKVError as error:
            await session.abandon()
            if remedy(error) is not JobRemedy.WAIT or clock.now() - since > TRIES_FOR_S:
                raise
            limited = isinstance(error, CallLimitError)
            wait_s = error.retry_after_ms / 1000 if limited else 0.0  # type: ignore[attr-defined]
        await session.pause(max(pause_s, wait_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def set_for_batch(session: JobSession, priority: int | None) -> None:
    """Set what the calls of a batch need until the end of the transaction."""
    shown = await session.execute("SHOW tierkv.answer_cache")
    values: dict[str, object] = {"max_calls": 0}
    if str(shown.rows[0][0]) == "off":
        values["answer_cache"] = "session"
    if priority is not None:
        values["priority"] = priority
    for name, value in values.items():
        await session.execute(f"SET LOCAL tierkv.{name} = '{value}'")


class JobStoppedError(SqlError):
    """The job has reached max_cost_tokens or max_failed."""

    code = "job_stopped"

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, sqlstate="53400", hint=hint)


class PartRunner:
    """Works through one part of a job."""

    def __init__(
        self,
        session: JobSession,
        book: JobBook,
        job: AiJob,
        clock: Clock,
        on_batch: Callable[[AiJob, JobPart], None],
    ) -> None:
        """Note what to run; nothing happens before ``run``.

        Args:
            session: runs the batches.
            book: keeps the checkpoints.
            job: the job.
            clock: for the time that batches take.
            on_batch: called after each batch with the job and the part as they are now.
        """
        self._session = session
        self._book = book
        self._source = JobSource(session)
        self._job = job
        self._clock = clock
        self._on_batch = on_batch
        self._before = job.cost_tokens
        self._failed_before = job.failed
        self._horizon: str | None = None

    async def run(self, number: int) -> JobPart:
        """Run a part from the last checkpoint to the end; return the part.

        Raises:
            TierKVError: the part stops; state and error are noted, and the part can be resumed.
        """
        part = await self._book.begin(self._job, number)
        began = part
        try:
            self._horizon = await self._source.last_key(
                self._job.pieces.keys(self._job.options.key)
            )
            if self._job.options.retry_failed:
                part = await self._retry_failed(part)
            while batch := await self._again(lambda p=part: self._next(p)):  # type: ignore[misc]
                self._check_limits(part, began)
                part = await self._run(part, batch)
        except TierKVError as error:
            await self._session.abandon()
            state, text = _state(error), told(error)
            await self._again(lambda: self._book.end(self._job, part, state, text))
            raise
        ended = part
        await self._again(lambda: self._book.end(self._job, ended, PartState.DONE))
        return await self._book.part(self._job, number)

    async def _next(self, part: JobPart) -> JobBatch | None:
        """Return the next batch up to the last key when the run began.

        Rows that come later are for the next run: a source that always grows, as a table that the
        job itself writes, would have no end.
        """
        if self._horizon is None:
            return None
        high = self._horizon if part.left.high is None else part.left.high
        left = KeyRange(part.left.low, high)
        return await self._source.next_batch(self._job, left, self._job.options.batch)

    def _check_limits(self, part: JobPart, began: JobPart) -> None:
        options = self._job.options
        spent = self._before + _cost(part) - _cost(began)
        if options.max_cost_tokens and spent >= options.max_cost_tokens:
            raise JobStoppedError(
                f"job {self._job.name} has used {spent} of max_cost_tokens "
                f"{options.max_cost_tokens}",
                f"RESUME AI JOB {self._job.name} WITH (max_cost_tokens = ...) goes on.",
            )
        failed = self._failed_before + part.failed - began.failed
        if options.max_failed and failed >= options.max_failed:
            raise JobStoppedError(
                f"job {self._job.name} has set {failed} rows aside, and max_failed is "
                f"{options.max_failed}",
                "See tierkv.job_failures for the reasons. RESUME AI JOB "
                f"{self._job.name} WITH (max_failed = ..., retry_failed = true) tries again.",
            )

    async def _run(self, part: JobPart, batch: JobBatch) -> JobPart:
        """Run a batch, or the halves of a batch with a failing row; return the part afterwards."""
        try:
            return await self._again(lambda: self._write(part, batch))
        except TierKVError as error:
            if remedy(error) is not JobRemedy.SET_ASIDE:
                raise
            failure = error
        if batch.rows <= 1:
            return await self._again(lambda: self._set_aside(part, batch, failure))
        half, middle = max(1, batch.rows // 2), part
        while True:
            left = KeyRange(middle.left.low, batch.keys.high)
            following = await self._source.next_batch(self._job, left, half)
            if following is None:
                return middle
            middle = await self._run(middle, following)

    async def _again(self, work: Callable[[], Awaitable[T]]) -> T:
        return await try_again(self._session, self._clock, work)

    async def _write(self, part: JobPart, batch: JobBatch) -> JobPart:
        """Write the rows and the checkpoint of a batch in a transaction."""
        done = await self._behind(part, batch)
        if done is not None:
            return done
        condition = batch.keys.condition(self._job.options.key, self._job.key_type)
        started = self._clock.now()
        await self._session.execute("BEGIN")
        written = await self._insert(condition)
        busy_s = self._clock.now() - started
        kept = await self._book.checkpoint(self._job, part, batch, written, busy_s)
        return await self._commit(part, kept)

    async def _behind(self, part: JobPart, batch: JobBatch) -> JobPart | None:
        """Return the part if the batch is done already: the COMMIT of an earlier try succeeded."""
        known = await self._book.part(self._job, part.number)
        if known.run != part.run:
            raise _taken(self._job)
        return known if known.at == batch.keys.high and known.at != part.at else None

    async def _set_aside(self, part: JobPart, batch: JobBatch, error: TierKVError) -> JobPart:
        key = batch.keys.high or ""
        row = FailedRow(key, error.sqlstate, " ".join(error.message.split())[:2000])
        await self._session.execute("BEGIN")
        kept = await self._book.set_aside(self._job, part, batch, row, 0.0)
        return await self._commit(part, kept)

    async def _retry_failed(self, part: JobPart) -> JobPart:
        """Ask again about the rows set aside; rows with another failure stay there."""
        for row in await self._book.failed_rows(self._job, part.number):
            try:
                part = await self._again(lambda r=row: self._recover(part, r))  # type: ignore[misc]  # noqa: B023
            except TierKVError as error:
                if remedy(error) is not JobRemedy.SET_ASIDE:
                    raise
        return part

    async def _recover(self, part: JobPart, row: FailedRow) -> JobPart:
        key, kind = self._job.options.key, self._job.key_type
        await self._session.execute("BEGIN")
        written = await self._insert(f"({key}) = CAST({literal(row.key)} AS {kind})")
        return await self._commit(part, await self._book.recover(self._job, part, row, written))

    async def _insert(self, condition: str) -> int:
        """Write the rows for which a condition holds; return their number."""
        await set_for_batch(self._session, self._job.options.priority)
        result = await self._session.execute(self._job.pieces.batch(condition))
        return int(result.command_tag.rsplit(" ", 1)[-1])

    async def _commit(self, part: JobPart, kept: bool) -> JobPart:
        if not kept:
            raise _taken(self._job)
        await self._session.execute("COMMIT")
        self._book.committed()
        known = await self._book.part(self._job, part.number)
        self._on_batch(self._job, known)
        return known


def _cost(part: JobPart) -> int:
    return part.prompt_tokens + part.completion_tokens


def _state(error: TierKVError) -> PartState:
    if isinstance(error, CancelledByUserError) or error.sqlstate == "57014":
        return PartState.CANCELLED
    return PartState.STOPPED if isinstance(error, JobStoppedError) else PartState.FAILED


def _taken(job: AiJob) -> CancelledByUserError:
    return CancelledByUserError(
        f"job {job.name} was cancelled, or is run elsewhere",
        hint=f"RESUME AI JOB {job.name} goes on behind its last batch.",
    )
