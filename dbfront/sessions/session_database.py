"""Conversations in PostgreSQL, for several fronts; implements SessionStore.

tierkv/parts/front_part.py makes a store per front process when ``front.sessions`` is a PostgreSQL
URL. The tables are in schema ``tierkv_front``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg

from tierkv.dbfront.answer_cache.answer_database import error_line, place_of
from tierkv.dbfront.sessions.session_rows import TABLES, Execute, Row
from tierkv.dbfront.sessions.session_store import store_lost
from tierkv.dbfront.sessions.session_tables import SessionTables

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

_LOCK: Final = 0x7469_6572_6B78
"""Advisory lock of those that make the tables."""
_CONNECT_S: Final = 2


class SessionDatabase(SessionTables):
    """A connection to the database, opened at the first use and after each loss.

    Attributes:
        place: host and database, without the password.
    """

    def __init__(self, url: str) -> None:
        self.place = place_of(url)
        self._url = url
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def transact(self, work: Callable[[Execute], T]) -> T:
        """Run ``work`` in one transaction; a lost connection is opened again, once.

        A commit may have arrived although the reply was lost. Repeating is harmless: a turn with a
        final status, a lock and a deletion do not change again.
        """
        with self._lock:
            known = self._connection is not None
            try:
                try:
                    return self._tried(work)
                except psycopg.OperationalError:
                    if not known:
                        raise
                    return self._tried(work)
            except psycopg.Error as error:
                cure = "Start the database that front.sessions names; turns go on then."
                raise store_lost(self.place, error_line(error), cure) from error

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _tried(self, work: Callable[[Execute], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._opened()
            connection = self._connection

            def execute(statement: str, values: Sequence[object]) -> list[Row]:
                kept = [_without_nul(value) for value in values]
                done = connection.execute(statement.replace("?", "%s").encode(), kept)
                return done.fetchall() if done.description else []

            with connection.transaction():
                return work(execute)
        except psycopg.Error:
            self._drop()
            raise

    def _opened(self) -> Connection:
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="tierkv sessions",
            options="-c statement_timeout=30s -c search_path=tierkv_front",
        )
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                found = connection.execute(
                    "SELECT to_regclass('tierkv_front.session_items')"
                ).fetchone()
                if found == (None,):
                    connection.execute("CREATE SCHEMA IF NOT EXISTS tierkv_front")
                    for statement in TABLES:
                        connection.execute(statement.encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def _without_nul(value: object) -> object:
    """Replace NUL in an id of a client, which PostgreSQL refuses; no stored id has such a form."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
