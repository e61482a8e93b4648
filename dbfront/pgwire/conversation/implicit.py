"""PostgreSQL's implicit transactions: several statements sent together succeed or fail together.

A simple query with several statements, and all statements of the extended protocol up to Sync, are
one transaction unless the client opened a transaction. Both handlers share one
``ImplicitTransaction`` per connection.
"""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.contracts import StatementResult
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.sql_session import SqlSession

_BEGIN: Final = frozenset({"BEGIN", "START"})
_END: Final = frozenset({"COMMIT", "END", "ROLLBACK", "ABORT"})
_ALONE: Final = frozenset(
    {"SET", "RESET", "SHOW", "VACUUM", "CHECKPOINT", "ATTACH", "DETACH", "USE", "INSTALL", "LOAD"}
    | {"PRAGMA", "DISCARD", "DEALLOCATE", "PREPARE", "LISTEN", "UNLISTEN"}
)
"""Statements that need no transaction, or that DuckDB refuses inside a transaction."""


class ImplicitTransaction:
    """At most one open implicit transaction.

    Attributes:
        active: True if this object, not the client, opened the current transaction.
    """

    def __init__(self, session: SqlSession) -> None:
        self.active = False
        self._session = session

    async def before(self, sql: str) -> StatementResult | None:
        """Open a transaction for a statement that needs a transaction.

        A BEGIN of the client takes over the open implicit transaction: its result is then returned,
        and the statement must not be run.
        """
        word = first_word(sql)
        if self.active and word in _BEGIN:
            self.active = False
            return StatementResult("BEGIN")
        if word in _END and not _goes_back(sql):
            self.active = False
        elif word not in _BEGIN | _ALONE and self._session.transaction_status == "I":
            await self._session.execute("BEGIN")
            self.active = True
        return None

    async def finish(self, *, failed: bool) -> None:
        """Commit or roll back the implicit transaction."""
        if self.active:
            self.active = False
            if self._session.transaction_status != "I":
                await self._session.execute("ROLLBACK" if failed else "COMMIT")


def _goes_back(sql: str) -> bool:
    """Return True for ROLLBACK TO, which does not end the transaction."""
    return any(token.upper == "TO" for token in tokens(sql))
