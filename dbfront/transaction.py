"""The client's transaction, and how a statement with AI calls runs inside or without one.

DuckDB has no savepoints and gives a transaction up at its first error. So a statement outside a
transaction gets one of its own, in which it may start again; inside the client's it may start again
only while nothing was changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dbfront.engines.duckdb_engine import DuckDbConnection
from kvcore.errors import SqlError


class ClientTransaction:
    """State of a session's transaction.

    Attributes:
        status: ``I`` outside, ``T`` inside, ``E`` inside and failed.
        changed: something may have been written since it began.
        used: a statement ran in it, which chose the rows that the client sees.
    """

    def __init__(self, connection: DuckDbConnection) -> None:
        self.status = "I"
        self.changed = False
        self.used = False
        self._connection = connection
        self._own = False
        self._begin = "BEGIN TRANSACTION"

    def check_usable(self) -> None:
        """Refuse statements in a failed transaction.

        Raises:
            SqlError: 25P02.
        """
        if self.status == "E":
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
                hint="ROLLBACK, then try again.",
            )

    async def begin(self, text: str = "BEGIN TRANSACTION") -> None:
        """Begin the client's transaction."""
        await self._connection.command(text)
        self._begin = text
        self.status, self.changed, self.used = "T", False, False

    async def finish(self, *, commit: bool) -> bool:
        """End the client's transaction; return whether it was committed."""
        commit = commit and self.status == "T"
        self.status, self.changed, self.used = "I", False, False
        try:
            await self._connection.command("COMMIT" if commit else "ROLLBACK")
        except SqlError as error:
            # DuckDB has already ended a transaction whose COMMIT failed.
            if commit or error.sqlstate != "25P01":
                raise
        return commit

    @property
    def may_try(self) -> bool:
        """Whether an error of a query that is only worth trying would cost the client nothing."""
        return self._own or not self.used

    def ran(self, *, changed: bool) -> None:
        """Note that a statement ran."""
        inside = self.status == "T"
        self.used = inside
        self.changed = inside and (changed or self.changed)

    def fail(self) -> None:
        """Note that a statement failed inside the client's transaction."""
        if self.status == "T":
            self.status = "E"

    @asynccontextmanager
    async def for_statement(self) -> AsyncIterator[None]:
        """Run a statement of several rounds in one transaction."""
        if self.status != "I":
            yield
            return
        await self._connection.command("BEGIN TRANSACTION")
        self._own = True
        try:
            yield
        except BaseException:
            await self._connection.command("ROLLBACK")
            raise
        else:
            await self._connection.command("COMMIT")
        finally:
            self._own = False

    async def start_again(self) -> bool:
        """Undo what the statement did and begin anew; False where that would undo the client's."""
        if not self._own and self.changed:
            return False
        await self._connection.command("ROLLBACK")
        await self._connection.command("BEGIN TRANSACTION" if self._own else self._begin)
        return True
