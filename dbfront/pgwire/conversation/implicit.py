"""PostgreSQL's implicit transactions: several statements sent together succeed or fail together.

A simple query with several statements, and all statements of the extended protocol up to Sync, are
one transaction unless the client opened its own. Both handlers keep one ``ImplicitTransaction``.
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
"""Statements that need no transaction, or that DuckDB refuses inside one."""


class ImplicitTransaction:
    """At most one open implicit transaction.

    Attributes:
        active: whether we, not the client, opened the transaction that is open now.
    """

    def __init__(self, session: SqlSession) -> None:
        self.active = False
        self._session = session

    async def before(self, sql: str) -> StatementResult | None:
        """Open a transaction for a statement that needs one.

        A BEGIN of the client takes over the transaction that is open already: then its result is
        given back and the statement is not to be run.
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
        """Commit or roll back what we opened."""
        if self.active:
            self.active = False
            if self._session.transaction_status != "I":
                await self._session.execute("ROLLBACK" if failed else "COMMIT")


def _goes_back(sql: str) -> bool:
    """Whether it is ROLLBACK TO, which does not end the transaction."""
    return any(token.upper == "TO" for token in tokens(sql))
