"""BEGIN, COMMIT, ROLLBACK and savepoints as in PostgreSQL, over the engine's transactions.

session/session.py passes these statements on. Outside a transaction there are warnings instead of
errors, and modes that DuckDB does not parse are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError


class Transactions:
    """The transaction commands of one session."""

    def __init__(self, inner: SqlSession, before_end: Callable[[], Awaitable[None]]) -> None:
        """Create the commands; ``before_end`` stops queries that cannot outlive the transaction."""
        self._inner = inner
        self._before_end = before_end

    def refuse_if_aborted(self) -> None:
        """Raise 25P02 in a failed transaction."""
        if self._inner.transaction_status == "E":
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
            )

    async def begin(self, sql: str) -> StatementResult:
        """Begin without modes that DuckDB does not parse; the isolation is always a snapshot."""
        self.refuse_if_aborted()
        if self._inner.transaction_status == "T":
            warning = Notice("WARNING", "there is already a transaction in progress", "25001")
            return StatementResult("BEGIN", notices=(warning,))
        read_only = re.search(r"\bread\s+only\b", sql, re.IGNORECASE) is not None
        begin = "BEGIN TRANSACTION READ ONLY" if read_only else "BEGIN TRANSACTION"
        result = await self._inner.execute(begin)
        tag = "START TRANSACTION" if first_word(sql) == "START" else "BEGIN"
        return StatementResult(tag, notices=result.notices)

    async def end(self, sql: str) -> StatementResult:
        """Run COMMIT or ROLLBACK; outside a transaction return a warning, as PostgreSQL does."""
        words = [token for token in tokens(sql) if token.text != ";"]
        verbs = [word.upper for word in words]
        if "TO" in verbs:
            return await self.savepoint(sql)
        if "PREPARED" in verbs:
            raise FeatureNotSupportedError("two-phase commit is not supported by this server")
        if "CHAIN" in verbs and "NO" not in verbs:
            raise FeatureNotSupportedError("AND CHAIN is not supported by this server")
        tag = "COMMIT" if verbs[0] in ("COMMIT", "END") else "ROLLBACK"
        if self._inner.transaction_status == "I":
            warning = Notice("WARNING", "there is no transaction in progress", "25P01")
            return StatementResult(tag, notices=(warning,))
        if self._inner.transaction_status == "E":
            tag = "ROLLBACK"
        await self._before_end()
        result = await self._inner.execute(tag)
        return StatementResult(tag, notices=result.notices)

    async def savepoint(self, sql: str) -> StatementResult:
        """Run SAVEPOINT, RELEASE or ROLLBACK TO."""
        if first_word(sql) == "ROLLBACK":
            await self._before_end()
        return await self._inner.execute(sql)
