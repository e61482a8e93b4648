"""The SQLite file of the front's statistics, and its tables of counters.

A table has key columns, facts about the key (the newest value is kept) and counters. New counts are
summed in memory and then added to the table, so counters survive a restart of the front.
dbfront/accounts/statistic_store.py owns the file; dbfront/accounts/statement_log.py fills the
tables.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.kvcore import limits

LAST: Final = "last_s"
"""Fact of every table: Unix time of the row's last change. The rows with the oldest change are
deleted first.
"""


@dataclass(frozen=True, slots=True)
class CounterTable:
    """A table of counters; each column has a name and an SQLite type.

    A counter of a later release has DEFAULT 0: files of older releases get the column, and older
    releases that share the file leave the column out.

    Attributes:
        keys: primary key columns.
        facts: columns with the newest value; ``LAST`` is added.
        counters: columns with sums.
        most_rows: maximum number of rows.
        group: group name in ``tierkv.stat_reset(group)``.
    """

    name: str
    keys: dict[str, str]
    facts: dict[str, str]
    counters: dict[str, str]
    most_rows: int
    group: str

    @property
    def columns(self) -> dict[str, str]:
        """All columns, in order."""
        return {**self.keys, **self.facts, LAST: "REAL", **self.counters}


_TOKENS: Final = {
    "prompt_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
}

STATEMENTS: Final = CounterTable(
    "statements",
    keys={"userid": "TEXT", "queryid": "INTEGER"},
    facts={"query": "TEXT"},
    counters={
        "calls": "INTEGER",
        "failures": "INTEGER",
        "total_time": "REAL",
        "engine_time": "REAL",
        "llm_wait_time": "REAL",
        "rounds": "INTEGER",
        "ai_calls": "INTEGER",
        "ai_calls_deduped": "INTEGER",
        "result_cache_hits": "INTEGER",
        "classified_calls": "INTEGER DEFAULT 0",
        **_TOKENS,
        "errors": "INTEGER",
    },
    most_rows=limits.MAX_STATEMENTS_KEPT,
    group="statements",
)
FUNCTIONS: Final = CounterTable(
    "functions",
    keys={"function_name": "TEXT", "model_name": "TEXT"},
    facts={},
    counters={
        "calls": "INTEGER",
        "rows": "INTEGER",
        "errors": "INTEGER",
        "retries": "INTEGER",
        "null_results": "INTEGER",
        "classified_calls": "INTEGER DEFAULT 0",
        **_TOKENS,
        "total_time": "REAL",
        "answered": "INTEGER",
        "ttft_time": "REAL",
    },
    most_rows=limits.MAX_FUNCTIONS_KEPT,
    group="functions",
)
FIRST_TOKENS: Final = CounterTable(
    "first_tokens",
    keys={"function_name": "TEXT", "model_name": "TEXT", "step": "INTEGER"},
    facts={},
    counters={"answers": "INTEGER"},
    most_rows=limits.MAX_FUNCTIONS_KEPT * 100,
    group="functions",
)
"""Number of answers whose first token came within each time step; see ``step_of``."""

USAGE: Final = CounterTable(
    "usage",
    keys={
        "start_s": "INTEGER",
        "query_id": "TEXT",
        "function_name": "TEXT",
        "model_name": "TEXT",
    },
    facts={"user_name": "TEXT", "query_tag": "TEXT", "is_completed": "INTEGER"},
    counters={**_TOKENS, "calls": "INTEGER", "errors": "INTEGER"},
    most_rows=limits.MAX_USAGE_ROWS,
    group="usage",
)
SCHEDULER: Final = CounterTable(
    "scheduler",
    keys={"model_name": "TEXT"},
    facts={},
    counters={
        "decisions": "INTEGER",
        "affinity_hit": "INTEGER",
        "affinity_miss": "INTEGER",
        "load_override": "INTEGER",
        "matched_tokens": "INTEGER",
        "predicted_tokens": "INTEGER",
        "queued": "INTEGER",
        "queue_time": "REAL",
    },
    most_rows=limits.MAX_FUNCTIONS_KEPT,
    group="scheduler",
)
KV_INDEX_USES: Final = CounterTable(
    "kv_index_uses",
    keys={"owner": "TEXT", "name": "TEXT", "made_s": "REAL"},
    facts={"model_name": "TEXT"},
    counters={"calls": "INTEGER", "hit_tokens": "INTEGER"},
    most_rows=limits.MAX_FUNCTIONS_KEPT,
    group="functions",
)
"""Calls whose prompts begin with documents of an index."""

TABLES: Final = (STATEMENTS, FUNCTIONS, FIRST_TOKENS, USAGE, SCHEDULER, KV_INDEX_USES)

QUERY_LOG: Final[dict[str, str]] = {
    "event_s": "REAL",
    "type": "TEXT",
    "query_id": "TEXT",
    "queryid": "INTEGER",
    "pid": "INTEGER",
    "user_name": "TEXT",
    "application_name": "TEXT",
    "query_tag": "TEXT",
    "query_kind": "TEXT",
    "query": "TEXT",
    "query_duration": "REAL",
    "rounds": "INTEGER",
    "ai_calls": "INTEGER",
    **_TOKENS,
    "errors": "INTEGER",
    "exception_code": "TEXT",
}
"""Columns of the log of statements, an append-only table."""

QUERY_LOG_GROUP: Final = "query_log"
GROUPS: Final = tuple(
    dict.fromkeys([*(table.group for table in TABLES), QUERY_LOG_GROUP, "kvcache"])
)
"""Groups that can be reset separately."""

HOUR_S: Final = 3600

_STEP: Final = math.log(1.02)
_SHORTEST_S: Final = 1e-6


def step_of(seconds: float) -> int:
    """Return the step of a duration. Steps grow by 2 %, which is the precision of quantiles."""
    return math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _STEP)


def seconds_of(step: int) -> float:
    """Return the middle of a step."""
    return _SHORTEST_S * math.exp((step - 0.5) * _STEP) if step else _SHORTEST_S


SCHEMA_VERSION: Final = 1
MEMORY: Final = ":memory:"
_BUSY_S: Final = 5.0


class Transaction:
    """BEGIN and COMMIT, or ROLLBACK after an exception."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> sqlite3.Connection:
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._database.execute("COMMIT")
        elif self._database.in_transaction:
            self._database.execute("ROLLBACK")


class _UnusableFileError(sqlite3.DatabaseError):
    """The file is damaged, or was written by a later release."""


def is_damage(error: sqlite3.Error) -> bool:
    """Return True if the file itself is the cause of the error."""
    if isinstance(error, _UnusableFileError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def open_private(path: str, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    """Open a file that only its owner can read, or ``MEMORY``, for several threads and processes.

    Args:
        path: the file; made with its folder if missing.
        prepare: makes the tables; if it fails, the file is closed.

    Raises:
        sqlite3.DatabaseError: the file cannot be used.
        OSError: the file or its folder cannot be created.
    """
    if path != MEMORY:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def open_database(path: str, now_s: float) -> sqlite3.Connection:
    """Open a file, or ``MEMORY``, and create missing tables.

    Raises:
        sqlite3.DatabaseError: the file cannot be used; ``is_damage`` returns True if the file is
            the cause.
        OSError: the file or its folder cannot be created.
    """

    def prepare(database: sqlite3.Connection) -> None:
        ((verdict,),) = database.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise _UnusableFileError(verdict)
        _make_tables(database, now_s)

    return open_private(path, prepare)


def _make_tables(database: sqlite3.Connection, now_s: float) -> None:
    with Transaction(database):
        ((version,),) = database.execute("PRAGMA user_version")
        if version > SCHEMA_VERSION + 1:  # The next release only adds what may be left out.
            raise _UnusableFileError(f"schema {version}; this release knows {SCHEMA_VERSION}")
        for table in TABLES:  # A file of an older release may lack some.
            columns = ", ".join(f"{name} {kind}" for name, kind in table.columns.items())
            keys = ", ".join(table.keys)
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {table.name} ({columns}, PRIMARY KEY ({keys}))"
            )
            there = {row[1] for row in database.execute(f"PRAGMA table_info({table.name})")}
            for name in table.counters.keys() - there:
                database.execute(f"ALTER TABLE {table.name} ADD {name} {table.counters[name]}")
        if version >= SCHEMA_VERSION:
            return
        columns = ", ".join(f"{name} {kind}" for name, kind in QUERY_LOG.items())
        database.execute(f"CREATE TABLE query_log (id INTEGER PRIMARY KEY, {columns})")
        database.execute("CREATE TABLE resets (name TEXT PRIMARY KEY, value REAL)")
        database.execute("CREATE TABLE baselines (name TEXT PRIMARY KEY, value REAL)")
        database.executemany(
            "INSERT INTO resets VALUES (?, ?)", [(group, now_s) for group in GROUPS]
        )
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _upsert(table: CounterTable) -> str:
    places = ", ".join("?" * len(table.columns))
    updates = [f"{name} = coalesce(excluded.{name}, {name})" for name in table.facts]
    updates += [f"{LAST} = max({LAST}, excluded.{LAST})"]
    updates += [f"{name} = {name} + excluded.{name}" for name in table.counters]
    return (
        f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({places}) "
        f"ON CONFLICT ({', '.join(table.keys)}) DO UPDATE SET {', '.join(updates)}"
    )


UPSERTS: Final = {table.name: _upsert(table) for table in TABLES}
APPEND: Final = (
    f"INSERT INTO query_log ({', '.join(QUERY_LOG)}) VALUES ({', '.join('?' * len(QUERY_LOG))})"
)
