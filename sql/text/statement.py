"""The kind of a statement, recognised by its first keywords.

A parser would be wrong here: client dialects contain statements that no single parser reads
(EXPLAIN, SHOW, BEGIN ISOLATION LEVEL ...), and the first keywords are enough to choose the handler.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from tierkv.sql.text.lexer import SqlText, Token, TokenKind, depth_change, tokenize


class StatementKind(StrEnum):
    """Kind of a statement; determines its handler and the treatment of its AI calls."""

    QUERY = "query"
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    MERGE = "merge"
    CREATE_TABLE_AS = "create table as"
    CREATE = "create"
    DROP = "drop"
    ALTER = "alter"
    COPY = "copy"
    EXPLAIN = "explain"
    SET = "set"
    SHOW = "show"
    RESET = "reset"
    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    SAVEPOINT = "savepoint"
    OTHER = "other"

    @property
    def writes(self) -> bool:
        """Return whether the statement changes tables."""
        return self in _WRITES


_WRITES: Final = frozenset(
    {
        StatementKind.INSERT,
        StatementKind.UPDATE,
        StatementKind.DELETE,
        StatementKind.MERGE,
        StatementKind.CREATE_TABLE_AS,
        StatementKind.COPY,
    }
)

_FIRST_WORD: Final[dict[str, StatementKind]] = {
    "SELECT": StatementKind.QUERY,
    "VALUES": StatementKind.QUERY,
    "FROM": StatementKind.QUERY,
    "TABLE": StatementKind.QUERY,
    "INSERT": StatementKind.INSERT,
    "UPDATE": StatementKind.UPDATE,
    "DELETE": StatementKind.DELETE,
    "MERGE": StatementKind.MERGE,
    "DROP": StatementKind.DROP,
    "ALTER": StatementKind.ALTER,
    "COPY": StatementKind.COPY,
    "EXPLAIN": StatementKind.EXPLAIN,
    "SET": StatementKind.SET,
    "SHOW": StatementKind.SHOW,
    "RESET": StatementKind.RESET,
    "BEGIN": StatementKind.BEGIN,
    "START": StatementKind.BEGIN,
    "COMMIT": StatementKind.COMMIT,
    "END": StatementKind.COMMIT,
    "ROLLBACK": StatementKind.ROLLBACK,
    "ABORT": StatementKind.ROLLBACK,
    "SAVEPOINT": StatementKind.SAVEPOINT,
    "RELEASE": StatementKind.SAVEPOINT,
}
_AFTER_WITH: Final = frozenset(
    {"SELECT", "VALUES", "FROM", "TABLE", "INSERT", "UPDATE", "DELETE", "MERGE"}
)


_NOT_SHOWN: Final = frozenset(
    {"OR", "REPLACE", "TEMP", "TEMPORARY", "LOCAL", "GLOBAL", "UNLOGGED", "RECURSIVE", "UNIQUE"}
)


def command_name(tokens: Sequence[Token]) -> str:
    """Name a statement for people: ``CREATE MATERIALIZED VIEW``, ``ALTER TABLE``, ``PREPARE``."""
    words = [token.upper for token in tokens[:8] if token.upper not in _NOT_SHOWN]
    count = {"CREATE": 2, "ALTER": 2, "DROP": 2}.get(words[0], 1) if words else 0
    if words[1:2] == ["MATERIALIZED"]:
        count = 3
    return " ".join(words[:count])


def split_statements(text: str) -> list[str]:
    """Cut text at its semicolons; comments alone and empty statements are dropped.

    Statements of a SqlText are SqlTexts too, and know their tokens.
    """
    whole = SqlText.of(text)
    return [whole.part(start, end) for start, end in statement_spans(whole)]


def statement_spans(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each statement of ``split_statements``."""
    spans: list[tuple[int, int]] = []
    first: Token | None = None
    last: Token | None = None
    for token in tokenize(text):
        if token.kind is TokenKind.OPERATOR and token.text == ";":
            if first is not None and last is not None:
                spans.append((first.start, last.end))
            first = last = None
            continue
        first = first or token
        last = token
    if first is not None and last is not None:
        spans.append((first.start, last.end))
    return spans


def classify(tokens: list[Token]) -> StatementKind:
    """Return the kind of the statement; empty input is OTHER."""
    start = main_verb(tokens)
    if start >= len(tokens):
        return StatementKind.OTHER
    token = tokens[start]
    if token.text == "(":
        return StatementKind.QUERY
    if token.kind is not TokenKind.WORD:
        return StatementKind.OTHER
    if token.upper == "CREATE":
        return _classify_create(tokens, start)
    if token.upper == "ROLLBACK" and any(t.upper == "TO" for t in tokens[start + 1 : start + 4]):
        return StatementKind.SAVEPOINT
    return _FIRST_WORD.get(token.upper, StatementKind.OTHER)


def makes_function(tokens: list[Token], *, temporary: bool) -> bool:
    """Return whether a statement may make a macro; ``temporary``: only a session's own macro."""
    words = {token.upper for token in tokens}
    made = "CREATE" in words and not words.isdisjoint(("MACRO", "FUNCTION"))
    return made and not (temporary and words.isdisjoint(("TEMP", "TEMPORARY")))


def main_verb(tokens: list[Token]) -> int:
    """Return the index of the first keyword, after a leading WITH clause if present."""
    if not tokens or tokens[0].upper != "WITH":
        return 0
    depth = 0
    for index, token in enumerate(tokens):
        depth += depth_change(token)
        if depth or token.kind is not TokenKind.WORD or token.upper not in _AFTER_WITH:
            continue
        if tokens[index - 1].upper not in ("WITH", "RECURSIVE", ","):  # else the word names a query
            return index
    return len(tokens)


def _classify_create(tokens: list[Token], start: int) -> StatementKind:
    words = [token.upper for token in tokens[start : start + 6]]
    if "TABLE" not in words:
        return StatementKind.CREATE
    depth = 0
    for token in tokens[start:]:
        depth += depth_change(token)
        if depth == 0 and token.upper == "AS":
            return StatementKind.CREATE_TABLE_AS
    return StatementKind.CREATE
