"""Answers in PostgreSQL, for several fronts; implements AnswerStore.

tierkv/parts/front_part.py makes one per front process when ``front.answer_cache`` is a PostgreSQL
URL. The table is ``tierkv_front.answers``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg

from tierkv.dbfront.answer_cache.answer_key import MARK_BYTES, PromptMark
from tierkv.dbfront.answer_cache.kept_answer import (
    KEPT_BETWEEN_PRUNES,
    KeptAnswer,
    StoreLimits,
    StoreLostError,
    read_rows,
)

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

_LOCK: Final = 0x7469_6572_6B77
"""Advisory lock of those that make the table."""
_TABLE: Final = """
CREATE SCHEMA IF NOT EXISTS tierkv_front;
CREATE TABLE IF NOT EXISTS tierkv_front.answers (
    key bytea PRIMARY KEY, body text NOT NULL, bytes bigint NOT NULL,
    made_s double precision NOT NULL, used_s double precision NOT NULL, marks bytea
);
CREATE INDEX IF NOT EXISTS answers_used ON tierkv_front.answers (used_s);
CREATE INDEX IF NOT EXISTS answers_made ON tierkv_front.answers (made_s);
"""
_HAS_MARKS: Final = (
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attname = 'marks' "
    "AND attrelid = 'tierkv_front.answers'::regclass)"
)
_ADD_MARKS: Final = "ALTER TABLE tierkv_front.answers ADD COLUMN IF NOT EXISTS marks bytea"
"""For the table of an older release."""
_FIND: Final = "SELECT key, body, made_s, marks FROM tierkv_front.answers WHERE key = ANY(%s)"
_KEEP: Final = (
    "INSERT INTO tierkv_front.answers (key, body, bytes, made_s, used_s, marks) "
    "SELECT * FROM unnest(%s::bytea[], %s::text[], %s::bigint[], %s::float8[], %s::float8[], "
    "%s::bytea[]) ORDER BY 1 "
    "ON CONFLICT (key) DO UPDATE SET body = excluded.body, bytes = excluded.bytes, "
    "made_s = excluded.made_s, used_s = excluded.used_s, marks = excluded.marks"
)
_USE: Final = (
    "UPDATE tierkv_front.answers SET used_s = u.at FROM "
    "(SELECT a.key, n.at FROM tierkv_front.answers a "
    "JOIN unnest(%s::bytea[], %s::float8[]) AS n (key, at) USING (key) "
    "ORDER BY a.key FOR UPDATE OF a) AS u WHERE answers.key = u.key"
)
"""Rows are locked in the order of their keys, like those of ``_KEEP``: two fronts never wait for
each other."""
_PRUNE: Final = (
    "DELETE FROM tierkv_front.answers WHERE key IN (SELECT key FROM (SELECT key, "
    "sum(bytes) OVER (ORDER BY used_s, key) - bytes AS before FROM tierkv_front.answers) AS t "
    "WHERE before < %s)"
)
_FORGET: Final = (
    "DELETE FROM tierkv_front.answers WHERE key IN (SELECT a.key FROM tierkv_front.answers a "
    "WHERE marks IS NULL OR EXISTS (SELECT FROM unnest(%s::int[], %s::bytea[]) AS m (at, mark) "
    f"WHERE substring(a.marks FROM m.at FOR {MARK_BYTES}) = m.mark) ORDER BY a.key FOR UPDATE) "
    "RETURNING key"
)
_ROW_BYTES: Final = 120
"""Bytes of a row and its index entries, besides the text."""
_CONNECT_S: Final = 2


class AnswerDatabase:
    """One connection to the database, opened at the first use and after each loss.

    Attributes:
        place: host and database, without the password.
    """

    def __init__(self, url: str, limits: StoreLimits) -> None:
        self.place = place_of(url)
        self._url = url
        self._limits = limits
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._kept_since_prune = KEPT_BETWEEN_PRUNES  # The first write prunes.

    def find(self, keys: Iterable[bytes]) -> dict[bytes, KeptAnswer]:
        """Return the stored answers; see AnswerStore."""
        wanted = list(keys)
        return self._done(lambda c: read_rows(c.execute(_FIND, (wanted,)).fetchall()))

    def keep(
        self, answers: Mapping[bytes, KeptAnswer], used: Mapping[bytes, float], now_s: float
    ) -> None:
        """Store answers and the times of use; see AnswerStore."""
        kept = list(answers.items())
        bodies = [answer.to_json() for _, answer in kept]
        columns = (
            [key for key, _ in kept],
            bodies,
            [
                len(body.encode()) + len(answer.marks) + _ROW_BYTES
                for body, (_, answer) in zip(bodies, kept, strict=True)
            ],
            [answer.made_s for _, answer in kept],
            [now_s] * len(kept),
            [answer.marks for _, answer in kept],
        )

        def write(connection: Connection) -> None:
            with connection.transaction():
                if kept:
                    connection.execute(_KEEP, columns)
                if used:
                    connection.execute(_USE, (list(used), list(used.values())))
                if self._kept_since_prune + len(kept) >= KEPT_BETWEEN_PRUNES:
                    self._prune(connection, now_s)

        self._done(write)
        self._kept_since_prune = (self._kept_since_prune + len(kept)) % KEPT_BETWEEN_PRUNES

    def forget(self, marks: Sequence[PromptMark]) -> set[bytes]:
        """Delete the answers of forgotten prompts; see AnswerStore."""
        places = [1 + MARK_BYTES * each.at for each in marks]
        asked = (places, [each.mark for each in marks])
        rows = self._done(lambda connection: connection.execute(_FORGET, asked).fetchall())
        return {bytes(key) for (key,) in rows}

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _prune(self, connection: Connection, now_s: float) -> None:
        connection.execute(
            "DELETE FROM tierkv_front.answers WHERE made_s < %s", (now_s - self._limits.keep_s,)
        )
        found = connection.execute(
            "SELECT coalesce(sum(bytes), 0)::bigint FROM tierkv_front.answers"
        ).fetchone()
        if surplus := self._limits.surplus(int(found[0]) if found else 0):
            connection.execute(_PRUNE, (surplus,))

    def _done(self, work: Callable[[Connection], T]) -> T:
        """Do something with the open connection; a connection lost in the meantime is opened again.

        Raises:
            StoreLostError: the database can't be used.
        """
        with self._lock:
            known = self._connection is not None
            try:
                try:
                    return self._tried(work)
                except psycopg.OperationalError:
                    if not known:
                        raise
                    return self._tried(work)  # The server was restarted since the last use.
            except psycopg.Error as error:
                raise StoreLostError(f"{self.place}: {error_line(error)}") from error

    def _tried(self, work: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._opened()
            return work(self._connection)
        except psycopg.Error:
            self._drop()
            raise

    def _opened(self) -> Connection:
        connection = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="tierkv answers",
            options="-c statement_timeout=10s",
        )
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                found = connection.execute("SELECT to_regclass('tierkv_front.answers')").fetchone()
                if found == (None,):
                    connection.execute(_TABLE)
                elif connection.execute(_HAS_MARKS).fetchone() == (False,):
                    connection.execute(_ADD_MARKS)
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def place_of(url: str) -> str:
    """Return the host and database of a URL, without the password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "PostgreSQL"
    return f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}"


def error_line(error: Exception) -> str:
    """Return the error's text in one line; libpq quotes pieces of a malformed URL, so not that."""
    if isinstance(error, psycopg.ProgrammingError) and not error.sqlstate:
        return "the URL is malformed (a space is %20, an @ in a password %40)"
    return " ".join(str(error).split()) or type(error).__name__
