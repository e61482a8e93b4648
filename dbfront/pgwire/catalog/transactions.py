"""BEGIN, COMMIT, ROLLBACK and savepoints in PostgreSQL's manner, over the engine's transactions.

catalog/session.py hands these statements over. Warnings instead of errors outside a transaction,
modes DuckDB does not parse dropped, savepoints as far as savepoints.py can honour them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Final

from dbfront.contracts import Notice, SqlSession, StatementResult
from dbfront.pgwire.catalog.savepoints import Savepoints
from dbfront.pgwire.sql_tokens import Token, first_word, tokens
from kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError

_NOISE: Final = frozenset({"SAVEPOINT", "WORK", "TRANSACTION", "TO", ";"})


class Transactions:
    """One session's transaction commands.

    Attributes:
        savepoints: of the open transaction.
    """

    def __init__(self, inner: SqlSession, before_end: Callable[[], Awaitable[None]]) -> None:
        """``before_end`` stops what the transaction still runs and nobody can ask for after it."""
        self.savepoints = Savepoints()
        self._inner = inner
        self._before_end = before_end
        self._begin = "BEGIN TRANSACTION"

    def refuse_if_aborted(self) -> None:
        """Raise 25P02 in a failed transaction."""
        if self._inner.transaction_status == "E":
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
            )

    async def begin(self, sql: str) -> StatementResult:
        """Drop transaction modes DuckDB does not parse; its isolation is always a snapshot."""
        self.refuse_if_aborted()
        if self._inner.transaction_status == "T":
            warning = Notice("WARNING", "there is already a transaction in progress", "25001")
            return StatementResult("BEGIN", notices=(warning,))
        read_only = re.search(r"\bread\s+only\b", sql, re.IGNORECASE) is not None
        self._begin = "BEGIN TRANSACTION READ ONLY" if read_only else "BEGIN TRANSACTION"
        result = await self._inner.execute(self._begin)
        tag = "START TRANSACTION" if first_word(sql) == "START" else "BEGIN"
        return StatementResult(tag, notices=result.notices)

    async def end(self, sql: str) -> StatementResult:
        """COMMIT and ROLLBACK outside a transaction are warnings, as in PostgreSQL."""
        words = [token for token in tokens(sql) if token.text != ";"]
        verbs = [word.upper for word in words]
        if "TO" in verbs:
            return await self._roll_back_to(sql, _name(words))
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

    def savepoint(self, sql: str) -> StatementResult:
        """SAVEPOINT and RELEASE."""
        self.refuse_if_aborted()
        words = [token for token in tokens(sql) if token.text != ";"]
        verb, name = words[0].upper, _name(words)
        if self._inner.transaction_status == "I":
            raise SqlError(
                f"{verb}{' SAVEPOINT' * (verb == 'RELEASE')} can only be used in transaction "
                "blocks",
                sqlstate="25P01",
            )
        if verb == "RELEASE":
            self.savepoints.release(name)
        else:
            self.savepoints.set(name)
        return StatementResult(verb)

    async def _roll_back_to(self, sql: str, name: str) -> StatementResult:
        if self._inner.transaction_status == "I":
            raise SqlError(
                "ROLLBACK TO SAVEPOINT can only be used in transaction blocks", sqlstate="25P01"
            )
        mark = self.savepoints.go_back(name)
        intact = self._inner.transaction_status == "T"
        if intact and self.savepoints.changes == mark.changes:
            return StatementResult("ROLLBACK")
        if mark.changes == 0:
            await self._inner.execute("ROLLBACK")
            await self._inner.execute(self._begin)
            self.savepoints.changes = 0
            return StatementResult("ROLLBACK")
        with contextlib.suppress(FeatureNotSupportedError):
            await self._inner.execute(sql)  # refused, and with that the transaction has failed
        raise FeatureNotSupportedError(
            f'can\'t roll back to savepoint "{name}": the transaction changed something before '
            "it, and the DuckDB engine can only give up all of it",
            hint="ROLLBACK the transaction, or use one transaction per unit of work.",
        )


def _name(words: list[Token]) -> str:
    names = [word for word in words[1:] if word.upper not in _NOISE]
    if len(names) != 1:
        raise SqlSyntaxError("a savepoint needs a name")
    return names[0].name
