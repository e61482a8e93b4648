"""A SqlServer that is plain DuckDB, without AI calls: what the wire protocol is tested against."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
from hypothesis import strategies as st

from tierkv.dbfront.accounts.statistics import AiStats
from tierkv.dbfront.contracts import ClientInfo, Column, StatementDescription, StatementResult
from tierkv.kvcore.errors import CancelledByUserError, SqlError
from tierkv.sql.text.lexer import tokenize

_STATES = {
    "ParserException": "42601",
    "CatalogException": "42P01",
    "BinderException": "42703",
    "ConstraintException": "23505",
    "ConversionException": "22P02",
    "OutOfRangeException": "22003",
    "TransactionException": "25000",
}


def sql_error(error: duckdb.Error) -> SqlError:
    state = _STATES.get(type(error).__name__, "XX000")
    return SqlError(str(error).splitlines()[0], sqlstate=state)


class PlainSession:
    def __init__(self, con: duckdb.DuckDBPyConnection, pid: int, client: ClientInfo) -> None:
        self._con = con
        self.pid = pid
        self.client = client
        self.transaction_status = "I"
        self.closed = False
        self.on_progress: Any = None
        self.last_ai_stats = AiStats()

    def split(self, sql: str) -> list[str]:
        cuts, start = [], 0
        for token in tokenize(sql):
            if token.text == ";":
                cuts.append(sql[start : token.start])
                start = token.end
        cuts.append(sql[start:])
        return [cut.strip() for cut in cuts if tokenize(cut)]

    async def describe(self, sql: str) -> StatementDescription:
        return await asyncio.to_thread(self._describe, sql)

    def _describe(self, sql: str) -> StatementDescription:
        count = max(
            [int(t.text[1:]) for t in tokenize(sql) if re.fullmatch(r"\$\d+", t.text)] or [0]
        )
        types = tuple(self._hint(sql, n + 1) for n in range(count))
        word = tokenize(sql)[0].upper
        returning = any(t.upper == "RETURNING" for t in tokenize(sql))
        if word not in ("SELECT", "WITH", "VALUES", "FROM", "TABLE") and not returning:
            return StatementDescription(None, types)
        if returning:
            return StatementDescription((Column("id", "INTEGER"),), types)
        try:
            rows = self._con.execute(f"DESCRIBE {sql}", [None] * count).fetchall()
        except duckdb.Error as error:
            raise self._fail(error) from None
        return StatementDescription(tuple(Column(r[0], r[1]) for r in rows), types)

    @staticmethod
    def _hint(sql: str, number: int) -> str:
        match = re.search(rf"\${number}::([\w\[\]]+)", sql)
        names = {"INT": "INTEGER", "TEXT": "VARCHAR", "INT[]": "INTEGER[]"}
        found = match[1].upper() if match else "VARCHAR"
        return names.get(found, found)

    def _fail(self, error: duckdb.Error) -> Exception:
        if self.transaction_status == "T":
            self.transaction_status = "E"
        if isinstance(error, duckdb.InterruptException):
            return CancelledByUserError("canceling statement due to user request")
        return sql_error(error)

    async def execute(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult:
        return await asyncio.to_thread(self._execute, sql, params)

    async def execute_own(self, sql: str) -> Sequence[tuple[Any, ...]]:
        return (await self.execute(sql)).rows

    def catalogue_state(self) -> None:
        return None

    async def execute_rows(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> StatementResult:
        return await self.execute(sql, params)

    def _execute(self, sql: str, params: Any) -> StatementResult:
        word = tokenize(sql)[0].upper
        if self.transaction_status == "E" and word not in ("ROLLBACK", "COMMIT", "END", "ABORT"):
            raise SqlError("current transaction is aborted", sqlstate="25P02")
        if word == "COMMIT" and self.transaction_status == "E":
            word = sql = "ROLLBACK"
        try:
            self._con.execute(sql, list(params) if params is not None else None)
            description = self._con.description or []
            columns = tuple(Column(str(d[0]), str(d[1])) for d in description)
            rows = self._con.fetchall() if columns else []
        except duckdb.Error as error:
            raise self._fail(error) from None
        if word == "BEGIN":
            self.transaction_status = "T"
        elif word in ("COMMIT", "ROLLBACK"):
            self.transaction_status = "I"
        return self._result(sql, word, columns, rows)

    @staticmethod
    def _result(sql: str, word: str, columns: Any, rows: list[Any]) -> StatementResult:
        returning = any(t.upper == "RETURNING" for t in tokenize(sql))
        if word in ("INSERT", "UPDATE", "DELETE"):
            count = len(rows) if returning else rows[0][0]
            tag = f"INSERT 0 {count}" if word == "INSERT" else f"{word} {count}"
            return StatementResult(tag, columns if returning else None, rows if returning else ())
        if word in ("SELECT", "WITH", "VALUES", "FROM", "TABLE", "SHOW", "DESCRIBE", "EXPLAIN"):
            return StatementResult(f"SELECT {len(rows)}", columns, rows)
        tag = " ".join(t.upper for t in tokenize(sql)[: 2 if word in ("CREATE", "DROP") else 1])
        return StatementResult(tag)

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        return await asyncio.to_thread(self._copy_in, table, columns, rows)

    def _copy_in(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> int:
        names = ", ".join(f'"{name}"' for name in columns)
        marks = ", ".join(["?"] * len(columns))
        try:
            self._con.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)
        except duckdb.Error as error:
            raise self._fail(error) from None
        return len(rows)

    async def cancel(self) -> None:
        self._con.interrupt()

    async def close(self) -> None:
        self.closed = True
        await asyncio.to_thread(self._con.close)


class PlainSqlServer:
    def __init__(self) -> None:
        self.con = duckdb.connect(":memory:", config={"threads": 1})
        self._pids = itertools.count(100)
        self.sessions: list[PlainSession] = []

    async def open_session(self, client: ClientInfo) -> PlainSession:
        session = PlainSession(self.con.cursor(), next(self._pids), client)
        self.sessions.append(session)
        return session

    async def close(self) -> None:
        self.con.close()


def short_texts(most: int) -> st.SearchStrategy[str]:
    """Texts that SQL can hold: no NUL, which both doors refuse, and no half of a pair."""
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=most)
