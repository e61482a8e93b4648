"""The worker of a front: runs the jobs of the queue, each alone.

Theory of operation. An entry of the queue names the job to run; the job's own tables have the
checkpoints. The worker runs the open partitions through a session of the job's user, batch after
batch, and acknowledges the entry at the end. Meanwhile the worker touches the entry. If the worker
is killed, the entry becomes idle. The worker of another front claims the entry and goes on behind
the last checkpoint.

Two workers can't harm a job. The lock of a partition ends with the session of the runner; a
second worker gets 55006 and waits. A runner without the partition's secret writes nothing. A worker
thought dead learns the new holder of the entry from the next touch, and stops.

An error of the job (a failing batch, a limit, a cancel) is the job's end: state and reason are in
tierkv.jobs. An error before the job, for example a refused login, is a failed delivery. After
``limits.MAX_QUEUE_DELIVERIES`` deliveries the entry is a dead letter, and the job is failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from typing import Final

from tierkv.dbfront.jobs.job import PartState
from tierkv.dbfront.jobs.job_errors import JobRemedy, remedy, told
from tierkv.dbfront.jobs.queued_job import GROUP, QUEUE, DoorSession, JobDoor, QueuedJob
from tierkv.dbfront.queue.work_log import QueueEntry, QueueLostError, WorkLog
from tierkv.kvcore import limits
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.job_statement import literal
from tierkv.sql.jobs.job_tables import SCHEMA

_BLOCK_S: Final = 2.0
"""Longest wait for a new entry; idle entries are looked for in between."""

_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
_TOUCHES: Final = 5
"""Touches within the time after which an entry counts as left."""

_ENDED_EARLY: Final = (PartState.FAILED, PartState.STOPPED, PartState.CANCELLED)
_log = logging.getLogger("tierkv.queue")


class QueueWorker:
    """Runs queued jobs until it is cancelled.

    Attributes:
        name: the consumer's name, unique among all workers.
    """

    def __init__(
        self, work_log: WorkLog, door: JobDoor, *, front: str, claim_s: float, alone: bool
    ) -> None:
        """Note what to use.

        Args:
            work_log: has the entries.
            door: opens the sessions.
            front: begins the consumer's name.
            claim_s: idle time after which an entry counts as left by a dead worker.
            alone: no other process takes entries; an entry pending at the start was left.
        """
        self.name = f"{front}/{secrets.token_hex(4)}"
        self._work_log = work_log
        self._door = door
        self._claim_s = claim_s
        self._alone = alone

    async def run(self) -> None:
        """Take entries and run their jobs; wait while the log is away."""
        pause_s, min_idle_s = _FIRST_PAUSE_S, 0.0 if self._alone else self._claim_s
        while True:
            try:
                while entries := await self._next(min_idle_s):
                    pause_s = _FIRST_PAUSE_S
                    await self._serve(entries[0])
                min_idle_s = self._claim_s
            except QueueLostError as error:
                if pause_s == _FIRST_PAUSE_S:
                    _log.warning("queued jobs wait: %s", error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _next(self, min_idle_s: float) -> list[QueueEntry]:
        """Return an abandoned entry, or else the next entry of the queue."""
        return await self._work_log.claim(
            QUEUE, GROUP, self.name, min_idle_s=min_idle_s
        ) or await self._work_log.read(QUEUE, GROUP, self.name, block_s=_BLOCK_S)

    async def _serve(self, entry: QueueEntry) -> None:
        """Run the job of an entry to its end, and end the entry."""
        job = QueuedJob.from_json(entry.body)
        if job is None:
            await self._bury(entry, "no front has written this entry")
            return
        if entry.deliveries > limits.MAX_QUEUE_DELIVERIES:
            reason = f"its worker was lost {entry.deliveries - 1} times"
            with suppress(TierKVError):
                await self._fail(job, reason)
            await self._bury(entry, reason)
            return
        working = asyncio.create_task(self._until_ended(job))
        try:
            is_ours = await self._touch_until_done(entry, working)
        except asyncio.CancelledError:
            await _stop(working)
            with suppress(QueueLostError):
                await self._work_log.release(QUEUE, GROUP, self.name, entry.id)
            raise
        if not is_ours:
            await _stop(working)
            _log.warning("queued job %s was taken over by another front", job.name)
            return
        await self._end(entry, job, working)

    async def _end(self, entry: QueueEntry, job: QueuedJob, ended: asyncio.Task[None]) -> None:
        try:
            await ended
        except TierKVError as error:
            _log.warning("queued job %s can't be run: %s", job.name, error.message)
            if entry.deliveries >= limits.MAX_QUEUE_DELIVERIES:
                with suppress(TierKVError):
                    await self._fail(job, told(error))
                await self._bury(entry, told(error))
            return
        await self._work_log.ack(QUEUE, GROUP, self.name, entry.id)
        await self._work_log.trim(QUEUE)

    async def _bury(self, entry: QueueEntry, reason: str) -> None:
        await self._work_log.bury(QUEUE, GROUP, self.name, entry.id, reason=reason)
        await self._work_log.trim(QUEUE)

    async def _touch_until_done(self, entry: QueueEntry, working: asyncio.Task[None]) -> bool:
        """Touch an entry until the work is done; return False if another worker has the entry.

        An unreachable log, or a log without the entry, does not stop the job.
        """
        while True:
            done, _ = await asyncio.wait({working}, timeout=self._claim_s / _TOUCHES)
            if done:
                return True
            with suppress(QueueLostError):
                holder = await self._work_log.touch(QUEUE, GROUP, self.name, entry.id)
                if holder not in ("", self.name):
                    return False

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

    async def _fail(self, job: QueuedJob, reason: str) -> None:
        """Note the reason in the tables of jobs."""
        open_states = f"'{PartState.WAITING}', '{PartState.RUNNING}'"
        async with self._door.open(job) as session:
            if await _open_parts(session, job):
                await session.own(
                    f"UPDATE {SCHEMA}.parts SET state = '{PartState.FAILED}', run = '', "
                    f"error = {literal(reason)} WHERE {_is(job)} AND state IN ({open_states})"
                )


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


async def _stop(working: asyncio.Task[None]) -> None:
    working.cancel()
    await asyncio.wait({working})


def _is(job: QueuedJob) -> str:
    return f"owner = {literal(job.owner)} AND job = {literal(job.name)}"
