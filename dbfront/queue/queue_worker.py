"""A worker of a queue: takes entries, has each served by a handler, and ends each.

Theory of operation. An entry names work whose progress is kept elsewhere: the checkpoints of a job
(dbfront/jobs/queued_job.py), the turn of a response (dbfront/http/responses/background.py). The
worker acknowledges an entry at the end of its work, and touches the entry meanwhile. If the worker
is killed, the entry becomes idle. Another worker claims the entry, and the handler goes on from
the progress. A worker thought dead learns the new holder from the next touch, and stops.

A handler's error is a failed delivery: the entry is delivered again once it is idle. After
``limits.MAX_QUEUE_DELIVERIES`` deliveries the entry is a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import Final, Protocol

from tierkv.dbfront.queue.work_log import QueueEntry, QueueLostError, WorkLog
from tierkv.kvcore import limits
from tierkv.kvcore.errors import TierKVError

_BLOCK_S: Final = 2.0
"""Longest wait for a new entry; idle entries are looked for in between."""

_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
_TOUCHES: Final = 5
"""Touches within the time after which an entry counts as left."""

_log = logging.getLogger("tierkv.queue")


class UnreadableEntryError(TierKVError):
    """An entry that no front has written; such an entry is a dead letter at once."""

    code = "unreadable_entry"


class EntryHandler(Protocol):
    """The work behind the entries of a queue."""

    async def run(self, body: str) -> None:
        """Do the work of an entry, or the rest of the work of a killed worker.

        A cancelled call must leave the work to the next call.

        Raises:
            UnreadableEntryError: nobody can do this work.
            TierKVError: the delivery failed.
        """
        ...

    async def give_up(self, body: str, reason: str) -> None:
        """Note where clients look that the work will not be done.

        Raises:
            TierKVError: the reason can't be noted; it stays with the dead letter.
        """
        ...


class QueueWorker:
    """Serves the entries of a queue until it is cancelled.

    Attributes:
        name: the consumer's name, unique among all workers.
    """

    def __init__(
        self,
        work_log: WorkLog,
        handler: EntryHandler,
        *,
        queue: str,
        group: str,
        front: str,
        claim_s: float,
        alone: bool = False,
        width: int = 1,
    ) -> None:
        """Note what to use.

        Args:
            work_log: has the entries.
            handler: does their work.
            queue: name of the queue.
            group: name of the group of all workers.
            front: begins the consumer's name.
            claim_s: idle time after which an entry counts as left by a dead worker.
            alone: no other process takes entries; an entry pending at the start was left.
            width: number of entries served at the same time.
        """
        self.name = f"{front}/{secrets.token_hex(4)}"
        self._work_log = work_log
        self._handler = handler
        self._place = (queue, group, self.name)
        self._claim_s = claim_s
        self._alone = alone
        self._width = width
        self._served: dict[str, asyncio.Task[None]] = {}
        self._is_closing = False

    @property
    def serving(self) -> set[asyncio.Task[None]]:
        """Return the tasks of the entries that are being served."""
        return set(self._served.values())

    def close(self) -> None:
        """Take no more entries; those that are being served go on until ``run`` is cancelled."""
        self._is_closing = True

    async def run(self) -> None:
        """Take entries and have them served; wait while the log is away."""
        pause_s, min_idle_s = _FIRST_PAUSE_S, 0.0 if self._alone else self._claim_s
        try:
            while not self._is_closing:
                try:
                    found = await self._next(min_idle_s)
                except QueueLostError as error:
                    if pause_s == _FIRST_PAUSE_S:
                        _log.warning("the queue is away, its entries wait: %s", error.reason)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                pause_s, min_idle_s = _FIRST_PAUSE_S, self._claim_s
                for entry in found:
                    self._begin(entry)
                while len(self._served) >= self._width:
                    await asyncio.wait(self.serving, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.Event().wait()  # Until the task is cancelled.
        finally:
            serving = self.serving
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _next(self, min_idle_s: float) -> list[QueueEntry]:
        """Return abandoned entries, or else the next entry of the queue."""
        # Of the entries that this worker serves none is new, even if the log was away for long.
        count = self._width if min_idle_s == 0.0 else 1 + len(self._served)
        claimed = await self._work_log.claim(*self._place, min_idle_s=min_idle_s, count=count)
        found = [entry for entry in claimed if entry.id not in self._served]
        return found or await self._work_log.read(*self._place, block_s=_BLOCK_S)

    def _begin(self, entry: QueueEntry) -> None:
        task = asyncio.create_task(self._serve(entry), name=f"queue entry {entry.id}")
        self._served[entry.id] = task
        task.add_done_callback(lambda _: self._served.pop(entry.id, None))

    async def _serve(self, entry: QueueEntry) -> None:
        """Have the work of an entry done, and end the entry."""
        try:
            if entry.deliveries > limits.MAX_QUEUE_DELIVERIES:
                reason = f"its worker was lost {entry.deliveries - 1} times"
                await self._give_up(entry, reason)
                return
            working = asyncio.ensure_future(self._handler.run(entry.body))
            try:
                is_ours = await self._touch_until_done(entry, working)
            except asyncio.CancelledError:
                await _stop(working)
                await self._work_log.release(*self._place, entry.id)
                raise
            if not is_ours:
                await _stop(working)
                _log.warning("an entry was taken over by another front: %s", entry.body[:200])
                return
            await self._end(entry, working)
        except QueueLostError as error:
            _log.warning("an ended entry stays in the queue: %s", error.reason)

    async def _end(self, entry: QueueEntry, ended: asyncio.Future[None]) -> None:
        error = ended.exception()
        if error is None:
            await self._work_log.ack(*self._place, entry.id)
            await self._work_log.trim(self._place[0])
        elif isinstance(error, UnreadableEntryError):
            await self._bury(entry, error.message)
        else:
            known = isinstance(error, TierKVError)
            _log.warning("an entry can't be served: %s", error, exc_info=None if known else error)
            if entry.deliveries >= limits.MAX_QUEUE_DELIVERIES:
                state = error.sqlstate if isinstance(error, TierKVError) else "XX000"
                await self._give_up(entry, f"{state}: {' '.join(str(error).split())}")

    async def _give_up(self, entry: QueueEntry, reason: str) -> None:
        with suppress(TierKVError):
            await self._handler.give_up(entry.body, reason)
        await self._bury(entry, reason)

    async def _bury(self, entry: QueueEntry, reason: str) -> None:
        await self._work_log.bury(*self._place, entry.id, reason=reason)
        await self._work_log.trim(self._place[0])

    async def _touch_until_done(self, entry: QueueEntry, working: asyncio.Future[None]) -> bool:
        """Touch an entry until the work is done; return False if another worker has the entry.

        An unreachable log, or a log without the entry, does not stop the work.
        """
        while True:
            done, _ = await asyncio.wait({working}, timeout=self._claim_s / _TOUCHES)
            if done:
                return True
            with suppress(QueueLostError):
                holder = await self._work_log.touch(*self._place, entry.id)
                if holder not in ("", self.name):
                    return False


async def _stop(working: asyncio.Future[None]) -> None:
    working.cancel()
    await asyncio.wait({working})
