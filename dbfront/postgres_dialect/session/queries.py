"""Runs rewritten statements with exact intervals, and with types for the catalog's lists.

session/engine_statements.py calls this module after the rewriting of a statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from tierkv.dbfront.contracts import Column, StatementDescription, StatementResult
from tierkv.dbfront.postgres_dialect.rewriting.intervals import (
    has_interval,
    query_with_text,
    returning_with_text,
)
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.postgres_values.sql_tokens import first_word
from tierkv.dbfront.postgres_values.type_functions import COLUMNS as FUNCTION_COLUMNS
from tierkv.dbfront.sql_session import SqlSession
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlSyntaxError
from tierkv.sql.plan.changes import may_change
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import StatementKind, classify

Params = Sequence[Any] | Mapping[str, Any] | None

_QUERIES: Final = frozenset({"SELECT", "FROM", "VALUES", "TABLE"})
_ONCE: Final = ("nextval", "ai_")
"""Words of a query that must not run twice: its only effect, and calls that cost a model's time."""

_VECTORS: Final = {"BIGINT[]": "OID[]", "SMALLINT[]": "INT2VECTOR", "UINTEGER[]": "OIDVECTOR"}
_Shaped = TypeVar("_Shaped", StatementDescription, StatementResult)


def is_query(sql: str) -> bool:
    """Return True if a statement only reads."""
    word = first_word(sql)
    return word in _QUERIES or (word in ("", "WITH") and not may_change(tokenize(sql)))


def refuse_writing_cursor(sql: str) -> None:
    """Refuse a cursor over a statement that writes, before it runs, as PostgreSQL does.

    Raises:
        SqlSyntaxError: the statement is not a query.
        FeatureNotSupportedError: the query has a WITH that writes.
    """
    kind = classify(tokenize(sql))
    if kind.writes:
        raise SqlSyntaxError("DECLARE CURSOR needs a query")
    if kind is StatementKind.QUERY:
        raise FeatureNotSupportedError(
            "DECLARE CURSOR must not contain data-modifying statements in WITH",
            hint="Run the statement by itself, into a temporary table if there are many rows.",
        )


def with_oids(shaped: _Shaped, sql: str) -> _Shaped:
    """Give the numbers in catalog queries PostgreSQL's types, which drivers require."""
    if shaped.columns is None or DATABASE not in sql:
        return shaped
    return replace(shaped, columns=tuple(Column(c.name, _type(c)) for c in shaped.columns))


def _type(column: Column) -> str:
    if column.type_name == "UINTEGER" and column.name in FUNCTION_COLUMNS:
        return "REGPROC"
    return _VECTORS.get(column.type_name, column.type_name)


async def run(inner: SqlSession, sql: str, params: Params) -> StatementResult:
    """Run one statement and preserve the months in its rows."""
    if not is_query(sql):
        return await _run_returning(inner, sql, params)
    lowered = sql.lower()
    if any(word in lowered for word in _ONCE):
        columns = (await inner.describe(sql)).columns
        if columns is not None and has_interval(columns):
            result = await inner.execute(query_with_text(sql, columns), params)
            return replace(result, columns=columns)
    result = await inner.execute(sql, params)
    if result.columns is not None and has_interval(result.columns):
        again = await inner.execute(query_with_text(sql, result.columns), params)
        result = replace(result, rows=again.rows)
    return with_oids(result, sql)


async def _run_returning(inner: SqlSession, sql: str, params: Params) -> StatementResult:
    selects = classify(tokenize(sql)) is StatementKind.QUERY  # after a WITH that writes
    gives_rows = selects or "returning" in sql.lower()
    columns = (await inner.describe(sql)).columns if gives_rows else None
    if columns is None or not has_interval(columns):
        return await inner.execute(sql, params)
    with_text = query_with_text if selects else returning_with_text
    result = await inner.execute(with_text(sql, columns), params)
    return replace(result, columns=columns)
