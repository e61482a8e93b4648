"""Where namespaces and the cluster secret last: one contract for SQLite and PostgreSQL.

Called by metaserver/namespaces.py. A file (metaserver/database_file.py) belongs to one meta server.
A PostgreSQL database (metaserver/database_postgres.py) is shared by all: any of them writes, in a
transaction that locks the one row that counts changes, so PostgreSQL orders the writes and no meta
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


Rows = Sequence[NamespaceRow]


class NamespaceDatabase(Protocol):
    """A durable table of namespaces, and the cluster secret. Methods block; thread-safe.

    1. ``open`` makes missing tables and raises ConfigError, with a cure, if the database can't be
       used.
    2. ``secret`` returns the stored secret; the first caller ever stores ``fresh``.
    3. ``write`` calls ``check`` with all rows in a transaction that excludes other writers, stores
       the row that ``check`` returns, and returns all rows, durable on return. What ``check``
       raises leaves the database unchanged. A database that refuses (full, lost) is
       DirectoryUnavailableError.
    4. ``remove`` removes the row of a name, if there is one; otherwise as ``write``.
    5. ``follow`` calls ``changed`` with all rows, from a thread of the database, after a write of
       another process; within a second or so. A file has no other writers.
    6. After ``close`` nothing may be called, and ``changed`` is not called any more.

    Attributes:
        trouble: damage or a lost connection, for people; empty without.
    """

    trouble: str

    def open(self) -> None: ...

    def secret(self, fresh: bytes) -> bytes: ...

    def rows(self) -> Rows: ...

    def write(self, check: Callable[[Rows], NamespaceRow]) -> Rows: ...

    def remove(self, name: str) -> Rows: ...

    def follow(self, changed: Callable[[Rows], None]) -> None: ...

    def close(self) -> None: ...
