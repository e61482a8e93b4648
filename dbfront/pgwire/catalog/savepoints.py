"""Savepoints over an engine that has none: honoured where they can be, else refused.

DuckDB can only give a whole transaction up. A savepoint before which nothing was changed is the
start of the transaction, and one after which nothing was changed needs no undoing; drivers and
ORMs mostly want these two. Going back to any other one is refused, and the transaction with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dbfront.pgwire.sql_tokens import first_word
from kvcore.errors import SqlError
from sql.lexer import tokenize
from sql.statement import StatementKind, classify

_READS = frozenset(
    {StatementKind.QUERY, StatementKind.SHOW, StatementKind.SET, StatementKind.RESET}
    | {StatementKind.EXPLAIN, StatementKind.SAVEPOINT, StatementKind.BEGIN}
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A savepoint; ``changes`` is how many statements may have changed something before it."""

    name: str
    changes: int


class Savepoints:
    """The savepoints of the open transaction.

    Attributes:
        changes: statements of the transaction that may have changed something.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._marks: list[Mark] = []

    def note(self, sql: str) -> None:
        """A statement of the transaction is about to run."""
        if first_word(sql) == "SELECT":
            return
        words = tokenize(sql)
        analyzes = words[:1] and words[0].upper == "EXPLAIN" and "ANALYZE" in sql.upper()
        if analyzes or classify(words) not in _READS:
            self.changes += 1

    def set(self, name: str) -> None:
        """SAVEPOINT; an older one of the same name is hidden, as in PostgreSQL."""
        self._marks.append(Mark(name, self.changes))

    def release(self, name: str) -> None:
        """RELEASE SAVEPOINT: drop it and those after it.

        Raises:
            SqlError: 3B001.
        """
        del self._marks[self._find(name) :]

    def go_back(self, name: str) -> Mark:
        """ROLLBACK TO: drop those after it, and give it.

        Raises:
            SqlError: 3B001.
        """
        at = self._find(name)
        del self._marks[at + 1 :]
        return self._marks[at]

    def end_transaction(self) -> None:
        """Forget everything."""
        self.changes = 0
        self._marks.clear()

    def _find(self, name: str) -> int:
        for at in reversed(range(len(self._marks))):
            if self._marks[at].name == name:
                return at
        raise SqlError(f'savepoint "{name}" does not exist', sqlstate="3B001")
