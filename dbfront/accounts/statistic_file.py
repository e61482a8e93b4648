"""The SQLite file of the front's statistics: how it is opened, made, and told to be damaged.

Only dbfront/accounts/statistic_store.py works with it. The tables are those of
dbfront/accounts/statistic_tables.py.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from tierkv.dbfront.accounts.statistic_tables import GROUPS, LAST, QUERY_LOG, TABLES, CounterTable

SCHEMA_VERSION: Final = 1
MEMORY: Final = ":memory:"
_BUSY_S: Final = 5.0


class Transaction:
    """BEGIN and COMMIT, or ROLLBACK when anything is raised."""

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
    """The file is damaged, or of a later release."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is at fault."""
    if isinstance(error, _UnusableFileError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def open_database(path: str, now_s: float) -> sqlite3.Connection:
    """Open a file, or ``MEMORY``, and make what is missing in it.

    Raises:
        sqlite3.DatabaseError: it can't be used; ``is_damage`` says whose fault that is.
        OSError: nor its folder made.
    """
    if path != MEMORY:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        ((verdict,),) = database.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise _UnusableFileError(verdict)
        _make_tables(database, now_s)
    except BaseException:
        database.close()
        raise
    return database


def _make_tables(database: sqlite3.Connection, now_s: float) -> None:
    with Transaction(database):
        ((version,),) = database.execute("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise _UnusableFileError(f"schema {version}; this release knows {SCHEMA_VERSION}")
        if version == SCHEMA_VERSION:
            return
        for table in TABLES:
            columns = ", ".join(f"{name} {kind}" for name, kind in table.columns.items())
            keys = ", ".join(table.keys)
            database.execute(f"CREATE TABLE {table.name} ({columns}, PRIMARY KEY ({keys}))")
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
