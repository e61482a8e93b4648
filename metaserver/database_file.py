"""The meta server's SQLite file: opened, backed up at each change, and set aside when damaged.

Made by metaserver/namespaces.py; implements NamespaceDatabase. Next to FILE lie FILE.backup, a copy
from the last change; FILE.secret, the cluster secret if none is configured; FILE.lock, held by the
owner process; and FILE.bad, if FILE was ever damaged. A damaged file must not keep the meta server
from starting: the backup replaces it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.metaserver.namespace_database import NamespaceRow, Stored, StoredRecord

log = logging.getLogger(__name__)
MEMORY: Final = ":memory:"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS cluster (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS namespaces (
    name TEXT PRIMARY KEY, tenants TEXT NOT NULL, cache_enabled INTEGER NOT NULL,
    policy TEXT NOT NULL DEFAULT '{}', limits TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, name)
);
"""
SCHEMA_VERSION: Final = 3
"""Stored as SQLite's user_version; 0 in older files. The next release's is understood, too."""

_PUT: Final = """
INSERT INTO namespaces (name, tenants, cache_enabled, policy, limits) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET tenants = excluded.tenants, limits = excluded.limits,
    cache_enabled = excluded.cache_enabled, policy = excluded.policy
"""
_PUT_RECORD: Final = "INSERT OR REPLACE INTO records (kind, name, body) VALUES (?, ?, ?)"
_REMOVE_RECORD: Final = "DELETE FROM records WHERE kind = ? AND name = ?"
_ADDED: Final = ("policy", "limits")
_ADD: Final = "ALTER TABLE namespaces ADD COLUMN {} TEXT NOT NULL DEFAULT '{{}}'"
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_MOST_SECRET_BYTES: Final = 64


class DatabaseFile:
    """One file and the files next to it; ``MEMORY`` has no files.

    Attributes:
        trouble: damage found by ``open``, and the recovery; empty without damage.
    """

    def __init__(self, database: str) -> None:
        self.trouble = ""
        self._database = database
        self._lock_fd: int | None = None
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file; create a missing file, and replace a damaged file by its backup.

        Raises:
            ConfigError: a running meta server owns the file, or the file can't be used, for a
                reason other than damage.
        """
        try:
            self._connection = self._opened()
            self.back_up()
        except ConfigError:
            self.close()
            raise
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise ConfigError(
                f"meta.database = {self._database!r} can't be used: {error}",
                hint="Name a file in a directory this process may write, or :memory:.",
            ) from error

    def secret(self, fresh: bytes) -> bytes:
        """Return the secret of the database, of the secret file, or ``fresh``; store it in both."""
        fallback = self.read_secret()
        with self._open as connection:
            connection.execute(
                "INSERT OR IGNORE INTO cluster VALUES ('secret', ?)", (fallback or fresh,)
            )
        row = self._open.execute("SELECT value FROM cluster WHERE name = 'secret'").fetchone()
        secret = bytes(row[0])
        if self.trouble and secret != fallback:
            log.critical("the cluster secret may be another one: blocks of before may not be found")
        if secret != fallback:
            self.write_secret(secret)
        self.back_up()
        return secret

    def stored(self) -> Stored:
        """Return all namespaces and records."""
        rows = self._open.execute(
            "SELECT name, tenants, cache_enabled, policy, limits FROM namespaces ORDER BY name"
        )
        namespaces = [
            NamespaceRow(name, tenants, bool(on), *rest) for name, tenants, on, *rest in rows
        ]
        records = self._open.execute("SELECT kind, name, body FROM records ORDER BY kind, name")
        return Stored(namespaces, [StoredRecord(*record) for record in records])

    def write(self, check: Callable[[Stored], NamespaceRow]) -> Stored:
        """Store the row that ``check`` makes of what is stored; see NamespaceDatabase."""
        return self._change(_PUT, lambda: check(self.stored()))

    def remove(self, name: str) -> Stored:
        """Remove a namespace; see NamespaceDatabase."""
        return self._change("DELETE FROM namespaces WHERE name = ?", lambda: (name,))

    def write_record(self, record: StoredRecord) -> Stored:
        """Make or replace a record; see NamespaceDatabase."""
        return self._change(_PUT_RECORD, lambda: record)

    def remove_record(self, kind: str, name: str) -> Stored:
        """Remove a record; see NamespaceDatabase."""
        return self._change(_REMOVE_RECORD, lambda: (kind, name))

    def _change(self, statement: str, values: Callable[[], tuple[object, ...]]) -> Stored:
        try:
            row = values()
            with self._open as connection:
                connection.execute(statement, row)
        except sqlite3.Error as error:
            raise DirectoryUnavailableError(
                f"the change could not be stored: {error}", hint=_storage_hint(error)
            ) from error
        self.back_up()
        return self.stored()

    def follow(self, changed: Callable[[Stored], None]) -> None:
        """Do nothing: the file has no other writers."""

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None, "open() comes first"
        return self._connection

    def _opened(self) -> sqlite3.Connection:
        self._lock()
        try:
            return _open(self._database)
        except sqlite3.Error as error:
            if self._database == MEMORY or not _is_damage(error):
                raise
            self._set_aside(error)
        if (copy := self._beside("backup")).exists():
            with contextlib.suppress(OSError, sqlite3.Error):
                return self._restore(copy)
        self.trouble += "; no readable copy: namespaces must be made again"
        log.critical("%s", self.trouble)
        self._remove()
        return _open(self._database)

    def close(self) -> None:
        """Close the file and let another process have it."""
        if self._connection is not None:
            self._connection.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self) -> None:
        """Take FILE.lock; the kernel frees the lock however the process ends."""
        if self._database == MEMORY:
            return
        lock = self._beside("lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"meta.database = {self._database!r} is owned by a running meta server",
                hint="Stop that one, or give this one a file of its own.",
            ) from None
        self._lock_fd = fd

    def back_up(self) -> None:
        """Back up the database; a failure is only logged, because the database itself is intact."""
        connection = self._open
        if self._database == MEMORY:
            return
        fresh = self._beside("backup.new")
        try:
            os.close(os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600))
            with contextlib.closing(sqlite3.connect(fresh)) as copy:
                connection.backup(copy)
            fresh.replace(self._beside("backup"))
        except (OSError, sqlite3.Error) as error:
            log.warning("%s could not be copied: %s", self._database, error)
            with contextlib.suppress(OSError):
                fresh.unlink()

    def read_secret(self) -> bytes:
        """Return the secret from its own file; empty without a valid secret file."""
        if self._database == MEMORY:
            return b""
        try:
            text = self._beside("secret").read_text().strip()
            secret = bytes.fromhex(text)
        except (OSError, ValueError):
            return b""
        return secret if 16 <= len(secret) <= _MOST_SECRET_BYTES else b""

    def write_secret(self, secret: bytes) -> None:
        """Write the secret to its own file; a failure is only logged: the database has it."""
        if self._database == MEMORY:
            return
        fresh = self._beside("secret.new")
        try:
            fd = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secret.hex() + "\n")
                file.flush()
                os.fsync(fd)
            fresh.replace(self._beside("secret"))
        except OSError as error:
            log.warning("the cluster secret has no copy of its own: %s", error)

    def _set_aside(self, error: sqlite3.Error) -> None:
        aside = self._beside("bad")
        Path(self._database).replace(aside)
        self._remove()
        self.trouble = f"{self._database} is damaged ({error}); set aside as {aside}"

    def _restore(self, copy: Path) -> sqlite3.Connection:
        data = copy.read_bytes()
        fd = os.open(self._database, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fsync(fd)
        connection = _open(self._database)
        self.trouble += f"; its copy of the last change, {copy}, took its place"
        log.critical("%s", self.trouble)
        return connection

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(self._database + suffix).unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        return Path(f"{self._database}.{suffix}")


def _storage_hint(error: sqlite3.Error) -> str:
    """Tell the cure; SQLite reports a failed write to its log as I/O error."""
    if _code(error) in _FULL:
        return "The disk of meta.database is full: free space there, then try again."
    return "The file of meta.database can't be written: see the meta server's log."


def _is_damage(error: sqlite3.Error) -> bool:
    return isinstance(error, _DamagedError) or _code(error) in _DAMAGE


class _DamagedError(sqlite3.DatabaseError):
    """SQLite's own check found the file damaged."""


def _code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _open(database: str) -> sqlite3.Connection:
    if database != MEMORY:
        # The file holds the cluster secret: only the owner may ever read the file.
        Path(database).parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))
    connection = sqlite3.connect(database, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        ((verdict,),) = connection.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise _DamagedError(verdict)
        _check_version(connection, database)
        connection.executescript(_SCHEMA)
        columns = {row[1] for row in connection.execute("PRAGMA table_info(namespaces)")}
        for name in _ADDED:
            if name not in columns:  # Made by an earlier release.
                connection.execute(_ADD.format(name))
    except (sqlite3.Error, ConfigError):
        connection.close()
        raise
    return connection


def _check_version(connection: sqlite3.Connection, database: str) -> None:
    ((version,),) = connection.execute("PRAGMA user_version")
    if version > SCHEMA_VERSION + 1:
        raise ConfigError(
            f"meta.database = {database!r} has version {version} of the schema, this release "
            f"knows {SCHEMA_VERSION}",
            hint="Use the release that wrote it, or the one before that.",
        )
    if version < SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
