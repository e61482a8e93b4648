"""ALTER TABLE in PostgreSQL's spelling, and its notice; pure.

DuckDB adds no check to an existing table, so an added column keeps no length (text_lengths.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.dbfront.contracts import Notice
from tierkv.dbfront.postgres_dialect.rewriting.text_lengths import text_length
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens


def without_only(sql: str) -> str:
    """Blank ONLY in ``ALTER TABLE [IF EXISTS] ONLY t``: tables have no child tables here."""
    words = list(tokens(sql))[:5]
    only = next((word for word in words[2:] if word.upper == "ONLY"), None)
    if only is None or [word.upper for word in words[:2]] != ["ALTER", "TABLE"]:
        return sql
    return sql[: only.start] + " " * (only.end - only.start) + sql[only.end :]


def lost_length(sql: str) -> Notice | None:
    """Return the notice that ``ALTER TABLE t ADD c varchar(5)`` keeps no length, or None."""
    words = [token for token in tokens(sql) if token.text != ";"]
    if [word.upper for word in words[:2]] != ["ALTER", "TABLE"]:
        return None
    at = _skip(words, 2, "IF", "EXISTS") + 1
    while at + 1 < len(words) and words[at].text == ".":
        at += 2
    adds = _skip(words, at, "ADD")
    types = _skip(words, at, "ALTER")
    if adds > at:
        column = _skip(words, _skip(words, adds, "COLUMN"), "IF", "NOT", "EXISTS")
        typed = column + 1
    elif types > at:
        column = _skip(words, types, "COLUMN")
        typed = _skip(words, _skip(words, column + 1, "SET", "DATA"), "TYPE")
    else:
        return None
    if column >= len(words) or text_length(words, typed) is None:
        return None
    return Notice(
        "NOTICE",
        f'column "{words[column].name}" keeps no length: DuckDB adds no constraint to a table that '
        "is there",
        sqlstate="0A000",
    )


def _skip(words: Sequence[SqlToken], at: int, *keywords: str) -> int:
    """Skip the keywords, if all of the keywords are present."""
    there = tuple(word.upper for word in words[at : at + len(keywords)])
    return at + len(keywords) if there == keywords else at
