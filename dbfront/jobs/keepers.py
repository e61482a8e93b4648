"""Background work: AI tables and KV indexes that are due, and jobs.

Over the embedded database dbfront/postgres_dialect/server.py runs the keepers beside a front's
doors; behind PostgreSQL tierkv/parts/postgres_keepers.py does. Sessions of the owners work. A
refresh longer than the table's period begins anew at once; one table at a time, hence tables can't
crowd out users. A background job that a killed front left goes on with the next front.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tierkv.dbfront.jobs.embedded_jobs import WrittenTables
from tierkv.dbfront.jobs.source_watch import WatchedSource, table_name
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import TierKVError
from tierkv.sql.jobs.ai_table_command import ON_CHANGE
from tierkv.sql.jobs.job_tables import SCHEMA
from tierkv.sql.jobs.kv_index_command import MANUAL, PIN_RENEW_S, IndexedText

DUE_TABLES: Final = (
    f"SELECT owner, name, path, options, coalesce(refreshed_s, 0) FROM {SCHEMA}.ai_tables"
)
KV_INDEXES: Final = (
    "SELECT owner, name, path, options, coalesce(refreshed_s, 0), source_name, state, expression, "
    f"(SELECT min(indexed_s) FROM {SCHEMA}.kv_index_times t WHERE t.owner = i.owner AND "
    "t.name = i.name AND expired = 0), "
    f"(SELECT min(pinned_s) FROM {SCHEMA}.kv_index_times t WHERE t.owner = i.owner AND "
    f"t.name = i.name AND expired = 0) FROM {SCHEMA}.kv_indexes i"
)
TOLD_INDEXES: Final = KV_INDEXES.replace("source_name", "md5(i.owner || '/' || i.name)")
"""Behind PostgreSQL, where a trigger tells the index whose table was written to."""

Read = Callable[[str], Awaitable[Sequence[tuple[Any, ...]]]]
"""Runs a query of the front over the tables of jobs."""

BUILDING: Final = "building"
_RETRY_S: Final = 30.0
"""Pause after a refresh that failed of what follows changes."""

_RARELY_S: Final = 1.0
_LONGEST_TOGETHER_S: Final = 3600.0
"""Pauses between refreshes for the age of documents: a hundredth of it, within these bounds."""

_JOIN_S: Final = 0.2
"""Pause after a write, so that a burst of writes is one refresh of an AI table."""

OPEN_JOBS: Final = (
    f"SELECT j.owner, j.job, j.path, j.options, p.part FROM {SCHEMA}.jobs j JOIN {SCHEMA}.parts p "
    "ON p.owner = j.owner AND p.job = j.job WHERE p.state IN ('waiting', 'running') "
    "ORDER BY j.created_s, p.part"
)
_log = logging.getLogger("tierkv.front")


@dataclass(frozen=True, slots=True)
class DueTable:
    """An AI table that refreshes by itself: whose, where, and when it is due.

    Attributes:
        user: whose session refreshes.
        name: the table.
        path: search path of the session.
        due_s: Unix time.
        login: who made the table, and logs in where ``user`` is a role of PostgreSQL.
    """

    user: str
    name: str
    path: str
    due_s: float
    login: str = ""


class AiTableKeeper:
    """Refreshes tables until it is cancelled: after writes to what they read, or by the clock."""

    def __init__(
        self,
        read: Read,
        refresh: Callable[[DueTable], Awaitable[None]],
        clock: Clock,
        written: WrittenTables,
    ) -> None:
        """Note what to use.

        Args:
            read: runs a query.
            refresh: refreshes a table.
            clock: tells what is due.
            written: names or digests of the tables that statements write to.
        """
        self._read = read
        self._refresh = refresh
        self._clock = clock
        self._written = written
        self._tried: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], float] = {}
        self._rested: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Refresh what is due, and wait for the next; without tables it waits for one.

        The first look refreshes all tables that follow changes: writes may have been missed.
        """
        is_first = True
        while True:
            self._written.changed.clear()
            rows = await self._read(DUE_TABLES)
            following = following_tables(rows)
            self._written.watched = frozenset().union(*following.values())
            names = self._written.take()  # After this, a write finds its table watched.
            for key, sources in following.items():
                if is_first or not names.isdisjoint(sources):
                    self._told.setdefault(key, self._rested.get(key, 0.0))
            is_first = False
            tables = due_tables(rows, self._tried, self._told)
            now_s = self._clock.wall()
            for table in tables:
                if table.due_s <= now_s and not self._written.changed.is_set():
                    await self._try(table)
            if any(table.due_s <= now_s for table in tables):
                continue
            wait_s = min((table.due_s - now_s for table in tables), default=None)
            try:
                async with asyncio.timeout(wait_s):
                    await self._written.changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_JOIN_S)

    async def _try(self, table: DueTable) -> None:
        """Refresh a table. A write meanwhile is told again and waits as long as this took."""
        key, began_s = (table.user, table.name), self._clock.now()
        follows = self._told.pop(key, None) is not None
        try:
            await self._refresh(table)
        except TierKVError as error:
            if follows:
                self._told[key] = self._clock.wall() + _RETRY_S
            _log.warning("AI table %s was not refreshed: %s", table.name, error.message)
        self._tried[key] = self._clock.wall()
        self._rested[key] = self._tried[key] + max(_JOIN_S, self._clock.now() - began_s)


def following_tables(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[str, str], frozenset[str]]:
    """Return how the sources of each AI table are named that follows changes. Pure.

    Args:
        rows: result of DUE_TABLES.

    Returns:
        by user and table: names of the sources in lower case, and the digest that triggers tell.
    """
    found: dict[tuple[str, str], frozenset[str]] = {}
    for owner, name, _, text, _ in rows:
        options = json.loads(text)
        if options["refresh_s"] == ON_CHANGE:
            names = {table_name(source) for source in options["sources"]}
            digest = WatchedSource(owner, name, "", by_table=True).digest
            found[owner or options["made_by"], name] = frozenset(names | {digest})
    return found


def due_tables(
    rows: Sequence[tuple[Any, ...]],
    tried: Mapping[tuple[str, str], float],
    told: Mapping[tuple[str, str], float],
) -> list[DueTable]:
    """Return the tables that refresh by themselves, the first due first. Pure.

    Args:
        rows: result of DUE_TABLES.
        tried: Unix time of the last try by user and table; a failure waits a period, too.
        told: when tables are due whose sources were written to, as Unix time.
    """
    found: list[DueTable] = []
    for owner, name, path, text, refreshed_s in rows:
        options = json.loads(text)
        user = owner or options["made_by"]
        if options["suspended"]:
            continue
        due_s = told.get((user, name))
        if options["refresh_s"] != ON_CHANGE:
            last_s = max(float(refreshed_s), tried.get((user, name), 0.0))
            due_s = last_s + options["refresh_s"] if options["refresh_s"] else None
        if due_s is not None:
            found.append(DueTable(user, name, path, due_s, options.get("made_by", "")))
    return sorted(found, key=lambda table: table.due_s)


class KvIndexKeeper:
    """Refreshes KV indexes until it is cancelled: after writes to their tables, or by the clock."""

    def __init__(
        self,
        read: Read,
        refresh: Callable[[DueTable], Awaitable[None]],
        clock: Clock,
        written: WrittenTables,
        query: str = KV_INDEXES,
    ) -> None:
        """Note what to use.

        Args:
            read: runs a query.
            refresh: refreshes an index.
            clock: tells what is due.
            written: the tables that statements write to.
            query: KV_INDEXES, or TOLD_INDEXES if ``written`` has digests of indexes.
        """
        self._query = query
        self._read = read
        self._refresh = refresh
        self._clock = clock
        self._written = written
        self._tried: dict[tuple[str, str], float] = {}
        self._failed: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Refresh what is due, and wait for the next write or time.

        The first look refreshes all indexes that follow changes: writes may have been missed.
        """
        is_first = True
        while True:
            self._written.changed.clear()
            rows = await self._read(self._query)
            self._written.watched = frozenset(str(row[5]) for row in rows)
            self._written.indexes = tuple(map(_indexed, rows))
            written: Collection[str] = self._written.take()
            if is_first:
                written, is_first = {str(row[5]) for row in rows}, False
            indexes = due_indexes(rows, written, self._tried, self._failed)
            now_s = self._clock.wall()
            for index in indexes:
                if index.due_s <= now_s:
                    await self._try(index)
            if any(index.due_s <= now_s for index in indexes):
                continue  # Each is due again at a later time, as the next look tells.
            wait_s = min((index.due_s - now_s for index in indexes), default=None)
            try:
                async with asyncio.timeout(wait_s):
                    await self._written.changed.wait()
            except TimeoutError:
                pass

    async def _try(self, index: DueTable) -> None:
        name = (index.user, index.name)
        try:
            await self._refresh(index)
            self._failed.discard(name)
        except TierKVError as error:
            self._failed.add(name)
            self._written.changed.set()
            _log.warning("KV index %s was not refreshed: %s", index.name, error.message)
        self._tried[name] = self._clock.wall()


def _indexed(row: Sequence[Any]) -> IndexedText:
    owner, name, _, options, _, table, _, expression, *_ = row
    return IndexedText.of_row(owner, name, table, expression, options)


def due_indexes(
    rows: Sequence[tuple[Any, ...]],
    written: Container[str],
    tried: Mapping[tuple[str, str], float],
    failed: Container[tuple[str, str]],
) -> list[DueTable]:
    """Return the indexes that refresh by themselves, with the time of the next refresh. Pure.

    Args:
        rows: result of KV_INDEXES.
        written: tables written to since the last look.
        tried: Unix time of the last try by user and index.
        failed: indexes whose last refresh failed.
    """
    found: list[DueTable] = []
    for owner, name, path, text, refreshed_s, table, state, _, indexed_s, pinned_s in rows:
        options = json.loads(text)
        user, period_s = owner or options["made_by"], options["refresh_s"]
        last_s = max(float(refreshed_s), tried.get((user, name), 0.0))
        is_new = state == BUILDING and options["background"] and not last_s
        is_due = is_new or (table in written and (period_s < 0 or state == BUILDING))
        if (user, name) in failed:
            found.append(DueTable(user, name, path, last_s + _RETRY_S, options.get("made_by", "")))
            continue
        times = [0.0] if is_due else [last_s + period_s] if period_s > 0 else []
        if period_s != MANUAL:
            times += _ages(options, last_s, indexed_s, pinned_s)
        if times:
            found.append(DueTable(user, name, path, min(times), options.get("made_by", "")))
    return found


def _ages(
    options: Mapping[str, Any], last_s: float, indexed_s: float | None, pinned_s: float | None
) -> list[float]:
    """Return when the oldest document expires, and when the oldest pin is renewed, as Unix times.

    Documents whose times are close together expire together: one refresh reads the whole table.
    """
    times: list[float] = []
    ttl_s = options.get("ttl_s", 0.0)
    if ttl_s and indexed_s is not None:
        together_s = min(max(_RARELY_S, ttl_s / 100), _LONGEST_TOGETHER_S)
        times.append(max(indexed_s + ttl_s, last_s + together_s))
    if options.get("tier") == "memory" and pinned_s is not None:
        times.append(max(pinned_s + PIN_RENEW_S, last_s + _RETRY_S))
    return times


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A background job with partitions that nobody has ended: whose, where, and which.

    Attributes:
        user: whose session runs the job.
        name: the job.
        path: search path of the session.
        partitions: in order.
    """

    user: str
    name: str
    path: str
    partitions: tuple[int, ...]


class JobKeeper:
    """Runs background jobs until it is cancelled, each in a task of its own."""

    def __init__(
        self,
        read: Read,
        run_job: Callable[[OpenJob], Awaitable[None]],
        changed: asyncio.Event,
    ) -> None:
        """Note what to use.

        Args:
            read: runs a query.
            run_job: runs the partitions of a job.
            changed: set after each CREATE or RESUME of a background job.
        """
        self._read = read
        self._run_job = run_job
        self._changed = changed
        self._running: dict[tuple[str, str], asyncio.Task[bool]] = {}

    async def run(self) -> None:
        """Start what a killed front left, and then each new job."""
        try:
            while True:
                self._changed.clear()
                for job in open_jobs(await self._read(OPEN_JOBS)):
                    if (job.user, job.name) not in self._running:
                        self._start(job)
                await self._changed.wait()
        finally:
            for task in self._running.values():
                task.cancel()
            if self._running:
                await asyncio.wait(self._running.values())

    def _start(self, job: OpenJob) -> None:
        task = asyncio.create_task(self._try(job))
        self._running[job.user, job.name] = task

        def done(ended: asyncio.Task[bool]) -> None:
            self._running.pop((job.user, job.name), None)
            if not ended.cancelled() and ended.result():
                self._changed.set()  # It may have been resumed at its very end.

        task.add_done_callback(done)

    async def _try(self, job: OpenJob) -> bool:
        """Run a job; return whether it came to its end."""
        try:
            await self._run_job(job)
        except TierKVError as error:  # tierkv.jobs has it, too.
            _log.warning("background job %s stopped: %s", job.name, error.message)
            return False
        return True


def open_jobs(rows: Sequence[tuple[Any, ...]]) -> list[OpenJob]:
    """Return the background jobs among the open partitions. Pure.

    Args:
        rows: result of OPEN_JOBS.
    """
    found: dict[tuple[str, str], OpenJob] = {}
    for owner, name, path, text, part in rows:
        options = json.loads(text)
        user = owner or options["made_by"]
        if options.get("background"):
            before = found.get((user, name), OpenJob(user, name, path, ()))
            found[user, name] = replace(before, partitions=(*before.partitions, int(part)))
    return list(found.values())
