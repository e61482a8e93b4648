"""The client's transaction: state, savepoints, and statements with several rounds.

DuckDB has no savepoints and aborts a transaction at its first error. A statement outside a
transaction therefore gets a transaction of its own, in which the statement can restart. Inside the
client's transaction, a restart and a return to a savepoint both roll the engine's transaction back,
begin another transaction, and repeat the remaining changes (redo_log.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection, EngineResult
from tierkv.dbfront.statement.redo_log import PendingChange, RedoLog
from tierkv.dbfront.statement.settings import SessionSettings
from tierkv.dbfront.statement_results import Notice, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError
from tierkv.sql.plan.changes import change_text
from tierkv.sql.plan.rewrite import RewrittenSql
from tierkv.sql.text.lexer import Token, TokenKind
from tierkv.sql.text.statement import StatementKind

_NOISE: Final = frozenset({"SAVEPOINT", "WORK", "TRANSACTION", "TO"})
_DATA: Final = frozenset(
    {StatementKind.QUERY, StatementKind.INSERT, StatementKind.UPDATE, StatementKind.DELETE}
    | {StatementKind.MERGE, StatementKind.COPY}
)


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A savepoint; ``changes`` is the number of earlier changes in the transaction."""

    name: str
    changes: int
    restore_settings: Callable[[], None]


class ClientTransaction:
    """State of a session's transaction.

    Attributes:
        status: ``I`` outside, ``T`` inside, ``E`` inside and failed.
        changed: True if data may have been written since the transaction began.
        used: True if a statement ran in the transaction and thereby fixed the client's snapshot.
    """

    def __init__(self, connection: DuckDbConnection, pid: int = 0) -> None:
        self.status = "I"
        self.changed = False
        self.used = False
        self._connection = connection
        self._log = RedoLog(connection)
        self._savepoints: list[Savepoint] = []
        self._own = False
        self._schema_changed = False
        self._begin = "BEGIN TRANSACTION"
        self._pid = pid
        self._schema_at_begin = 0
        self._begun = 0
        self._own_names = 0

    def check_usable(self) -> None:
        """Refuse statements in a failed transaction.

        Raises:
            SqlError: 25P02.
        """
        if self.status == "E":
            raise SqlError(
                "current transaction is aborted, commands ignored until end of transaction block",
                sqlstate="25P02",
                hint="ROLLBACK, or ROLLBACK TO a savepoint; then try again.",
            )

    async def block_statement(
        self, kind: StatementKind, tokens: list[Token], settings: SessionSettings
    ) -> StatementResult:
        """Run the client's BEGIN, COMMIT or ROLLBACK, and update the settings accordingly."""
        if kind is StatementKind.BEGIN:
            self.check_usable()
            if self.status != "I":
                return warned("BEGIN", "there is already a transaction in progress", "25001")
            read_only = "READ ONLY" in " ".join(token.upper for token in tokens)
            await self.begin("BEGIN TRANSACTION READ ONLY" if read_only else "BEGIN")
            settings.begin()
            return StatementResult("BEGIN")
        commit = kind is StatementKind.COMMIT
        if self.status == "I":
            tag = "COMMIT" if commit else "ROLLBACK"
            return warned(tag, "there is no transaction in progress", "25P01")
        committed = False
        try:
            committed = await self.finish(commit=commit)
        finally:
            settings.end(committed=committed)
        return StatementResult("COMMIT" if committed else "ROLLBACK")

    async def begin(self, text: str = "BEGIN TRANSACTION") -> None:
        """Begin the client's transaction."""
        self._schema_at_begin = self._connection.engine_changes.schema
        self._begun += 1
        await self._connection.settle(text, last=True)
        self._begin = text
        self._reset("T")

    async def finish(self, *, commit: bool) -> bool:
        """End the client's transaction; return True if the transaction was committed."""
        commit = commit and self.status == "T"
        schema_changed = self._schema_changed
        self._count_commit(committed=commit and self.changed)
        self._reset("I")
        if commit:
            try:
                await self._connection.settle("COMMIT", last=True)
            finally:  # Lookups by other sessions during the COMMIT may have seen the old schema.
                self._connection.engine_changes.schema += schema_changed
        else:
            await self._roll_back()
        return commit

    async def _roll_back(self) -> None:
        """Roll back; a transaction already ended, for example by a failed COMMIT, is no error."""
        try:
            await self._connection.settle("ROLLBACK", last=True)
        except SqlError as error:
            if error.sqlstate != "25P01":
                raise

    @property
    def may_try(self) -> bool:
        """True if the client loses nothing when an optional query fails."""
        return self._own or not self.used

    def ran(self, kind: StatementKind, *, changed: bool) -> None:
        """Record a completed statement."""
        inside = self.status == "T"
        if changed and kind not in _DATA:
            self._schema_changed = True
            self._connection.engine_changes.schema += 1
        if changed and not inside:
            self._count_commit(committed=True)
        self.used = inside
        self.changed = inside and (changed or self.changed)

    @contextmanager
    def running(self, sql: str, kind: StatementKind, *, changed: bool) -> Iterator[None]:
        """Record the effects of a statement; names may then mean other tables, even on failure.

        Temporary tables and the search path belong to the session.
        """
        lowered = sql.lower()
        path = kind not in _DATA and ("search_path" in lowered or "schema" in lowered)
        try:
            yield
        except BaseException:
            if changed and kind not in _DATA:
                self._connection.engine_changes.schema += 1
            raise
        finally:
            self._own_names += path or (changed and kind not in _DATA)
        self.ran(kind, changed=changed)

    def catalogue_state(self) -> tuple[int, ...] | None:
        """Identify the catalogue visible to the session; return None in a failed transaction.

        A transaction sees the shared catalogue of its start until the schema changes.
        """
        if self.status == "E":
            return None
        schema = self._connection.engine_changes.schema
        apart = self._begun if self.status == "T" and schema != self._schema_at_begin else 0
        pid = self._pid if apart or self._own_names else 0
        return schema, pid, self._own_names, apart

    def names_changed(self) -> None:
        """Note that names mean other tables in this session than before."""
        self._own_names += 1

    def fail(self) -> None:
        """Record a failed statement inside the client's transaction."""
        if self.status == "T":
            self.status = "E"

    # Recording and repeating changes.

    async def prepare_change(
        self, text: str, tokens: list[Token], kind: StatementKind
    ) -> PendingChange | None:
        """Prepare the record of a change; None outside a transaction."""
        if self.status != "T":
            return None
        return await self._log.prepare(change_text(text, tokens, kind))

    def made(
        self,
        change: PendingChange,
        sql: RewrittenSql,
        params: Mapping[str, Any],
        result: EngineResult,
        book: AnswerBook | None = None,
    ) -> None:
        """Record a completed change."""
        self._log.add(change.made(sql, params, book, result))

    async def copied(self, table: str, columns: Any, rows: Any) -> None:
        """Record the rows of a COPY before the rows are inserted."""
        if self.status == "T":
            await self._log.loaded(table, columns, rows)

    @asynccontextmanager
    async def for_statement(self) -> AsyncIterator[None]:
        """Run the rounds of one statement in one transaction."""
        if self.status != "I":
            yield
            return
        self._own = True
        try:
            await self._connection.settle("BEGIN TRANSACTION")
            yield
        except BaseException:
            await self._roll_back()
            raise
        else:
            await self._connection.settle("COMMIT", last=True)
        finally:
            self._own = False

    async def start_again(self) -> bool:
        """Undo the running statement; return False if earlier changes of the client would be lost.

        Raises:
            SqlError: 40001, an earlier change gave a different result when repeated.
        """
        if self._own:
            await self._connection.settle("ROLLBACK")
            await self._connection.settle("BEGIN TRANSACTION")
            return True
        count = len(self._log.changes)
        if self._log.why_not(count) or self._log.outdated(count):
            return False
        await self._begin_again(count)
        return True

    async def _begin_again(self, count: int) -> None:
        await self._connection.settle("ROLLBACK")
        self._schema_at_begin = -1
        self._begun += 1
        await self._connection.settle(self._begin)
        await self._log.redo(count)

    # Savepoints.

    async def savepoint_statement(
        self, tokens: list[Token], remember_settings: Callable[[], Callable[[], None]]
    ) -> StatementResult:
        """Run SAVEPOINT, RELEASE or ROLLBACK TO.

        Args:
            tokens: tokens of the statement.
            remember_settings: returns a function that restores the session's present settings.

        Raises:
            SqlError: 25P01 outside a transaction, 25P02 in a failed transaction, 3B001 for an
                unknown savepoint, 40001 if a repeated change gave a different result.
            FeatureNotSupportedError: an earlier change cannot be repeated.
        """
        verb, name = tokens[0].upper, _savepoint_name(tokens)
        told = {"ROLLBACK": "ROLLBACK TO SAVEPOINT", "RELEASE": "RELEASE SAVEPOINT"}
        if self.status == "I":
            raise SqlError(
                f"{told.get(verb, verb)} can only be used in transaction blocks", sqlstate="25P01"
            )
        if verb == "ROLLBACK":
            await self._go_back(name)
            return StatementResult("ROLLBACK")
        self.check_usable()
        if verb == "SAVEPOINT":
            count = len(self._log.changes)
            self._savepoints.append(Savepoint(name, count, remember_settings()))
        else:
            del self._savepoints[self._find(name) :]
        return StatementResult(verb)

    async def _go_back(self, name: str) -> None:
        at = self._find(name)
        savepoint = self._savepoints[at]
        if self.status == "E" or len(self._log.changes) > savepoint.changes:
            reason = self._log.why_not(savepoint.changes)
            if reason:
                raise FeatureNotSupportedError(
                    f'can\'t roll back to savepoint "{name}": DuckDB can only roll back the whole '
                    f"transaction, and an earlier change can't be repeated ({reason})",
                    hint="ROLLBACK, and run the transaction again.",
                )
            self.status = "E"
            await self._begin_again(savepoint.changes)
        del self._savepoints[at + 1 :]
        savepoint.restore_settings()
        self.status, self.changed = "T", savepoint.changes > 0

    def _find(self, name: str) -> int:
        for at in reversed(range(len(self._savepoints))):
            if self._savepoints[at].name == name:
                return at
        raise SqlError(f'savepoint "{name}" does not exist', sqlstate="3B001")

    def _reset(self, status: str) -> None:
        self.status, self.changed, self.used = status, False, False
        self._schema_changed = False
        self._savepoints.clear()
        self._log.begin()

    def _count_commit(self, *, committed: bool) -> None:
        """Count changes that other sessions may see from now on."""
        changes = self._connection.engine_changes
        changes.commits += committed
        changes.schema += self._schema_changed
        self._schema_changed = False


def _savepoint_name(tokens: list[Token]) -> str:
    names = [token for token in tokens[1:] if token.upper not in _NOISE]
    if len(names) != 1:
        raise SqlSyntaxError("a savepoint needs a name")
    word = names[0]
    return word.text[1:-1] if word.kind is TokenKind.QUOTED else word.text.lower()


def warned(tag: str, message: str, sqlstate: str) -> StatementResult:
    """Return a result with a warning for a statement without effect."""
    return StatementResult(tag, notices=(Notice("WARNING", message, sqlstate=sqlstate),))
