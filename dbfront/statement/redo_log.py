"""The changes of an open transaction, recorded so that the transaction can be rebuilt.

DuckDB has no savepoints and aborts a transaction at its first error. To return to a savepoint, or
to rerun a statement that still missed AI answers, the engine's transaction is rolled back and the
remaining changes are repeated in order:

    BEGIN  c1  c2  SAVEPOINT a  c3  ROLLBACK TO a   ->   ROLLBACK  BEGIN  c1  c2

A change is repeated by running its own statement with the recorded answers. If the statement would
produce different values (the next number of a sequence, now(), random()), an INSERT returns the
inserted rows as text, and these rows are inserted again. Any other statement with changing values
cannot be repeated. A change that reads tables is repeated only if no other session has committed
since the transaction began. Each repetition must change as many rows, and return the same rows, as
the first run. Any violation raises a clear error and leaves the transaction failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tierkv.dbfront.calls.answers import AnswerBook
from tierkv.dbfront.databases.duckdb_connection import DuckDbConnection, EngineResult
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import SqlError, TierKVError
from tierkv.kvcore.limits import MAX_REDO_CELLS
from tierkv.sql.plan.changes import ChangeText, called_functions
from tierkv.sql.plan.rewrite import RewrittenSql, joined
from tierkv.sql.text.lexer import name_value, tokenize

_COUNT: Final = (Column("Count", "BIGINT"),)
_MEANWHILE: Final = "another session changed the database meanwhile"
_BY_THE_CLOCK: Final = frozenset(
    {"now", "today", "current_timestamp", "current_date", "current_time", "localtime"}
    | {"localtimestamp", "transaction_timestamp", "get_current_time", "get_current_timestamp"}
)
_OTHER_EACH_TIME: Final = (
    "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE' "
    "OR (function_type IN ('macro', 'table_macro') AND NOT internal)"
)
_COLUMNS: Final = (
    "SELECT database_name, schema_name, column_name, column_default FROM duckdb_columns() "
    "WHERE lower(table_name) = lower($1) AND NOT internal "
    "AND schema_name = coalesce($2, CASE WHEN database_name = 'temp' THEN schema_name "
    "ELSE current_schema() END) ORDER BY database_name, schema_name, column_index"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change, and how to repeat the change.

    Attributes:
        sql: statement run by the engine.
        params: parameters by name.
        book: answers of the statement's AI calls; None without AI calls.
        outcome: rows or count returned by the engine.
        inserted: rows to insert instead of rerunning ``sql``; None to rerun ``sql``.
        reads: True if the change may depend on rows in tables.
        why_once: reason why the change cannot be repeated; empty if repeatable.
    """

    sql: RewrittenSql
    params: Mapping[str, Any]
    book: AnswerBook | None
    outcome: Sequence[tuple[Any, ...]]
    inserted: InsertedRows | None = None
    reads: bool = True
    why_once: str = ""

    async def again(self, connection: DuckDbConnection) -> None:
        """Repeat the change.

        Raises:
            SqlError: 40001, the result differs from the first run.
            TierKVError: the engine's error.
        """
        if self.inserted is not None:
            rows = self.inserted
            await connection.copy_in(rows.table, rows.columns, rows.rows)
            return
        result = await connection.run(self.sql, self.params, self.book)
        if list(result.rows) != list(self.outcome):
            raise SqlError("a repeated change gave a different result", sqlstate="40001")


@dataclass(frozen=True, slots=True)
class InsertedRows:
    """Rows inserted into a table by INSERT or COPY.

    Attributes:
        table: table name as written in SQL.
        columns: column names; empty for all columns in order.
        rows: texts castable to the column types.
    """

    table: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | None]]

    @property
    def cells(self) -> int:
        """Number of stored values."""
        return len(self.rows) * max(len(self.rows[0]) if self.rows else 0, 1)


@dataclass(slots=True)
class PendingChange:
    """A change about to be made.

    Usage: ``wrap`` the engine's statement, ``unwrap`` the engine's result, then call
    ``RedoLog.add``.

    Attributes:
        text: facts from the statement's text.
        table_columns: columns of the table, if inserted rows are returned; empty otherwise.
        why_once: reason why the change cannot be repeated; empty if repeatable.
    """

    text: ChangeText
    table_columns: tuple[str, ...] = ()
    why_once: str = ""
    _inserted: list[tuple[str | None, ...]] = field(default_factory=list)

    def wrap(self, sql: RewrittenSql) -> RewrittenSql:
        """Make an INSERT also return its rows as text, after the columns of its own RETURNING."""
        if not self.table_columns:
            return sql
        items = ", ".join(f"CAST({_quoted(name)} AS VARCHAR)" for name in self.table_columns)
        return joined((sql, f"{',' if self.text.returns else ' RETURNING'} {items}"))

    def unwrap(self, result: EngineResult) -> EngineResult:
        """Remove the additional columns from the engine's result and keep the inserted rows."""
        width = len(self.table_columns)
        if not width:
            return result
        self._inserted = [row[-width:] for row in result.rows]
        if not self.text.returns:
            return EngineResult(_COUNT, [(len(result.rows),)])
        return EngineResult(result.columns[:-width], [row[:-width] for row in result.rows])

    def made(
        self,
        sql: RewrittenSql,
        params: Mapping[str, Any],
        book: AnswerBook | None,
        result: EngineResult,
    ) -> Change:
        """Return the completed change."""
        inserted = None
        if self.table_columns:
            inserted = InsertedRows(self.text.insert_into, self.table_columns, self._inserted)
        return Change(
            sql=sql,
            params=dict(params),
            book=book,
            outcome=result.rows,
            inserted=inserted,
            reads=self.text.reads and inserted is None,
            why_once=self.why_once,
        )


class RedoLog:
    """The changes of one session's open transaction.

    Attributes:
        changes: changes in the order of execution.
    """

    def __init__(self, connection: DuckDbConnection) -> None:
        self.changes: list[Change] = []
        self._connection = connection
        self._cells = 0
        self._seen_commits = 0
        self._seen_schema = -1
        self._volatile: frozenset[str] = frozenset()
        self._tables: dict[str, tuple[tuple[str, ...], bool]] = {}

    def begin(self) -> None:
        """Start an empty log."""
        self.changes.clear()
        self._cells = 0
        self._seen_commits = self._connection.engine_changes.commits

    async def prepare(self, text: ChangeText) -> PendingChange:
        """Determine how a change about to be made can be repeated."""
        await self._learn_functions()
        named = text.functions & (self._volatile | _BY_THE_CLOCK)
        defaults = [table for table in text.tables if await self._differs_by_default(table)]
        if not named and not defaults:
            return PendingChange(text)
        if text.insert_into and await self._columns(text.insert_into):
            return PendingChange(text, await self._columns(text.insert_into))
        reason = f"it calls {min(named)}()" if named else f"defaults of {defaults[0]} differ"
        return PendingChange(text, why_once=reason)

    async def loaded(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> None:
        """Record the rows of a COPY."""
        once = ""
        known = await self._columns(table)
        if len(columns or known) < len(known) and await self._differs_by_default(table):
            once = f"defaults of {table} differ"
        inserted = InsertedRows(table, columns, rows)
        empty = RewrittenSql("", (), ())
        self.add(Change(empty, {}, None, (), inserted, reads=False, why_once=once))

    def add(self, change: Change) -> None:
        """Record a completed change; a change with too many rows is recorded as not repeatable."""
        self._cells += change.inserted.cells if change.inserted is not None else 0
        if self._cells > MAX_REDO_CELLS and change.inserted is not None:
            why = f"more than {MAX_REDO_CELLS:,} values were inserted"
            change = Change(change.sql, {}, None, (), None, why_once=why)
        self.changes.append(change)

    def why_not(self, count: int) -> str:
        """Return why one of the first ``count`` changes cannot be repeated; empty if all can."""
        return next((change.why_once for change in self.changes[:count] if change.why_once), "")

    def outdated(self, count: int) -> bool:
        """Return True if other sessions may have changed data read by the first changes."""
        commits = self._connection.engine_changes.commits
        return self._seen_commits != commits and any(c.reads for c in self.changes[:count])

    async def redo(self, count: int) -> None:
        """Repeat the first ``count`` changes in a new transaction.

        Raises:
            SqlError: 40001, a repetition gave a different result.
        """
        del self.changes[count:]
        self._cells = sum(c.inserted.cells for c in self.changes if c.inserted is not None)
        before = self._connection.engine_changes.commits
        if self.outdated(count):
            raise _differs(_MEANWHILE)
        try:
            for change in self.changes:
                await change.again(self._connection)
        except TierKVError as error:
            raise _differs(error.message) from error
        commits = self._connection.engine_changes.commits
        if commits != before and any(change.reads for change in self.changes):
            raise _differs(_MEANWHILE)
        self._seen_commits = commits

    async def _learn_functions(self) -> None:
        """Refresh the set of volatile functions after each change of the schema."""
        schema = self._connection.engine_changes.schema
        if schema != self._seen_schema:
            rows = (await self._connection.command(_OTHER_EACH_TIME)).rows
            self._volatile = frozenset(str(name).lower() for (name,) in rows)
            self._tables.clear()
            self._seen_schema = schema

    async def _columns(self, table: str) -> tuple[str, ...]:
        return (await self._table(table))[0]

    async def _differs_by_default(self, table: str) -> bool:
        return (await self._table(table))[1]

    async def _table(self, table: str) -> tuple[tuple[str, ...], bool]:
        """Return a table's columns, and True if a default gives different values each time."""
        await self._learn_functions()
        found = self._tables.get(table)
        if found is None:
            found = await self._read_table(table)
            self._tables[table] = found
        return found

    async def _read_table(self, table: str) -> tuple[tuple[str, ...], bool]:
        """Read a table's columns from the catalogue with a query that cannot fail.

        DESCRIBE would raise an error for an unknown table, and the error would end the client's
        transaction.
        """
        *schema, name = [name_value(token) for token in tokenize(table) if token.text != "."]
        sql = RewrittenSql(_COLUMNS, (), ("1", "2"))
        given = {"1": name, "2": schema[-1] if schema else None}
        rows = (await self._connection.run(sql, given)).rows
        if len({row[:2] for row in rows}) != 1:
            return (), bool(rows)
        defaults = {name for row in rows for name in called_functions(tokenize(row[3] or ""))}
        differs = bool(defaults & (self._volatile | _BY_THE_CLOCK))
        return tuple(str(row[2]) for row in rows), differs


def _differs(reason: str) -> SqlError:
    return SqlError(
        f"could not serialize access: ROLLBACK TO repeats earlier changes, and {reason}",
        sqlstate="40001",
        hint="ROLLBACK, and run the transaction again.",
    )


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
