"""The shape of EXPLAIN's answer: one column ``QUERY PLAN`` with a row per line, as PostgreSQL's.

DuckDB answers pairs of a plan's name and its text, and so do our own parts. A plan in a format for
programs stays in one row; its type is json where it is JSON. Only clients of the wire protocol get
this shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.contracts import Column, StatementDescription, StatementResult
from tierkv.sql.plan.explain_options import explain_options
from tierkv.sql.text.lexer import tokenize

_ENGINES: Final = ["explain_key", "explain_value"]


def described_plan(sql: str, described: StatementDescription) -> StatementDescription:
    """Give the description of an EXPLAIN the column that its answer will have."""
    if not _is_plan(described.columns):
        return described
    return replace(described, columns=_columns(_format(sql)))


def plan_rows(sql: str, result: StatementResult, shown: Callable[[str], str]) -> StatementResult:
    """Give the answer of an EXPLAIN the shape of PostgreSQL's; ``shown`` has a client's names."""
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
    """Put a client's names into the strings of a JSON value: a quote around one is no name's."""
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
