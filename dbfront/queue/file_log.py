"""Logs with consumer groups in an SQLite file; implements WorkLog.

For the processes of a machine; with MEMORY for a single process. Each operation is a transaction in
a thread. A waiting reader polls with growing pauses, because another process can't wake the reader;
an ``add`` of the same process does.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from tierkv.dbfront.accounts.statistic_tables import Transaction, open_private
from tierkv.dbfront.queue.work_log import (
    RELEASED_IDLE_S,
    DeadLetter,
    GroupState,
    PendingEntry,
    QueueEntry,
    QueueLostError,
    QueueState,
    check_body,
    check_names,
    full_queue,
)
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock

T = TypeVar("T")

_FIRST_LOOK_S: Final = 0.02
_LONGEST_LOOK_S: Final = 0.5

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS entries (queue TEXT, id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "body TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS entries_of ON entries (queue, id)",
    "CREATE TABLE IF NOT EXISTS groups (queue TEXT, name TEXT, last_id INTEGER NOT NULL, "
    "PRIMARY KEY (queue, name)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS pending (queue TEXT, grp TEXT, id INTEGER, consumer TEXT NOT NULL, "
    "since_s REAL NOT NULL, deliveries INTEGER NOT NULL, PRIMARY KEY (queue, grp, id)) "
    "WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS dead (id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT, grp TEXT, "
    "body TEXT NOT NULL, deliveries INTEGER NOT NULL, reason TEXT NOT NULL, at_s REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS dead_of ON dead (queue, id)",
)
_OWN: Final = "queue = ? AND grp = ? AND id = ? AND consumer = ?"
_UNFINISHED: Final = (
    "SELECT min(first) FROM (SELECT coalesce((SELECT min(p.id) FROM pending p WHERE "
    "p.queue = g.queue AND p.grp = g.name), g.last_id + 1) AS first FROM groups g "
    "WHERE g.queue = ?)"
)
"""The oldest id that some group has not ended; NULL without groups."""


class FileLog:
    """Connection to the file, opened at the first use.

    Attributes:
        place: path of the file, or MEMORY.
    """

    def __init__(self, place: str, clock: Clock) -> None:
        """Note the file.

        Args:
            place: path of the file, or MEMORY.
            clock: its Unix time is that of deliveries.
        """
        self.place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._added = asyncio.Event()

    async def add(self, queue: str, body: str) -> str:
        check_names(queue)
        check_body(body)

        def write(database: sqlite3.Connection) -> str | None:
            ((count,),) = database.execute("SELECT count(*) FROM entries WHERE queue = ?", (queue,))
            if count >= limits.MAX_QUEUE_ENTRIES and not _trim(database, queue):
                return None
            cursor = database.execute(
                "INSERT INTO entries (queue, body) VALUES (?, ?)", (queue, body)
            )
            return str(cursor.lastrowid)

        added = await self._write(write)
        if added is None:
            raise full_queue(queue)
        self._added.set()
        return added

    async def read(
        self, queue: str, group: str, consumer: str, *, count: int = 1, block_s: float = 0.0
    ) -> list[QueueEntry]:
        check_names(queue, group, consumer)
        await self._write(
            lambda database: database.execute(
                "INSERT OR IGNORE INTO groups VALUES (?, ?, 0)", (queue, group)
            )
        )
        end_s, pause_s = self._clock.now() + block_s, _FIRST_LOOK_S
        while True:
            self._added.clear()
            if await self._done(lambda database: _has_new(database, queue, group)):
                now_s = self._clock.wall()
                found = await self._write(
                    lambda database: _take(database, queue, group, consumer, count, now_s)  # noqa: B023
                )
                if found:
                    return found
            left_s = end_s - self._clock.now()
            if left_s <= 0:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, left_s)):
                    await self._added.wait()
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    async def ack(self, queue: str, group: str, consumer: str, entry: str) -> bool:
        return await self._change(
            f"DELETE FROM pending WHERE {_OWN}", (queue, group, _number(entry), consumer)
        )

    async def touch(self, queue: str, group: str, consumer: str, entry: str) -> str:
        values = (queue, group, _number(entry))
        now_s = self._clock.wall()

        def write(database: sqlite3.Connection) -> str:
            database.execute(
                f"UPDATE pending SET since_s = ? WHERE {_OWN}", (now_s, *values, consumer)
            )
            row = database.execute(
                "SELECT consumer FROM pending WHERE queue = ? AND grp = ? AND id = ?", values
            ).fetchone()
            return str(row[0]) if row else ""

        return await self._write(write)

    async def claim(
        self, queue: str, group: str, consumer: str, *, min_idle_s: float, count: int = 1
    ) -> list[QueueEntry]:
        check_names(queue, group, consumer)
        now_s = self._clock.wall()
        chosen = (
            "SELECT id FROM pending WHERE queue = ? AND grp = ? AND since_s <= ? "
            "ORDER BY id LIMIT ?"
        )

        def write(database: sqlite3.Connection) -> list[QueueEntry]:
            words = (queue, group, now_s - min_idle_s, count)
            ids = [row[0] for row in database.execute(chosen, words)]
            database.executemany(
                "UPDATE pending SET consumer = ?, since_s = ?, deliveries = deliveries + 1 "
                "WHERE queue = ? AND grp = ? AND id = ?",
                [(consumer, now_s, queue, group, number) for number in ids],
            )
            return _delivered(database, queue, group, ids)

        return await self._write(write)

    async def release(self, queue: str, group: str, consumer: str, entry: str) -> bool:
        return await self._change(
            f"UPDATE pending SET since_s = ?, deliveries = deliveries - 1 WHERE {_OWN}",
            (self._clock.wall() - RELEASED_IDLE_S, queue, group, _number(entry), consumer),
        )

    async def bury(self, queue: str, group: str, consumer: str, entry: str, *, reason: str) -> bool:
        number, now_s = _number(entry), self._clock.wall()

        def write(database: sqlite3.Connection) -> bool:
            row = database.execute(
                f"DELETE FROM pending WHERE {_OWN} RETURNING deliveries",
                (queue, group, number, consumer),
            ).fetchone()
            if row is None:
                return False
            database.execute(
                "INSERT INTO dead (queue, grp, body, deliveries, reason, at_s) "
                "SELECT queue, ?, body, ?, ?, ? FROM entries WHERE id = ?",
                (group, row[0], reason, now_s, number),
            )
            database.execute(
                "DELETE FROM dead WHERE id IN (SELECT id FROM dead WHERE queue = ? "
                "ORDER BY id DESC LIMIT -1 OFFSET ?)",
                (queue, limits.MAX_DEAD_LETTERS),
            )
            return True

        return await self._write(write)

    async def trim(self, queue: str) -> int:
        return await self._write(lambda database: _trim(database, queue))

    async def pending(self, queue: str, group: str, *, count: int) -> list[PendingEntry]:
        now_s = self._clock.wall()
        rows = await self._done(
            lambda database: database.execute(
                "SELECT p.id, e.body, p.deliveries, p.consumer, p.since_s FROM pending p "
                "JOIN entries e ON e.id = p.id WHERE p.queue = ? AND p.grp = ? "
                "ORDER BY p.id LIMIT ?",
                (queue, group, count),
            ).fetchall()
        )
        return [
            PendingEntry(str(number), body, deliveries, consumer, max(0.0, now_s - since_s))
            for number, body, deliveries, consumer, since_s in rows
        ]

    async def dead(self, queue: str, *, count: int) -> list[DeadLetter]:
        rows = await self._done(
            lambda database: database.execute(
                "SELECT id, grp, body, deliveries, reason, at_s FROM dead WHERE queue = ? "
                "ORDER BY id LIMIT ?",
                (queue, count),
            ).fetchall()
        )
        return [DeadLetter(str(row[0]), *row[1:]) for row in rows]

    async def forget_dead(self, queue: str, letters: Sequence[str]) -> int:
        ids = [(queue, _number(each)) for each in letters]

        def write(database: sqlite3.Connection) -> int:
            text = "DELETE FROM dead WHERE queue = ? AND id = ?"
            return sum(database.execute(text, each).rowcount for each in ids)

        return await self._write(write)

    async def queues(self) -> list[QueueState]:
        now_s = self._clock.wall()
        return await self._done(lambda database: _states(database, now_s))

    async def close(self) -> None:
        with self._lock:
            self._drop()

    async def _change(self, text: str, values: Sequence[Any]) -> bool:
        """Run one statement; return whether it changed a row."""
        return await self._write(lambda database: database.execute(text, values).rowcount == 1)

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def write(database: sqlite3.Connection) -> T:
            with Transaction(database):
                return work(database)

        return await self._done(write)

    async def _done(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self._locked, work)

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do something with the open file.

        Raises:
            QueueLostError: the file can't be used; the next use opens it anew.
        """
        with self._lock:
            try:
                if self._database is None:
                    self._database = open_private(self.place, _prepare)
                return work(self._database)
            except (sqlite3.Error, OSError) as error:
                self._drop()
                raise QueueLostError(f"the queue in {self.place}: {error}") from error

    def _drop(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA synchronous = FULL")  # An added entry outlives a loss of power.
    for text in _TABLES:
        database.execute(text)


def _number(entry: str) -> int:
    """Return the id as a number; 0, which no entry has, for the id of another log."""
    return int(entry) if entry.isdecimal() and len(entry) < 19 else 0


def _has_new(database: sqlite3.Connection, queue: str, group: str) -> bool:
    text = (
        "SELECT 1 FROM entries WHERE queue = ? AND id > coalesce((SELECT last_id FROM groups "
        "WHERE queue = ? AND name = ?), 0) LIMIT 1"
    )
    return database.execute(text, (queue, queue, group)).fetchone() is not None


def _take(
    database: sqlite3.Connection, queue: str, group: str, consumer: str, count: int, now_s: float
) -> list[QueueEntry]:
    ids = [
        row[0]
        for row in database.execute(
            "SELECT e.id FROM entries e JOIN groups g ON g.queue = e.queue AND g.name = ? "
            "WHERE e.queue = ? AND e.id > g.last_id ORDER BY e.id LIMIT ?",
            (group, queue, count),
        )
    ]
    if not ids:
        return []
    database.executemany(
        "INSERT INTO pending VALUES (?, ?, ?, ?, ?, 1)",
        [(queue, group, number, consumer, now_s) for number in ids],
    )
    database.execute(
        "UPDATE groups SET last_id = ? WHERE queue = ? AND name = ?", (ids[-1], queue, group)
    )
    return _delivered(database, queue, group, ids)


def _delivered(
    database: sqlite3.Connection, queue: str, group: str, ids: Sequence[int]
) -> list[QueueEntry]:
    text = (
        "SELECT e.id, e.body, p.deliveries FROM pending p JOIN entries e ON e.id = p.id "
        "WHERE p.queue = ? AND p.grp = ? AND p.id = ?"
    )
    rows = [database.execute(text, (queue, group, number)).fetchone() for number in ids]
    return [QueueEntry(str(number), body, deliveries) for number, body, deliveries in rows]


def _trim(database: sqlite3.Connection, queue: str) -> int:
    ((first,),) = database.execute(_UNFINISHED, (queue,))
    if first is None:
        return 0
    text = "DELETE FROM entries WHERE queue = ? AND id < ?"
    return database.execute(text, (queue, first)).rowcount


def _states(database: sqlite3.Connection, now_s: float) -> list[QueueState]:
    lengths = dict(database.execute("SELECT queue, count(*) FROM entries GROUP BY queue"))
    dead = dict(database.execute("SELECT queue, count(*) FROM dead GROUP BY queue"))
    groups: dict[str, list[GroupState]] = {}
    for queue, name, waiting, pending, consumers, since_s in database.execute(
        "SELECT g.queue, g.name, (SELECT count(*) FROM entries e WHERE e.queue = g.queue "
        "AND e.id > g.last_id), count(p.id), count(DISTINCT p.consumer), min(p.since_s) "
        "FROM groups g LEFT JOIN pending p ON p.queue = g.queue AND p.grp = g.name "
        "GROUP BY g.queue, g.name, g.last_id ORDER BY g.queue, g.name"
    ):
        idle_s = None if since_s is None else max(0.0, now_s - since_s)
        groups.setdefault(queue, []).append(GroupState(name, waiting, pending, consumers, idle_s))
    return [
        QueueState(name, lengths.get(name, 0), dead.get(name, 0), tuple(groups.get(name, ())))
        for name in sorted({*lengths, *dead, *groups})
    ]
