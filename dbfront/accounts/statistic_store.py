"""Persistent statistics of the front: one SQLite file, or memory, with pending sums in memory.

Called by dbfront/accounts/statement_log.py, from any thread. ``add`` and ``append`` only touch
memory; methods with disk access are meant to be called off the event loop. Errors never stop the
front: a damaged file is moved aside, and a full disk is logged once and retried.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tierkv.dbfront.accounts.statistic_tables import (
    APPEND,
    GROUPS,
    LAST,
    MEMORY,
    QUERY_LOG,
    QUERY_LOG_GROUP,
    TABLES,
    UPSERTS,
    USAGE,
    CounterTable,
    Transaction,
    is_damage,
    open_database,
)
from tierkv.kvcore import limits

_log = logging.getLogger("tierkv.statistics")

DAMAGED: Final = ".damaged"
"""Suffix of a damaged file that was moved aside; an older file of this name is replaced."""

_CHANGES_BETWEEN_PRUNES: Final = 1_000

_NO_FACTS: Final[Mapping[str, Any]] = {}

Key = tuple[Any, ...]
LogRow = Mapping[str, Any]


@dataclass(slots=True)
class _Change:
    """Pending changes of one row."""

    facts: dict[str, Any]
    counts: dict[str, float]

    def add(self, other: _Change) -> None:
        self.more(other.counts, other.facts[LAST], other.facts)

    def more(self, counts: Mapping[str, float], at_s: float, facts: Mapping[str, Any]) -> None:
        last_s = max(self.facts[LAST], at_s)
        self.facts.update(facts)
        self.facts[LAST] = last_s
        known = self.counts
        for name, value in counts.items():
            known[name] = known.get(name, 0) + value


@dataclass(slots=True)
class _UnwrittenRows:
    """Pending changes; a log row is a function called at the time of writing."""

    changes: dict[str, dict[Key, _Change]] = field(
        default_factory=lambda: {table.name: {} for table in TABLES}
    )
    log: deque[Callable[[], LogRow]] = field(
        default_factory=lambda: deque(maxlen=limits.MAX_QUERY_LOG_ROWS)
    )


class StatisticStore:
    """Counters and a log of statements.

    Attributes:
        path: path of the file; empty for memory.
        keep_s: age at which usage and log rows are deleted.
        _pending: pending changes; guarded by ``_lock``.
        _file_number: number of the open file; other processes may have the file open, too.
        _database: guarded by ``_writing``, which is acquired before ``_lock``.
    """

    def __init__(self, path: str = "", *, now_s: float, keep_s: float = 30 * 86_400.0) -> None:
        """Open or create the file; a damaged file is moved aside, an unusable file is left alone.

        Args:
            path: path of the file; empty keeps all statistics in memory.
            now_s: Unix time.
            keep_s: see the attribute.
        """
        self.path = path
        self.keep_s = keep_s
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending = _UnwrittenRows()
        self._changes_since_prune = 0
        self._failing = False
        self._closed = False
        self._file_number = 0
        self._database = self._open(now_s)

    # -- adding

    def add(
        self,
        table: CounterTable,
        key: Key,
        counts: Mapping[str, float],
        *,
        at_s: float,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Add to a row's counters; cheap, without disk access."""
        with self._lock:
            rows = self._pending.changes[table.name]
            known = rows.get(key)
            if known is None:
                rows[key] = _Change({**(facts or {}), LAST: at_s}, dict(counts))
            else:
                known.more(counts, at_s, facts or _NO_FACTS)

    def append(self, row: Callable[[], LogRow]) -> None:
        """Add a row to the log of statements; ``row`` is called when the log is written."""
        with self._lock:
            self._pending.log.append(row)

    # -- reading, writing, resetting

    def flush(self, now_s: float) -> None:
        """Write pending changes; after an error the changes stay pending."""
        with self._writing:
            self._flush(now_s)

    def select(self, sql: str, now_s: float) -> list[dict[str, Any]]:
        """Return the rows of a query over all statistics, including pending changes."""
        with self._writing:
            self._flush(now_s)
            try:
                cursor = self._database.execute(sql)
                names = [column[0] for column in cursor.description]
                return [dict(zip(names, row, strict=True)) for row in cursor]
            except sqlite3.Error as error:
                self._failed(error, now_s)
                return []

    def resets(self, now_s: float) -> dict[str, float]:
        """Return the start of counting of each group, in Unix time."""
        rows = self.select("SELECT name, value FROM resets", now_s)
        return dict.fromkeys(GROUPS, now_s) | {row["name"]: row["value"] for row in rows}

    def baseline(self, now_s: float) -> dict[str, float]:
        """Return the external counters recorded at the last ``reset`` with a baseline."""
        rows = self.select("SELECT name, value FROM baselines", now_s)
        return {row["name"]: row["value"] for row in rows}

    def reset(
        self, groups: Iterable[str], now_s: float, baseline: Mapping[str, float] | None = None
    ) -> None:
        """Reset the counters of some groups.

        Args:
            groups: groups of dbfront/accounts/statistic_tables.py.
            now_s: Unix time.
            baseline: present values of external counters that cannot be reset; None keeps the old
                values.
        """
        chosen = set(groups)
        with self._writing:
            self._flush(now_s)
            try:
                with Transaction(self._database) as database:
                    for table in TABLES:
                        if table.group in chosen:
                            database.execute(f"DELETE FROM {table.name}")
                    if QUERY_LOG_GROUP in chosen:
                        database.execute("DELETE FROM query_log")
                    if baseline is not None:
                        database.execute("DELETE FROM baselines")
                        rows = baseline.items()
                        database.executemany("INSERT INTO baselines VALUES (?, ?)", rows)
                    for group in chosen:
                        database.execute("REPLACE INTO resets VALUES (?, ?)", (group, now_s))
            except sqlite3.Error as error:
                self._failed(error, now_s)

    def close(self, now_s: float) -> None:
        """Write pending changes and close the file."""
        with self._writing:
            if not self._closed:
                self._flush(now_s)
                self._database.close()
                self._closed = True

    def _flush(self, now_s: float) -> None:
        if self._file_number and self._number_of_file() != self._file_number:
            self._database.close()  # Another process has replaced the file.
            self._database = self._open(now_s)
        with self._lock:
            pending, self._pending = self._pending, _UnwrittenRows()
        try:
            self._write(pending, now_s)
            if self._failing:
                _log.info("statistics are written again")
            self._failing = False
        except sqlite3.Error as error:
            self._put_back(pending)
            self._failed(error, now_s)

    def _write(self, pending: _UnwrittenRows, now_s: float) -> None:
        changed = len(pending.log) + sum(map(len, pending.changes.values()))
        if not changed:
            return
        rows = [row() for row in pending.log]
        with Transaction(self._database) as database:
            for table in TABLES:
                changes = pending.changes[table.name]
                if changes:
                    database.executemany(UPSERTS[table.name], _values(table, changes))
            if rows:
                database.executemany(APPEND, [tuple(map(row.get, QUERY_LOG)) for row in rows])
            self._changes_since_prune += changed
            if self._changes_since_prune >= _CHANGES_BETWEEN_PRUNES:
                self._prune(database, now_s)

    def _prune(self, database: sqlite3.Connection, now_s: float) -> None:
        """Delete rows past their age, and the oldest rows above the size limits."""
        self._changes_since_prune = 0
        oldest_s = now_s - self.keep_s
        database.execute(f"DELETE FROM {USAGE.name} WHERE {LAST} < ?", (oldest_s,))
        database.execute("DELETE FROM query_log WHERE event_s < ?", (oldest_s,))
        for table in TABLES:
            database.execute(
                f"DELETE FROM {table.name} WHERE rowid IN (SELECT rowid FROM {table.name} "
                f"ORDER BY {LAST} DESC, rowid DESC LIMIT -1 OFFSET {table.most_rows})"
            )
        database.execute(
            "DELETE FROM query_log WHERE rowid <= (SELECT max(rowid) FROM query_log) - ?",
            (limits.MAX_QUERY_LOG_ROWS,),
        )

    def _put_back(self, pending: _UnwrittenRows) -> None:
        """Return unwritten changes to the pending changes, before newer changes."""
        with self._lock:
            newer, self._pending = self._pending, pending
            for name, changes in newer.changes.items():
                rows = pending.changes[name]
                for key, change in changes.items():
                    if key in rows:
                        rows[key].add(change)
                    else:
                        rows[key] = change
            pending.log.extend(newer.log)

    # -- the file

    def _failed(self, error: sqlite3.Error, now_s: float) -> None:
        """Replace a damaged file; any other error, for example a full disk, may be temporary.

        Another process that shares the file may have replaced the file already.
        """
        if is_damage(error):
            self._database.close()
            if self._number_of_file() == self._file_number:
                self._set_aside(error)
            self._database = self._open(now_s)
        elif not self._failing:
            self._failing = True
            _log.warning("statistics can't be written to %s: %s", self.path or "memory", error)

    def _open(self, now_s: float) -> sqlite3.Connection:
        try:
            return self._opened(now_s)
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self._set_aside(error)
            else:
                self._warn_unusable(error)
        except OSError as error:
            self._warn_unusable(error)
        try:
            return self._opened(now_s)
        except (sqlite3.Error, OSError):
            return open_database(MEMORY, now_s)

    def _opened(self, now_s: float) -> sqlite3.Connection:
        database = open_database(self.path or MEMORY, now_s)
        self._file_number = self._number_of_file()
        return database

    def _number_of_file(self) -> int:
        """Return the number of the file that has the path now; 0 without a file."""
        try:
            return os.stat(self.path).st_ino if self.path else 0
        except OSError:
            return 0

    def _warn_unusable(self, error: Exception) -> None:
        _log.warning(
            "front.stats_path = %r can't be used: %s; statistics are lost when this process ends",
            self.path,
            error,
        )

    def _set_aside(self, error: Exception) -> None:
        aside = self.path + DAMAGED
        _log.warning(
            "starting new statistics: %s is damaged (%s), moved to %s", self.path, error, aside
        )
        try:
            os.replace(self.path, aside)
            for ending in ("-wal", "-shm"):
                Path(self.path + ending).unlink(missing_ok=True)
        except OSError as failure:
            self._warn_unusable(failure)


def _values(table: CounterTable, changes: dict[Key, _Change]) -> list[Key]:
    return [
        (
            *key,
            *(change.facts.get(name) for name in (*table.facts, LAST)),
            *(change.counts.get(name, 0) for name in table.counters),
        )
        for key, change in changes.items()
    ]
