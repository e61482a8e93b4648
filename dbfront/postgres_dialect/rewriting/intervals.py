"""Queries with intervals as text, because DuckDB's Python values would make months 30 days each.

session/queries.py finds result columns with intervals, and runs the rewritten query in place of the
original. A query has no effects except on sequences, so a second run is safe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tierkv.dbfront.contracts import Column
from tierkv.dbfront.copying.statement import quote_name
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import main_verb

_INTERVAL: Final = re.compile(r"(?<![\w\"])INTERVAL(?![\w\"])")
_NO_CAST: Final = re.compile(r"\bTUPLE\(|\bUNION\(|\bENUM\(|\bSTRUCT\((?!\"|\w+ )")
"""Types that can't be written as a cast's target, or not safely changed."""


def has_interval(columns: Sequence[Column] | None) -> bool:
    """Return True if a column is an interval or contains intervals."""
    return any("INTERVAL" in column.type_name for column in columns or ())


def _cast(column: Column, value: str) -> str:
    if "INTERVAL" not in column.type_name or _NO_CAST.search(column.type_name):
        return value
    return f"{value}::{_INTERVAL.sub('VARCHAR', column.type_name)}"


def query_with_text(sql: str, columns: Sequence[Column]) -> str:
    """Return the query with its intervals as text; column names may occur twice."""
    names = [f"own_{at}" for at in range(len(columns))]
    items = ", ".join(
        f"{_cast(column, name)} AS {quote_name(column.name)}"
        for column, name in zip(columns, names, strict=True)
    )
    inner = sql.strip().rstrip(";")
    words = tokenize(inner)
    verb = main_verb(words)
    start = words[verb].start if 0 < verb < len(words) else 0  # A WITH that writes stays in front.
    return f"{inner[:start]}SELECT {items} FROM ({inner[start:]}\n) AS own_rows({', '.join(names)})"


def returning_with_text(sql: str, columns: Sequence[Column]) -> str:
    """Return the statement with intervals of RETURNING as text, for columns and ``*``."""
    words = [word for word in tokens(sql) if word.text != ";"]
    start = _last_returning(words)
    if start is None:
        return sql
    head = sql[: words[start].end]
    if [word.text for word in words[start + 1 :]] == ["*"]:
        items = [_cast(c, quote_name(c.name)) + f" AS {quote_name(c.name)}" for c in columns]
        return f"{head} {', '.join(items)}"
    items = _items(sql, words[start + 1 :])
    if len(items) != len(columns):
        return sql
    cast = (
        f"{_cast(column, f'({_without_alias(item)})')} AS {quote_name(column.name)}"
        if has_interval((column,))
        else item
        for item, column in zip(items, columns, strict=True)
    )
    return f"{head} {', '.join(cast)}"


def _last_returning(words: Sequence[SqlToken]) -> int | None:
    found = [at for at, word in enumerate(words) if word.upper == "RETURNING"]
    return found[-1] if found else None


def _items(sql: str, words: Sequence[SqlToken]) -> list[str]:
    """Split a select list at its commas."""
    items, depth, start = [], 0, words[0].start if words else 0
    for word in words:
        depth += {"(": 1, ")": -1}.get(word.text, 0)
        if word.text == "," and depth == 0:
            items.append(sql[start : word.start].strip())
            start = word.end
    return [*items, sql[start : words[-1].end].strip()] if words else []


def _without_alias(item: str) -> str:
    """Return ``x`` of ``x AS y`` or ``x y``."""
    words = tokens(item)
    if len(words) < 2 or words[-1].kind not in ("word", "ident"):
        return item
    if words[-2].upper == "AS":
        return item[: words[-2].start].strip()
    follows = words[-2].kind in ("word", "ident") or words[-2].text == ")"
    return item[: words[-1].start].strip() if follows else item
