"""``EngineStatements``: the statements of a session that the engine runs, in the engine's spelling.

session/session.py passes statements on if the session itself has no answer. CREATE, ALTER and
INSERT take an extra step: serial columns have their own sequences. EXPLAIN's answer gets
PostgreSQL's format: a column ``QUERY PLAN`` with a row per line, or with a single row for the
formats for programs; DuckDB returns pairs of a plan's name and text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.rewriting.ddl import lost_length, rewrite_create, without_only
from tierkv.dbfront.postgres_dialect.session import queries
from tierkv.dbfront.postgres_dialect.session.preparation import Preparation, literal
from tierkv.dbfront.postgres_dialect.session.queries import has_interval
from tierkv.dbfront.postgres_dialect.session.sequences import returning
from tierkv.dbfront.postgres_values.sql_tokens import first_word, tokens
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import (
    Column,
    RowStream,
    StatementDescription,
    StatementResult,
)
from tierkv.sql.plan.explain_options import explain_options
from tierkv.sql.text.lexer import tokenize

_ENGINES: Final = ["explain_key", "explain_value"]


def described_plan(sql: str, described: StatementDescription) -> StatementDescription:
    """Set the column of an EXPLAIN's later answer in its description."""
    if not _is_plan(described.columns):
        return described
    return replace(described, columns=_columns(_format(sql)))


def plan_rows(sql: str, result: StatementResult, shown: Callable[[str], str]) -> StatementResult:
    """Convert an EXPLAIN's answer to PostgreSQL's format; ``shown`` inserts the client's names."""
    if not _is_plan(result.columns):
        return result
    chosen = _format(sql)
    texts = [str(text) for _, text in result.rows]
    if chosen == "JSON":
        texts = [json.dumps(_shown(json.loads(text), shown), indent=2) for text in texts]
    elif chosen == "TEXT":
        texts = [line for text in texts for line in shown(text).rstrip("\n").split("\n")]
    return replace(result, columns=_columns(chosen), rows=[(text,) for text in texts])


def _shown(value: Any, shown: Callable[[str], str]) -> Any:
    """Insert the client's names into the strings of a JSON value: JSON quotes do not mark names."""
    if isinstance(value, dict):
        return {name: _shown(item, shown) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item, shown) for item in value]
    return shown(value) if isinstance(value, str) else value


def _is_plan(columns: tuple[Column, ...] | None) -> bool:
    return [column.name for column in columns or ()] == _ENGINES


def _format(sql: str) -> str:
    options = explain_options(tokenize(sql))
    return options.format if options is not None else "TEXT"


def _columns(chosen: str) -> tuple[Column, ...]:
    return (Column("QUERY PLAN", "JSON" if chosen == "JSON" else "VARCHAR"),)


Params = Sequence[Any] | Mapping[str, Any] | None

_CHANGES_TABLES: Final = frozenset({"CREATE", "ALTER", "DROP"})
_STREAMED: Final = frozenset({"SELECT", "WITH"})


class EngineStatements:
    """Runs and describes a session's statements in the engine.

    A method returns None if ``run`` must run the statement.
    """

    def __init__(self, inner: SqlSession, prep: Preparation, *, text_intervals: bool) -> None:
        """Create the runner over a session of the engine.

        Args:
            inner: the engine's session.
            prep: rewrites each statement first.
            text_intervals: the client gets intervals as text, so months must be preserved.
        """
        self._inner = inner
        self._prep = prep
        self._text_intervals = text_intervals

    async def copy_in(
        self, table: str, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> int:
        """Load rows into a table that the client names; see SqlSession."""
        table = self._prep.rewrite(f"TABLE {table}").text.removeprefix("TABLE ")
        return await self._inner.copy_in(table, columns, rows)

    async def deallocate_all(self) -> None:
        """Deallocate the statements that the session named with PREPARE."""
        prepared = "SELECT name FROM duckdb_prepared_statements()"
        for (name,) in await self._inner.execute_own(prepared):
            quoted = str(name).replace('"', '""')
            await self._inner.execute_own(f'DEALLOCATE "{quoted}"')

    async def describe(self, sql: str) -> StatementDescription:
        """Describe a statement without running the statement."""
        word = first_word(sql)
        rewritten = await self._prep.ready(sql)
        definition = rewrite_create(rewritten.text) if word == "CREATE" else None
        text = rewritten.text if definition is None else definition.sql
        if word == "ALTER":
            text = without_only(text)
        with rewritten.placing_errors():
            described = await self._inner.describe(text)
        if word == "EXPLAIN":
            return described_plan(sql, described)
        return queries.with_oids(described, rewritten.text)

    async def run(self, sql: str, params: Params) -> StatementResult:
        """Run a statement that the engine understands after the rewriting of catalog names."""
        rewritten = await self._prep.ready(sql)
        with rewritten.placing_errors():
            result = await self._run_rewritten(rewritten.text, params)
        word = first_word(sql)
        if word in _CHANGES_TABLES:
            self._prep.sequences.forget_tables()
        elif word == "SELECT":
            self._prep.sequences.note_query(sql, result)
        elif word == "EXPLAIN":
            result = plan_rows(sql, result, self._prep.naming.shown_plan)
        return result

    async def _run_rewritten(self, text: str, params: Params) -> StatementResult:
        """Run a rewritten statement; preserve months in a client's rows of text."""
        if self._text_intervals:
            return await queries.run(self._inner, text, params)
        return queries.with_oids(await self._inner.execute(text, params), text)

    async def open_stream(self, sql: str, params: Params) -> StatementResult | RowStream | None:
        """Run a statement that may be a stream; return None to leave it to ``execute``."""
        lowered = sql.lower()
        if first_word(sql) not in _STREAMED or "ai_" not in lowered or "set_config" in lowered:
            return None
        if not queries.is_query(sql):  # A statement with effects must not run again.
            return None
        rewritten = await self._prep.ready(sql)
        with rewritten.placing_errors():
            opened = await self._inner.execute_rows(rewritten.text, params)
        if self._text_intervals and has_interval(opened.columns):
            if not isinstance(opened, StatementResult):
                await opened.close()
            return None
        if not isinstance(opened, StatementResult):
            return opened
        return queries.with_oids(opened, rewritten.text)

    async def create(self, sql: str, params: Params) -> StatementResult | None:
        """Create tables in PostgreSQL's spelling; sequences of serial columns are created first."""
        rewritten = await self._prep.ready(sql)
        definition = rewrite_create(rewritten.text)
        if definition is None:
            return None
        schema = literal(definition.schema) if definition.schema else "current_schema()"
        there = await self._inner.execute(
            "SELECT 1 FROM duckdb_tables() WHERE database_name = current_database() "
            f"AND schema_name = {schema} AND table_name = {literal(definition.table)}"
        )
        replaced = [token.upper for token in tokens(rewritten.text)[1:3]] == ["OR", "REPLACE"]
        verb = "CREATE SEQUENCE IF NOT EXISTS" if there.rows else "CREATE OR REPLACE SEQUENCE"
        if replaced or not there.rows:
            for name, options in definition.sequences:
                await self._inner.execute(f"{verb} {name} {options}")
        self._prep.sequences.forget_tables()
        with rewritten.placing_errors():
            return await self._inner.execute(definition.sql, params)

    async def alter(self, sql: str, params: Params) -> StatementResult | None:
        """Alter tables; drop ``ONLY``, and add a notice for a lost length."""
        rewritten = await self._prep.ready(sql)
        self._prep.sequences.forget_tables()
        text = without_only(rewritten.text)
        notice = lost_length(text)
        if notice is None and text == rewritten.text:
            return None
        with rewritten.placing_errors():
            result = await self._inner.execute(text, params)
        return result if notice is None else replace(result, notices=(*result.notices, notice))

    async def insert(self, sql: str, params: Params) -> StatementResult | None:
        """Insert rows, and note the values drawn from a sequence for lastval()."""
        if "returning" in sql.lower():
            result = await self.run(sql, params)
            column = await self._prep.sequences.serial_insert(
                self._inner, self._prep.rewrite(sql).text, of_query=True
            )
            names = [one.name for one in result.columns or ()]
            if column is not None and column.name in names and result.rows:
                drawn = result.rows[-1][names.index(column.name)]
                self._prep.sequences.note(column.sequence, drawn)
            return result
        column = await self._prep.sequences.serial_insert(
            self._inner, self._prep.rewrite(sql).text, of_query=False
        )
        if column is None:
            return None
        result = await self.run(returning(sql, column), params)
        if result.rows:
            self._prep.sequences.note(column.sequence, result.rows[-1][0])
        return replace(result, columns=None, rows=())
