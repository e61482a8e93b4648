"""The WorkLog contract: in an SQLite file, in Valkey, and in Debian's older Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.fix_queue import PLACES, LogPlace, file_place, server_place
from tests.fix_valkey import RedisProcess, redis_server, valkey_server
from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.queue.valkey_log import ValkeyLog
from tierkv.dbfront.queue.work_log import QueueEntry, QueueLostError, WorkLog
from tierkv.kvcore import limits
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.errors import SqlError


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("servers")
    with valkey_server(folder / "valkey") as valkey, redis_server(folder / "redis") as redis:
        yield {"valkey": valkey, "redis": redis}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> LogPlace:
    if request.param == "file":
        return file_place(tmp_path / "queue")
    found = server_place(request.getfixturevalue("servers")[request.param])
    found.clear()
    return found


@pytest.fixture
async def log(place: LogPlace) -> AsyncIterator[WorkLog]:
    opened = place.opens()
    yield opened
    await opened.close()


async def test_1_entries_come_in_order_and_what_is_too_large_is_refused(
    log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in ("a", "ü\n\0b", "c"):
        await log.add("q", body)
    with pytest.raises(SqlError, match="too large") as large:
        await log.add("q", "x" * (limits.MAX_QUEUE_BODY_BYTES + 1))
    assert large.value.sqlstate == "54000" and large.value.hint
    for bad in ("", "\udc80"):
        with pytest.raises(SqlError):
            await log.add("q", bad)
    for name in ("", "x" * 201, "a\0b"):
        with pytest.raises(SqlError, match="no name"):
            await log.add(name, "x")
    monkeypatch.setattr(limits, "MAX_QUEUE_ENTRIES", 3)
    with pytest.raises(SqlError, match="is full"):
        await log.add("q", "d")
    found = await log.read("q", "g", "ann", count=10)
    assert [entry.body for entry in found] == ["a", "ü\n\0b", "c"]
    await log.ack("q", "g", "ann", found[0].id)
    await log.add("q", "d")  # What is done makes room.
    with pytest.raises(SqlError, match="is full"):
        await log.add("q", "e")


async def test_2_each_entry_goes_to_one_consumer_of_each_group(place: LogPlace) -> None:
    logs = [place.opens() for _ in range(4)]
    bodies = [f"entry {number}" for number in range(40)]
    for body in bodies:
        await logs[0].add("q", body)

    async def take(number: int) -> list[str]:
        taken = []
        while found := await logs[number].read("q", "g", f"consumer {number}", count=3):
            taken += [entry.body for entry in found]
        return taken

    taken = await asyncio.gather(*map(take, range(4)))
    assert sorted(chain.from_iterable(taken)) == sorted(bodies)
    other = await logs[0].read("q", "other", "ann", count=100)
    assert [entry.body for entry in other] == bodies
    for each in logs:
        await each.close()


async def test_2_a_reader_waits_for_an_entry_of_another_process(place: LogPlace) -> None:
    reader, writer = place.opens(), place.opens()
    assert await reader.read("q", "g", "ann", block_s=0.05) == []
    reading = asyncio.create_task(reader.read("q", "g", "ann", block_s=30.0))
    added = await writer.add("q", "late")
    async with asyncio.timeout(10.0):
        assert await reading == [QueueEntry(added, "late", 1)]
    await reader.close()
    await writer.close()


async def test_3_only_who_has_an_entry_ends_it(log: WorkLog) -> None:
    added = await log.add("q", "a")
    assert not await log.ack("q", "g", "ann", added)  # No such group.
    await log.read("q", "g", "ann")
    assert not await log.ack("q", "g", "bob", added)
    assert not await log.ack("q", "other", "ann", added)
    for stranger in ("x", "", "9-9-9", "1" * 40):
        assert not await log.ack("q", "g", "ann", stranger)
    assert await log.ack("q", "g", "ann", added)
    assert not await log.ack("q", "g", "ann", added)
    assert await log.pending("q", "g", count=10) == []


async def test_4_a_touched_entry_is_not_idle(log: WorkLog, place: LogPlace) -> None:
    added = await log.add("q", "a")
    assert await log.touch("q", "g", "ann", added) == ""
    await log.read("q", "g", "ann")
    place.age("q", "g", added, 100.0)
    assert await log.touch("q", "g", "bob", added) == "ann"
    (entry,) = await log.pending("q", "g", count=10)
    assert entry.idle_s >= 100.0
    assert await log.touch("q", "g", "ann", added) == "ann"
    (entry,) = await log.pending("q", "g", count=10)
    assert entry.idle_s < 50.0 and entry.deliveries == 1
    assert await log.claim("q", "g", "bob", min_idle_s=60.0) == []


async def test_5_idle_entries_are_claimed_once_and_counted(place: LogPlace) -> None:
    log, other = place.opens(), place.opens()
    ids = [await log.add("q", body) for body in "abc"]
    assert await log.claim("q", "g", "bob", min_idle_s=0.0) == []  # No such group.
    await log.read("q", "g", "ann", count=3)
    for each in ids[:2]:
        place.age("q", "g", each, 100.0)
    found = await asyncio.gather(
        log.claim("q", "g", "bob", min_idle_s=60.0, count=5),
        other.claim("q", "g", "eve", min_idle_s=60.0, count=5),
    )
    entries = [*chain.from_iterable(found)]
    assert entries == [QueueEntry(ids[0], "a", 2), QueueEntry(ids[1], "b", 2)]
    assert not await log.ack("q", "g", "ann", ids[0])  # She was thought dead.
    await log.close()
    await other.close()


async def test_6_a_released_entry_is_claimable_and_not_counted(log: WorkLog) -> None:
    added = await log.add("q", "a")
    assert not await log.release("q", "g", "ann", added)
    await log.read("q", "g", "ann")
    assert not await log.release("q", "g", "bob", added)
    assert await log.release("q", "g", "ann", added)
    assert await log.claim("q", "g", "bob", min_idle_s=3_600.0) == [QueueEntry(added, "a", 1)]


async def test_7_dead_letters_have_their_reason(
    log: WorkLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = await log.add("q", "a")
    await log.read("q", "g", "ann")
    assert not await log.bury("q", "g", "bob", added, reason="no")
    assert await log.bury("q", "g", "ann", added, reason="it killed each worker")
    assert not await log.bury("q", "g", "ann", added, reason="twice")
    (letter,) = await log.dead("q", count=10)
    assert (letter.group, letter.body, letter.deliveries) == ("g", "a", 1)
    assert letter.reason == "it killed each worker"
    assert abs(letter.at_s - SystemClock().wall()) < 60.0
    assert await log.pending("q", "g", count=10) == []
    assert await log.forget_dead("q", [letter.id, "x"]) == 1
    assert await log.dead("q", count=10) == []
    monkeypatch.setattr(limits, "MAX_DEAD_LETTERS", 2)
    for body in "bcd":
        await log.add("q", body)
        (entry,) = await log.read("q", "g", "ann")
        await log.bury("q", "g", "ann", entry.id, reason="full")
    assert [letter.body for letter in await log.dead("q", count=10)] == ["c", "d"]


async def test_8_what_every_group_has_ended_is_trimmed(log: WorkLog) -> None:
    for body in "abcd":
        await log.add("q", body)
    assert await log.trim("q") == 0 and await log.trim("none") == 0
    found = await log.read("q", "g", "ann", count=3)
    await log.read("q", "other", "ann", count=2)
    for entry in (found[0], found[2]):
        await log.ack("q", "g", "ann", entry.id)
    assert await log.trim("q") == 0
    await log.ack("q", "other", "ann", found[0].id)
    assert await log.trim("q") == 1
    await log.ack("q", "other", "ann", found[1].id)
    await log.ack("q", "g", "ann", found[1].id)
    assert await log.trim("q") == 1
    assert (await log.queues())[0].length == 2


async def test_9_the_state_of_all_queues(log: WorkLog, place: LogPlace) -> None:
    assert await log.queues() == []
    ids = [await log.add("b", body) for body in "xyz"]
    await log.add("a", "1")
    await log.read("b", "g", "ann", count=1)
    await log.read("b", "g", "bob", count=1)
    await log.read("b", "f", "bob", count=1)
    await log.bury("b", "f", "bob", ids[0], reason="bad")
    place.age("b", "g", ids[0], 100.0)
    one, two = await log.queues()
    assert (one.name, one.length, one.dead, one.groups) == ("a", 1, 0, ())
    assert (two.name, two.length, two.dead) == ("b", 3, 1)
    first, second = two.groups
    assert (first.name, first.waiting, first.pending, first.consumers) == ("f", 2, 0, 0)
    assert first.oldest_idle_s is None
    assert (second.name, second.waiting, second.pending, second.consumers) == ("g", 1, 2, 2)
    assert second.oldest_idle_s is not None and second.oldest_idle_s >= 100.0


async def test_10_a_lost_log_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for log in (
        ValkeyLog("redis://127.0.0.1:1", SystemClock()),
        file_place(tmp_path / "file" / "queue").opens(),
    ):
        with pytest.raises(QueueLostError) as lost:
            await log.add("q", "a")
        place = str(tmp_path) if isinstance(log, FileLog) else "127.0.0.1"
        assert place in lost.value.reason  # For the log of the front; a client sees no place.
        assert place not in f"{lost.value.message} {lost.value.detail} {lost.value.hint}"
        with pytest.raises(QueueLostError):
            await log.read("q", "g", "ann")
        with pytest.raises(QueueLostError):
            await log.queues()
        await log.close()


@pytest.mark.parametrize("durable", [True, False])
async def test_10_a_log_goes_on_when_its_killed_server_is_back(
    tmp_path: Path, durable: bool
) -> None:
    keeps = ("--appendonly", "yes", "--appendfsync", "always") if durable else ()
    with RedisProcess(tmp_path / "redis", *keeps) as redis:
        log = ValkeyLog(redis.url, SystemClock())
        added = await log.add("q", "a")
        await log.read("q", "g", "ann")
        redis.kill()
        with pytest.raises(QueueLostError):
            await log.touch("q", "g", "ann", added)
        redis.start()
        assert await log.touch("q", "g", "ann", added) == ("ann" if durable else "")
        assert await log.ack("q", "g", "ann", added) is durable
        await log.add("q", "b")
        assert [entry.body for entry in await log.read("q", "g", "ann", count=5)] == ["b"]
        await log.close()
