"""Namespaces in PostgreSQL, shared by all meta servers of a cluster; implements NamespaceDatabase.

Made by metaserver/namespaces.py when ``meta.database`` is a PostgreSQL URL. The tables are in
schema ``tierkv_meta``. Every write locks the single row of ``tierkv_meta.changes``, whose number
grows by one, and notifies the other servers; they also look at the number every second.

A lost connection is opened again. Meanwhile reads come from the memory of the meta server, and
writes fail with an error that says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg

from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError
from tierkv.metaserver.namespace_database import NamespaceRow, Stored, StoredRecord

log = logging.getLogger(__name__)

MIGRATIONS: Final = (
    """
    CREATE TABLE tierkv_meta.cluster (name text PRIMARY KEY, value bytea NOT NULL);
    CREATE TABLE tierkv_meta.namespaces (
        name text PRIMARY KEY, tenants text NOT NULL, cache_enabled boolean NOT NULL,
        policy text NOT NULL
    );
    CREATE TABLE tierkv_meta.changes (number bigint NOT NULL);
    INSERT INTO tierkv_meta.changes VALUES (0);
    """,
    "ALTER TABLE tierkv_meta.namespaces ADD COLUMN limits text NOT NULL DEFAULT '{}'",
    """
    CREATE TABLE tierkv_meta.records (
        kind text NOT NULL, name text NOT NULL, body text NOT NULL, PRIMARY KEY (kind, name)
    )
    """,
)
"""What each version of the schema adds. A release may only add what the release before ignores, so
that servers of both work on one database."""

_CHANNEL: Final = "tierkv_meta"
_LOCK: Final = 0x7469_6572_6B76
"""Advisory lock of those that make or change the schema."""

_CONNECT_S: Final = 5
_LOOK_S: Final = 1.0
_KEEPALIVE: Final = {
    "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 2,
    "tcp_user_timeout": 5_000,
}  # fmt: skip
_ROWS: Final = (
    "SELECT name, tenants, cache_enabled, policy, limits FROM tierkv_meta.namespaces ORDER BY name"
)

_RECORDS: Final = "SELECT kind, name, body FROM tierkv_meta.records ORDER BY kind, name"

_PUT: Final = (
    "INSERT INTO tierkv_meta.namespaces (name, tenants, cache_enabled, policy, limits) "
    "VALUES (%s, %s, %s, %s, %s) ON CONFLICT (name) DO UPDATE SET tenants = excluded.tenants, "
    "limits = excluded.limits, cache_enabled = excluded.cache_enabled, policy = excluded.policy"
)

_PUT_RECORD: Final = (
    "INSERT INTO tierkv_meta.records (kind, name, body) VALUES (%s, %s, %s) "
    "ON CONFLICT (kind, name) DO UPDATE SET body = excluded.body"
)
_REMOVE_RECORD: Final = "DELETE FROM tierkv_meta.records WHERE kind = %s AND name = %s"

Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresDatabase:
    """A PostgreSQL database; see NamespaceDatabase.

    Attributes:
        _written: number of the last change made here; the follower tells no older state.
        _telling: held while the follower tells a state, and while ``_written`` changes.
    """

    def __init__(self, url: str) -> None:
        self.trouble = ""
        self._url = url
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None
        self._written = -1
        self._telling = threading.Lock()

    def open(self) -> None:
        """Connect and bring the schema up to date."""
        try:
            with self._ready() as connection, connection.transaction():
                _migrate(connection)
        except psycopg.Error as error:
            self.close()
            raise ConfigError(
                f"meta.database: PostgreSQL can't be used: {_text(error)}",
                hint="Give a URL as postgresql://user:password@host/database, of a user who may "
                "create a schema there.",
            ) from error
        except ConfigError:
            self.close()
            raise

    def secret(self, fresh: bytes) -> bytes:
        """Return the stored secret; the first caller ever stores ``fresh``."""
        with self._ready() as connection, connection.transaction():
            connection.execute(
                "INSERT INTO tierkv_meta.cluster VALUES ('secret', %s) ON CONFLICT DO NOTHING",
                (fresh,),
            )
            found = connection.execute(
                "SELECT value FROM tierkv_meta.cluster WHERE name = 'secret'"
            ).fetchone()
        assert found is not None
        return bytes(found[0])

    def stored(self) -> Stored:
        """Return all namespaces and records."""
        with self._ready() as connection:
            return _stored(connection)

    def write(self, check: Callable[[Stored], NamespaceRow]) -> Stored:
        """Store the row that ``check`` makes of what is stored; see NamespaceDatabase."""
        return self._change(lambda connection: connection.execute(_PUT, check(_stored(connection))))

    def remove(self, name: str) -> Stored:
        """Remove a namespace; see NamespaceDatabase."""
        statement = "DELETE FROM tierkv_meta.namespaces WHERE name = %s"
        return self._change(lambda connection: connection.execute(statement, (name,)))

    def write_record(self, record: StoredRecord) -> Stored:
        """Make or replace a record; see NamespaceDatabase."""
        return self._change(lambda connection: connection.execute(_PUT_RECORD, record))

    def remove_record(self, kind: str, name: str) -> Stored:
        """Remove a record; see NamespaceDatabase."""
        return self._change(lambda connection: connection.execute(_REMOVE_RECORD, (kind, name)))

    def _change(self, change: Callable[[Connection], object]) -> Stored:
        try:
            with self._ready() as connection, connection.transaction():
                connection.execute("SELECT number FROM tierkv_meta.changes FOR UPDATE")
                change(connection)
                found = connection.execute(
                    "UPDATE tierkv_meta.changes SET number = number + 1 RETURNING number"
                ).fetchone()
                connection.execute(f"NOTIFY {_CHANNEL}")
                stored = _stored(connection)
        except psycopg.Error as error:
            raise DirectoryUnavailableError(
                f"PostgreSQL did not store the change: {_text(error)}",
                hint="Look at the server of meta.database, then try again.",
            ) from error
        with self._telling:
            self._written = -1 if found is None else found[0]
        return stored

    def follow(self, changed: Callable[[Stored], None]) -> None:
        """Call ``changed`` after writes of other servers, until ``close``."""
        self._follower = threading.Thread(
            target=self._follow, args=(changed,), name="namespaces", daemon=True
        )
        self._follower.start()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        if self._follower is not None:
            self._follower.join()
        with self._lock:
            self._drop()

    def _follow(self, changed: Callable[[Stored], None]) -> None:
        seen = -1
        while not self._closed.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    with self._telling:
                        self._written = -1  # A database from a backup may have fewer changes.
                    while not self._closed.is_set():
                        (number,) = connection.execute(
                            "SELECT number FROM tierkv_meta.changes"
                        ).fetchone() or (seen,)
                        if number != seen:
                            seen = number
                            self._tell(number, _stored(connection), changed)
                        self._note("")
                        self._wait(connection)
            except (psycopg.Error, ConfigError) as error:
                self._note(f"meta.database is lost, namespaces can't be changed: {_text(error)}")
                self._closed.wait(_LOOK_S)

    def _tell(self, number: int, stored: Stored, changed: Callable[[Stored], None]) -> None:
        """Tell a state, unless this server has written since the state was read."""
        with self._telling:
            if number >= self._written:
                changed(stored)

    def _wait(self, connection: Connection) -> None:
        """Wait for a notification, for a look's time at most, and notice ``close`` soon."""
        until = time.monotonic() + _LOOK_S
        while not self._closed.is_set() and time.monotonic() < until:
            if any(True for _ in connection.notifies(timeout=_LOOK_S / 10, stop_after=1)):
                return

    def _note(self, trouble: str) -> None:
        if trouble and not self.trouble:
            log.warning("%s", trouble)
        elif self.trouble and not trouble:
            log.info("meta.database answers again")
        self.trouble = trouble

    def _connect(self) -> Connection:
        return psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="tierkv meta",
            options="-c statement_timeout=10s",
            **_KEEPALIVE,  # type: ignore[arg-type]
        )

    @contextlib.contextmanager
    def _ready(self) -> Iterator[Connection]:
        """Yield the connection, opened again if it was lost; drop it if it fails."""
        with self._lock:
            if self._connection is not None and not _answers(self._connection):
                self._drop()
            if self._connection is None:
                self._connection = self._connect()
            try:
                yield self._connection
            except psycopg.OperationalError:
                self._drop()
                raise

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def _answers(connection: Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except psycopg.Error:
        return False
    return True


def _migrate(connection: Connection) -> None:
    """Bring the schema to our version; one version newer is understood, too.

    Raises:
        ConfigError: the schema is of a release after the next one.
    """
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
    connection.execute("CREATE SCHEMA IF NOT EXISTS tierkv_meta")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS tierkv_meta.schema_version (version int NOT NULL)"
    )
    found = connection.execute("SELECT version FROM tierkv_meta.schema_version").fetchone()
    version: int = found[0] if found else 0
    if version > len(MIGRATIONS) + 1:
        raise ConfigError(
            f"meta.database has version {version} of the schema, this release knows "
            f"{len(MIGRATIONS)}",
            hint="Use the release of the other meta servers, or the one before it.",
        )
    for step in MIGRATIONS[version:]:
        connection.execute(step)
    if version < len(MIGRATIONS):
        connection.execute("DELETE FROM tierkv_meta.schema_version")
        connection.execute("INSERT INTO tierkv_meta.schema_version VALUES (%s)", (len(MIGRATIONS),))


def _stored(connection: Connection) -> Stored:
    return Stored(
        [NamespaceRow(*row) for row in connection.execute(_ROWS).fetchall()],
        [StoredRecord(*row) for row in connection.execute(_RECORDS).fetchall()],
    )


def _text(error: Exception) -> str:
    """Return the error's text in one line; libpq quotes pieces of a malformed URL, so not that."""
    if isinstance(error, psycopg.ProgrammingError) and not error.sqlstate:
        return "the URL is malformed (a space is %20, an @ in a password %40)"
    return " ".join(str(error).split()) or type(error).__name__
