"""Where namespaces, records and the cluster secret last: one contract for SQLite and PostgreSQL.

Called by metaserver/namespaces.py. A file (metaserver/database_file.py) belongs to one meta server.
A PostgreSQL database (metaserver/database_postgres.py) is shared by all: any server writes, in a
transaction with a lock on the row of the change counter; PostgreSQL orders the writes, and no meta
server leads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


class NamespaceRow(NamedTuple):
    """A namespace as stored: ``tenants``, ``policy`` and ``limits`` are JSON."""

    name: str
    tenants: str
    cache_enabled: bool
    policy: str
    limits: str = "{}"


class StoredRecord(NamedTuple):
    """A record as stored; see metaserver/client.py::ClusterRecord. ``body`` is never empty."""

    kind: str
    name: str
    body: str


class Stored(NamedTuple):
    """All that a database has, each sorted by name."""

    namespaces: Sequence[NamespaceRow] = ()
    records: Sequence[StoredRecord] = ()


class NamespaceDatabase(Protocol):
    """Durable namespaces and records, and the cluster secret. Methods block; thread-safe.

    1. ``open`` makes missing tables and raises ConfigError, with a cure, if the database can't be
       used.
    2. ``secret`` returns the stored secret; the first caller ever stores ``fresh``.
    3. ``write`` calls ``check`` with everything stored, in a transaction without further writers,
       stores the returned row, and returns everything stored, durable on return. An error of
       ``check`` leaves the database unchanged. A refusal of the database (full, lost) is
       DirectoryUnavailableError.
    4. ``write_record`` makes or replaces a record, ``remove`` and ``remove_record`` remove what has
       the name, if anything has; otherwise as ``write``.
    5. ``follow`` calls ``changed`` with all that is stored, from a thread of the database, after a
       write of another process; within a second or so. A file has no other writers.
    6. After ``close`` nothing may be called, and ``changed`` is not called any more.

    Attributes:
        trouble: damage or a lost connection, for people; empty without.
    """

    trouble: str

    def open(self) -> None: ...

    def secret(self, fresh: bytes) -> bytes: ...

    def stored(self) -> Stored: ...

    def write(self, check: Callable[[Stored], NamespaceRow]) -> Stored: ...

    def remove(self, name: str) -> Stored: ...

    def write_record(self, record: StoredRecord) -> Stored: ...

    def remove_record(self, kind: str, name: str) -> Stored: ...

    def follow(self, changed: Callable[[Stored], None]) -> None: ...

    def close(self) -> None: ...
