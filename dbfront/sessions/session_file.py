"""Conversations in an SQLite file, or in memory; implements SessionStore.

tierkv/parts/front_part.py opens a store per front process; the workers of a front share the file.
The file holds clients' data. A damaged file is therefore left alone, and requests about
conversations fail until an operator has replaced the file.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from tierkv.dbfront.accounts.statistic_tables import MEMORY, Transaction, open_private
from tierkv.dbfront.sessions.session_rows import TABLES, Execute, Row
from tierkv.dbfront.sessions.session_store import store_lost
from tierkv.dbfront.sessions.session_tables import SessionTables

T = TypeVar("T")


class SessionFile(SessionTables):
    """A connection to the file, opened at the first use.

    Attributes:
        place: path of the file, or ``:memory:``.
    """

    def __init__(self, path: str = MEMORY) -> None:
        self.place = path
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None

    def transact(self, work: Callable[[Execute], T]) -> T:
        """Run ``work`` in one transaction; see SessionTables."""
        with self._lock:
            try:
                if self._database is None:
                    self._database = open_private(self.place, _prepare)
                database = self._database

                def execute(statement: str, values: Sequence[object]) -> list[Row]:
                    return database.execute(statement, tuple(values)).fetchall()

                with Transaction(database):
                    return work(execute)
            except (sqlite3.Error, OSError) as error:
                if self.place != MEMORY:
                    self._drop()
                cure = "See the disk and the file; front.sessions names another place."
                raise store_lost(self.place, error, cure) from error

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA synchronous = FULL")  # A turn told to a client survives a power cut.
    database.execute("PRAGMA secure_delete = ON")
    for statement in TABLES:
        database.execute(statement)
