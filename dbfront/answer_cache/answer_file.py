"""Answers in an SQLite file; implements AnswerStore.

tierkv/parts/front_part.py makes one per front process; the workers of a front share the file. The
file is a cache: a damaged file is removed and begun anew.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from tierkv.dbfront.accounts.statistic_tables import Transaction, is_damage, open_private
from tierkv.dbfront.answer_cache.answer_key import MARK_BYTES, PromptMark
from tierkv.dbfront.answer_cache.kept_answer import (
    KEPT_BETWEEN_PRUNES,
    KeptAnswer,
    StoreLimits,
    StoreLostError,
    read_rows,
)

_log = logging.getLogger("tierkv.answers")
T = TypeVar("T")

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, body TEXT NOT NULL, bytes INTEGER NOT NULL,
    made_s REAL NOT NULL, used_s REAL NOT NULL, marks BLOB
) WITHOUT ROWID
"""
_INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS answers_used ON answers (used_s)",
    "CREATE INDEX IF NOT EXISTS answers_made ON answers (made_s)",
)
_KEEP: Final = (
    "INSERT INTO answers (key, body, bytes, made_s, used_s, marks) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET body = excluded.body, bytes = excluded.bytes, "
    "made_s = excluded.made_s, used_s = excluded.used_s, marks = excluded.marks"
)
_FOUND_AT_ONCE: Final = 500
_ROW_BYTES: Final = 80
"""Bytes of a row and its index entries, besides the text."""


class AnswerFile:
    """One connection to the file, opened at the first use.

    Attributes:
        place: path of the file.
    """

    def __init__(self, path: str, limits: StoreLimits) -> None:
        self.place = path
        self._limits = limits
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._kept_since_prune = KEPT_BETWEEN_PRUNES  # The first write prunes.

    def find(self, keys: Iterable[bytes]) -> dict[bytes, KeptAnswer]:
        """Return the stored answers; see AnswerStore."""
        wanted = list(keys)
        return self._done(lambda database: _find(database, wanted))

    def keep(
        self, answers: Mapping[bytes, KeptAnswer], used: Mapping[bytes, float], now_s: float
    ) -> None:
        """Store answers and the times of use; see AnswerStore."""
        rows = []
        for key, answer in answers.items():
            body = answer.to_json()
            size = len(body.encode()) + len(answer.marks) + _ROW_BYTES
            rows.append((key, body, size, answer.made_s, now_s, answer.marks))

        def write(database: sqlite3.Connection) -> None:
            with Transaction(database):
                database.executemany(_KEEP, rows)
                database.executemany(
                    "UPDATE answers SET used_s = ? WHERE key = ?",
                    [(at_s, key) for key, at_s in used.items()],
                )
                if self._kept_since_prune + len(rows) >= KEPT_BETWEEN_PRUNES:
                    self._prune(database, now_s)

        self._done(write)
        self._kept_since_prune = (self._kept_since_prune + len(rows)) % KEPT_BETWEEN_PRUNES

    def forget(self, marks: Sequence[PromptMark]) -> set[bytes]:
        """Delete the answers of forgotten prompts; see AnswerStore."""

        wanted: dict[int, list[bytes]] = {}
        for each in marks:
            wanted.setdefault(1 + MARK_BYTES * each.at, []).append(each.mark)
        # A look through all answers: forgetting is rare, and an index would cost every answer.
        conditions = "".join(
            f" OR substr(marks, {start}, {MARK_BYTES}) IN ({', '.join('?' * len(some))})"
            for start, some in wanted.items()
        )
        deleting = f"DELETE FROM answers WHERE marks IS NULL{conditions} RETURNING key"
        values = [mark for some in wanted.values() for mark in some]

        def delete(database: sqlite3.Connection) -> set[bytes]:
            with Transaction(database):
                gone = database.execute(deleting, values).fetchall()
            # The log of the file has old pages until a checkpoint.
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return {bytes(key) for (key,) in gone}

        return self._done(delete)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _prune(self, database: sqlite3.Connection, now_s: float) -> None:
        database.execute("DELETE FROM answers WHERE made_s < ?", (now_s - self._limits.keep_s,))
        ((total,),) = database.execute("SELECT coalesce(sum(bytes), 0) FROM answers")
        if surplus := self._limits.surplus(total):
            database.execute(
                "DELETE FROM answers WHERE key IN (SELECT key FROM (SELECT key, "
                "sum(bytes) OVER (ORDER BY used_s, key) - bytes AS before FROM answers) "
                "WHERE before < ?)",
                (surplus,),
            )

    def _done(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do something with the open file; a damaged file is removed.

        Raises:
            StoreLostError: the file can't be used.
        """
        with self._lock:
            try:
                if self._database is None:
                    self._database = open_private(self.place, _prepare)
                return work(self._database)
            except (sqlite3.Error, OSError) as error:
                self._drop()
                if isinstance(error, sqlite3.Error) and is_damage(error):
                    _log.warning("the answers in %s are damaged and deleted: %s", self.place, error)
                    _remove(self.place)
                raise StoreLostError(f"{self.place}: {error}") from error

    def _drop(self) -> None:
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA secure_delete = ON")
    database.execute(_TABLE)
    if "marks" not in {name for _, name, *_ in database.execute("PRAGMA table_info(answers)")}:
        database.execute("ALTER TABLE answers ADD COLUMN marks BLOB")  # Of an older release.
    for index in _INDEXES:
        database.execute(index)


def _find(database: sqlite3.Connection, keys: list[bytes]) -> dict[bytes, KeptAnswer]:
    found: dict[bytes, KeptAnswer] = {}
    for at in range(0, len(keys), _FOUND_AT_ONCE):
        some = keys[at : at + _FOUND_AT_ONCE]
        places = ", ".join("?" * len(some))
        rows = database.execute(
            f"SELECT key, body, made_s, marks FROM answers WHERE key IN ({places})", some
        )
        found |= read_rows(rows)
    return found


def _remove(path: str) -> None:
    for ending in ("", "-wal", "-shm"):
        with suppress(OSError):
            Path(path + ending).unlink(missing_ok=True)
