"""Carries out the statements about jobs, in the client's session.

A job runs in its client's session, with the client's rights and settings, and the statement returns
when the job is done: as CREATE INDEX, but with a place to go on from. The sessions of both doors
call ``JobCommands.run``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from tierkv.dbfront.jobs.job import (
    TOLD_EVERY_S,
    AiJob,
    JobPart,
    JobSession,
    PartState,
    end_notice,
    progress_notice,
)
from tierkv.dbfront.jobs.job_book import JobBook
from tierkv.dbfront.jobs.job_runner import PartRunner, try_again
from tierkv.dbfront.jobs.job_source import JobSource, refuse_transaction
from tierkv.dbfront.jobs.job_views import lock_name
from tierkv.dbfront.jobs.queued_job import JobQueue, QueuedJob
from tierkv.dbfront.queue.work_log import QueueLostError
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, TierKVError, UserError
from tierkv.sql.jobs.job_command import JobCommand, JobOptions, JobVerb, job_options
from tierkv.sql.jobs.job_statement import JobStatement, KeyRange, read_job_statement
from tierkv.sql.text.suggest import did_you_mean

RunParts = Callable[[AiJob, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs the parts of a job elsewhere. The callback waits a moment and tells the client how far the
job is; a cancel ends the callback with CancelledByUserError."""

_LOOK_S: Final = 0.5


class JobCommands:
    """The statements about jobs of one session."""

    def __init__(
        self,
        session: JobSession,
        clock: Clock,
        run_parts: RunParts | None = None,
        wake: asyncio.Event | None = None,
        queue: JobQueue | None = None,
    ) -> None:
        """Use a session.

        Args:
            session: runs the batches.
            clock: for checkpoints and speeds.
            run_parts: hands the parts to a cluster; None: this front knows no cluster.
            wake: set for a job in the background; None: nobody runs jobs in the background here.
            queue: takes queued jobs; None: this front has no queue.
        """
        self._session = session
        self._clock = clock
        self._book = JobBook(session, clock)
        self._source = JobSource(session)
        self._run_parts = run_parts
        self._wake = wake
        self._queue = queue
        self._told_s = 0.0

    async def run(self, command: JobCommand) -> StatementResult:
        """Carry out a statement; it returns when the job is done.

        Raises:
            SqlError: 42710 or 42704, the job exists already or not; 55006, it is running; 25001,
                inside a transaction; or what its own statement gives.
            TierKVError: the job stopped and can be resumed.
        """
        refuse_transaction(self._session, command.tag, "job")
        self._told_s = self._clock.now()
        await self._session.prepare()
        notices: tuple[Notice, ...] = ()
        if command.verb is JobVerb.CREATE:
            notices = await self._create(command)
        else:
            job = await self._book.find(command.name)
            if job is None:
                if command.tolerant:
                    return StatementResult(command.tag)
                raise await self._unknown(command)
            notices = await self._on_known(command, job)
        return StatementResult(command.tag, notices=notices)

    async def _on_known(self, command: JobCommand, job: AiJob) -> tuple[Notice, ...]:
        if command.verb is JobVerb.CANCEL:
            # The embedded database refuses two writers of a row, such as a runner's checkpoint.
            count = await try_again(self._session, self._clock, lambda: self._book.cancel(job.name))
            for part in job.parts:
                await self._session.interrupt(self._lock_name(job, part.number))
            return () if count else (Notice("NOTICE", f"job {job.name} is done already"),)
        if command.verb is JobVerb.DROP:
            async with self._alone(job):
                await self._book.drop(job.name)
            return ()
        if command.verb is JobVerb.RUN:
            return await self._run_one(job, command)
        options = job_options(command, job.options)
        if not options.queued:
            options = replace(options, ticket="")
        self._check_runner(options)
        kept = replace(options, retry_failed=False)
        if kept != job.options:
            async with self._alone(job):
                await self._book.change_options(job, kept)
        return await self._work(replace(job, options=options))

    async def _create(self, command: JobCommand) -> tuple[Notice, ...]:
        known = await self._book.find(command.name)
        if known is not None:
            if command.tolerant:
                return (Notice("NOTICE", f"job {command.name} already exists, skipping"),)
            raise SqlError(
                f'job "{command.name}" already exists',
                sqlstate="42710",
                hint=f"RESUME AI JOB {command.name} goes on; DROP AI JOB {command.name} removes "
                "it, without what it has written.",
            )
        options = replace(job_options(command), made_by=self._session.user)
        self._check_runner(options)
        pieces = self._read(command)
        job = await self._checked(command, options, pieces)
        await self._session.execute("BEGIN")
        try:
            if create := pieces.table():
                await self._session.execute(create)
            await self._session.execute(pieces.batch("FALSE"))
            await self._book.add(job)
            await self._session.execute("COMMIT")
        except TierKVError:
            await self._session.abandon()
            raise
        return await self._work(job)

    def _read(self, command: JobCommand) -> JobStatement:
        try:
            return read_job_statement(command.statement)
        except UserError as error:
            if error.position:
                error.position += command.offset
            raise

    async def _checked(
        self, command: JobCommand, options: JobOptions, pieces: JobStatement
    ) -> AiJob:
        """Return the new job; refuse keys that can't cut its rows into batches."""
        kind, rows = await self._source.check_key(pieces, options.key)
        keys = pieces.keys(options.key)
        count = options.partitions or (8 if options.runner == "ray" else 1)
        cuts = await self._source.cuts(keys, count) if count > 1 else []
        bounds = zip([None, *cuts], [*cuts, None], strict=True)
        parts = tuple(
            JobPart(number, KeyRange(low, high)) for number, (low, high) in enumerate(bounds, 1)
        )
        return AiJob(
            command.name,
            command.statement,
            pieces,
            replace(options, partitions=len(parts)),
            kind,
            await self._session.search_path(),
            rows,
            self._clock.wall(),
            parts,
        )

    async def _work(self, job: AiJob) -> tuple[Notice, ...]:
        """Run the parts of a job to their ends, or leave them to the keeper or the queue."""
        if job.options.queued and self._queue is not None:
            return (await self._queue_up(job, self._queue),)
        if job.options.background and self._wake is not None:
            async with self._alone(job):
                await self._book.reopen(job)
            self._wake.set()
            text = f"job {job.name} runs in the background; tierkv.jobs shows how far it is"
            return (Notice("NOTICE", text),)
        await self._source.check_path(f"job {job.name}", job.path)
        async with self._alone(job):
            if job.options.runner == "ray":
                await self._need_cluster()(job, lambda: self._look(job))
            else:
                for part in job.parts:
                    await self._run_part(job, part.number)
        return await self._end(job.name)

    async def _queue_up(self, job: AiJob, queue: JobQueue) -> Notice:
        """Let the worker of any front run a job; an older entry of the queue is stale from now."""
        options = replace(job.options, ticket=secrets.token_hex(8))
        async with self._alone(job):
            await self._book.change_options(job, options)
            await self._book.reopen(job)
        ((database,),) = await self._session.own("SELECT current_database()")
        owner, user = self._session.owner, self._session.user
        entry = QueuedJob(job.name, owner, user, database or "", job.path, options.ticket)
        try:
            await queue.add(entry)
        except (QueueLostError, SqlError) as error:
            raise SqlError(
                f"job {job.name} is there, but not in the queue: {error.message}",
                sqlstate=error.sqlstate,
                hint=f"RESUME AI JOB {job.name} queues it again; RESUME AI JOB {job.name} WITH "
                "(queued = off) runs it in this session.",
            ) from None
        return Notice("NOTICE", f"job {job.name} waits in the queue: see tierkv.jobs")

    async def _run_one(self, job: AiJob, command: JobCommand) -> tuple[Notice, ...]:
        if not 1 <= command.partition <= len(job.parts):
            raise SqlError(f"job {job.name} has {len(job.parts)} partitions", sqlstate="22023")
        job = replace(job, options=job_options(command, job.options))
        await self._source.check_path(f"job {job.name}", job.path)
        async with self._alone(job, command.partition):
            left_to_front = job.options.background or job.options.queued
            if left_to_front and not await self._is_open(job, command.partition):
                return ()  # Cancelled before the front took it.
            await self._run_part(job, command.partition)
        return ()

    async def _is_open(self, job: AiJob, number: int) -> bool:
        current = await self._book.find(job.name)
        open_states = (PartState.WAITING, PartState.RUNNING)
        return current is not None and current.parts[number - 1].state in open_states

    async def _run_part(self, job: AiJob, number: int) -> None:
        current = await self._book.find(job.name) or job
        current = replace(current, options=job.options)
        runner = PartRunner(self._session, self._book, current, self._clock, self._tell)
        await runner.run(number)

    async def _end(self, name: str) -> tuple[Notice, ...]:
        job = await self._book.find(name)
        if job is None:
            return ()
        rows, _, _ = await self._source.count_source(job.pieces.keys(job.options.key))
        return (end_notice(job, rows),)

    @asynccontextmanager
    async def _alone(self, job: AiJob, number: int | None = None) -> AsyncIterator[None]:
        """Hold a job, or one part of it; refuse if another session runs it.

        Raises:
            SqlError: 55006.
        """
        numbers = [part.number for part in job.parts] if number is None else [number]
        if number is None and job.options.runner == "ray":
            numbers = [0]  # Its runners hold the parts.
        names = [self._lock_name(job, each) for each in numbers]
        held: list[str] = []
        try:
            for name in names:
                if not await self._session.lock(name):
                    raise SqlError(
                        f"job {job.name} is running in another session",
                        sqlstate="55006",
                        hint=f"CANCEL AI JOB {job.name} stops it; tierkv.jobs shows how far it is.",
                    )
                held.append(name)
            yield
        finally:
            for name in held:
                await self._session.unlock(name)

    def _lock_name(self, job: AiJob, number: int) -> str:
        return lock_name(self._session.owner, job.name, number)

    def _tell(self, job: AiJob, part: JobPart) -> None:
        """Tell the client how far a job is, but not too often."""
        parts = tuple(part if each.number == part.number else each for each in job.parts)
        self._tell_progress(replace(job, parts=parts))

    async def _look(self, job: AiJob) -> None:
        await self._session.pause(_LOOK_S)
        current = await self._book.find(job.name)
        if current is not None:
            self._tell_progress(current)

    def _tell_progress(self, job: AiJob) -> None:
        now_s = self._clock.now()
        due = now_s - self._told_s >= TOLD_EVERY_S
        if due:
            self._told_s = now_s
        notice = progress_notice(job) if due else None
        self._session.tell(notice, job.examined, max(job.total, job.examined))

    def _check_runner(self, options: JobOptions) -> None:
        """Refuse a runner that is not there."""
        if options.runner == "ray":
            self._need_cluster()
        if options.background and self._wake is None:
            raise FeatureNotSupportedError(
                "nobody runs jobs in the background here",
                hint="A front over its embedded database does; elsewhere the job runs in your "
                "session, and RESUME JOB goes on.",
            )
        if options.queued:
            self._check_queue()
        if options.background or options.queued:
            where = "in the queue" if options.queued else "in the background"
            both = options.background and options.queued
            for what, is_set in (
                ("runner = 'ray'", options.runner == "ray"),
                ("retry_failed", options.retry_failed),
                ("background", both),
            ):
                if is_set:
                    raise FeatureNotSupportedError(
                        f"a job {where} can't have {what}",
                        hint="Leave one of the two out.",
                    )

    def _check_queue(self) -> None:
        if self._queue is None:
            raise FeatureNotSupportedError(
                "this front has no queue for jobs",
                hint="A front that serves an embedded database has one; behind PostgreSQL set "
                "front.queue_door. Or leave queued out, and the job runs in your session.",
            )
        if why := self._queue.refusal(self._session.user):
            raise FeatureNotSupportedError(
                why,
                hint="Leave queued out, and the job runs in your session. A front.queue_door "
                "without a user logs in as the owner of each job.",
            )

    def _need_cluster(self) -> RunParts:
        if self._run_parts is None:
            raise FeatureNotSupportedError(
                "this front knows no Ray cluster",
                hint="Set front.ray_address and front.ray_door, or use runner = 'local'.",
            )
        return self._run_parts

    async def _unknown(self, command: JobCommand) -> SqlError:
        names = await self._book.names()
        return SqlError(
            f'job "{command.name}" does not exist',
            sqlstate="42704",
            hint=did_you_mean(command.name, names) if names else "There is no job yet.",
        )
