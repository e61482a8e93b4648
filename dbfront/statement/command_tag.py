"""Converts the engine's raw result to the client's result, including the command tag."""

from __future__ import annotations

from typing import Final

from tierkv.dbfront.contracts import Column, Notice, StatementResult
from tierkv.dbfront.databases.duckdb_engine import EngineResult
from tierkv.sql.plan.plan import Explain, StatementPlan
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import StatementKind

_COUNT_ONLY: Final = (
    (Column("Count", "BIGINT"),),
    (Column("Success", "BOOLEAN"),),
)
_ROW_KINDS: Final = frozenset({StatementKind.QUERY, StatementKind.SHOW})
_COUNTED: Final = {
    StatementKind.INSERT: "INSERT 0",
    StatementKind.UPDATE: "UPDATE",
    StatementKind.DELETE: "DELETE",
    StatementKind.MERGE: "MERGE",
    StatementKind.COPY: "COPY",
    StatementKind.CREATE_TABLE_AS: "SELECT",
}
_OBJECTS: Final = (
    "TABLE",
    "VIEW",
    "INDEX",
    "SCHEMA",
    "SEQUENCE",
    "TYPE",
    "MACRO",
    "FUNCTION",
    "DATABASE",
    "SECRET",
)


def client_result(
    plan: StatementPlan, result: EngineResult, notices: tuple[Notice, ...] = ()
) -> StatementResult:
    """Convert an engine result to the client's result."""
    counts_only = result.columns in _COUNT_ONLY and plan.returning_sql is None
    if plan.explain is Explain.NO and plan.kind not in _ROW_KINDS and counts_only:
        count = result.rows[0][0] if result.rows else 0
        return StatementResult(command_tag(plan, count), notices=notices)
    tag = command_tag(plan, len(result.rows))
    return StatementResult(tag, result.columns, result.rows, notices)


def command_tag(plan: StatementPlan, count: int) -> str:
    """Return PostgreSQL's command tag for a statement with ``count`` rows."""
    if plan.explain is not Explain.NO:
        return "EXPLAIN"
    if plan.kind is StatementKind.QUERY:
        return f"SELECT {count}"
    if plan.kind in _COUNTED:
        return f"{_COUNTED[plan.kind]} {count}"
    words = [token.upper for token in tokenize(plan.text)[:8]]
    if plan.kind in (StatementKind.CREATE, StatementKind.DROP, StatementKind.ALTER):
        return f"{words[0]} {next((word for word in words if word in _OBJECTS), '')}".strip()
    if words[:2] == ["FORCE", "CHECKPOINT"]:
        return "CHECKPOINT"  # DuckDB's FORCE is only an adverb.
    return words[0] if words else ""
