"""The worker of the queue over an SQLite log, with doors that fail in each way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from tierkv.dbfront.accounts.statistic_tables import MEMORY
from tierkv.dbfront.jobs.queued_job import GROUP, QUEUE, DoorSession, JobEntries, QueuedJob
from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.queue.queue_worker import QueueWorker
from tierkv.kvcore import limits
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import SqlError, TierKVError

JOB = QueuedJob("work", "ann", "ann", "main", "public", ticket="t1")


@dataclass
class TwoPartDoor:
    """A job of two partitions, in a database that fails as told.

    Attributes:
        errors: of the next sessions; a session takes one when it is opened.
        run_errors: of the next partitions.
        states: of the partitions.
        ran: the partitions that were run.
        gate: a partition ends when it is set.
    """

    errors: list[TierKVError] = field(default_factory=list)
    run_errors: list[TierKVError] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=lambda: {1: "waiting", 2: "waiting"})
    ran: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ticket: str = JOB.ticket
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def open(self, job: QueuedJob) -> AsyncIterator[DoorSession]:
        if self.errors:
            raise self.errors.pop(0)
        yield self

    async def execute(self, sql: str) -> object:
        number = int(sql.rpartition(" ")[2])
        self.began.set()
        await self.gate.wait()
        if self.run_errors:
            raise self.run_errors.pop(0)
        self.states[number] = "done"
        self.ran.append(number)
        return None

    async def own(self, sql: str) -> Sequence[tuple[object, ...]]:
        if sql.startswith("SELECT options"):
            return [(json.dumps({"ticket": self.ticket}),)]
        if sql.startswith("UPDATE"):
            self.states = dict.fromkeys(self.states, "failed")
            return []
        return list(self.states.items())


@pytest.fixture
async def log() -> AsyncIterator[FileLog]:
    found = FileLog(MEMORY, SystemClock())
    yield found
    await found.close()


def worker(log: FileLog, door: TwoPartDoor, claim_s: float = 1_000.0) -> QueueWorker:
    return QueueWorker(
        log, JobEntries(door), queue=QUEUE, group=GROUP, front="front", claim_s=claim_s
    )


async def until_ended(log: FileLog, *workers: QueueWorker) -> None:
    """Run workers until the log has no open entry."""
    tasks = [asyncio.create_task(each.run()) for each in workers]
    async with asyncio.timeout(20.0):
        while (await log.queues())[0].length or await log.pending(QUEUE, GROUP, count=1):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_open_partitions_run_in_order_and_the_entry_is_ended(log: FileLog) -> None:
    door = TwoPartDoor(states={1: "done", 2: "running", 3: "waiting"})
    door.gate.set()
    await log.add(QUEUE, JOB.to_json())
    await until_ended(log, worker(log, door))
    assert door.ran == [2, 3] and await log.dead(QUEUE, count=1) == []


async def test_two_workers_run_an_entry_once(log: FileLog) -> None:
    door = TwoPartDoor()
    door.gate.set()
    await log.add(QUEUE, JOB.to_json())
    await until_ended(log, worker(log, door), worker(log, door))
    assert door.ran == [1, 2]


@pytest.mark.parametrize("ended", ["failed", "stopped", "cancelled"])
async def test_a_job_that_has_ended_or_was_resumed_is_not_run(log: FileLog, ended: str) -> None:
    done, resumed = TwoPartDoor(states={1: ended, 2: "waiting"}), TwoPartDoor(ticket="t2")
    for door in (done, resumed):
        await log.add(QUEUE, JOB.to_json())
        await until_ended(log, worker(log, door))
        assert door.ran == []


async def test_what_passes_is_waited_for_and_counts_no_delivery(log: FileLog) -> None:
    passing = [SqlError("away", sqlstate="08006"), SqlError("held", sqlstate="55006")]
    door = TwoPartDoor(errors=[passing[0], passing[0]], run_errors=[passing[1]])
    door.gate.set()
    await log.add(QUEUE, JOB.to_json())
    await until_ended(log, worker(log, door))
    assert door.ran == [1, 2] and await log.dead(QUEUE, count=1) == []


async def test_the_fifth_failed_delivery_is_a_dead_letter(log: FileLog) -> None:
    refused = SqlError("password authentication failed", sqlstate="28P01")
    door = TwoPartDoor(errors=[refused] * (2 * limits.MAX_QUEUE_DELIVERIES))
    await log.add(QUEUE, JOB.to_json())
    await until_ended(log, worker(log, door, claim_s=0.0))
    (letter,) = await log.dead(QUEUE, count=2)
    assert letter.deliveries == limits.MAX_QUEUE_DELIVERIES
    assert letter.reason == "28P01: password authentication failed"
    assert door.states == {1: "failed", 2: "failed"}


async def test_an_entry_that_kills_each_worker_is_a_dead_letter(log: FileLog) -> None:
    door = TwoPartDoor()
    await log.add(QUEUE, JOB.to_json())
    await log.read(QUEUE, GROUP, "dead 1")
    for number in range(2, limits.MAX_QUEUE_DELIVERIES + 1):
        await log.claim(QUEUE, GROUP, f"dead {number}", min_idle_s=0.0)
    await until_ended(log, worker(log, door, claim_s=0.0))
    (letter,) = await log.dead(QUEUE, count=2)
    assert letter.reason == "its worker was lost 5 times" and door.ran == []
    assert door.states == {1: "failed", 2: "failed"}


async def test_an_entry_of_no_front_is_a_dead_letter(log: FileLog) -> None:
    for body in ("no json", "{}", '["a"]', '{"name": 1}'):
        await log.add(QUEUE, body)
    await until_ended(log, worker(log, TwoPartDoor()))
    assert len(await log.dead(QUEUE, count=10)) == 4


async def test_a_worker_that_was_thought_dead_stops(log: FileLog) -> None:
    door = TwoPartDoor()
    await log.add(QUEUE, JOB.to_json())
    slow = asyncio.create_task(worker(log, door, claim_s=0.1).run())
    await door.began.wait()
    (entry,) = await log.claim(QUEUE, GROUP, "other", min_idle_s=0.0)
    async with asyncio.timeout(20.0):
        while (await log.pending(QUEUE, GROUP, count=1))[0].deliveries < 3:
            await asyncio.sleep(0)  # It claims the entry again, as nobody touches it.
    assert not await log.ack(QUEUE, GROUP, "other", entry.id)
    assert door.ran == []
    slow.cancel()
    with suppress(asyncio.CancelledError):
        await slow
    assert (await log.pending(QUEUE, GROUP, count=1))[0].idle_s > 3_600.0, "given back"
