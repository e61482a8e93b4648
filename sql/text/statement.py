"""The kind of a statement, recognised by its first keywords, and its form without literals.

A parser would be wrong here: client dialects contain statements that no single parser reads
(EXPLAIN, SHOW, BEGIN ISOLATION LEVEL ...), and the first keywords are enough to choose the handler.

The normal form is the grouping key of statistics, and the text shown in views. Prompts and data are
literals, so a normal form contains neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from tierkv.kvcore import limits
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


_LITERALS: Final = frozenset({TokenKind.STRING, TokenKind.NUMBER})
_MORE: Final = " /*, ... */"
"""Stands for the rest of a list of literals, as in PostgreSQL."""


def normal_form(tokens: Sequence[Token]) -> str:
    """Write a statement with ``$n`` for each literal, without comments, and on one line.

    A list of literals after IN is shown by its first literal: the length of the list does not
    matter. At most limits.MAX_NORMAL_FORM_CHARS characters are kept.
    """
    pieces: list[str] = []
    end = tokens[0].start if tokens else 0
    number = _highest_parameter(tokens)
    for first, last, text in _shown(tokens, number):
        pieces.append(" " if tokens[first].start > end else "")
        pieces.append(text)
        end = tokens[last].end
    return "".join(pieces)[: limits.MAX_NORMAL_FORM_CHARS]


def query_id(tokens: Sequence[Token]) -> int:
    """Return a 64-bit number, equal for statements that differ only in literals.

    White space, comments and the case of unquoted names make no difference either. The number is
    the same in every run and on every machine.
    """
    hasher = blake2b(digest_size=8)
    for first, _, text in _shown(tokens, _highest_parameter(tokens)):
        folded = text.lower() if tokens[first].kind is TokenKind.WORD else text
        hasher.update(folded.encode(errors="replace") + b"\0")
    return int.from_bytes(hasher.digest(), "little", signed=True)


def _shown(tokens: Sequence[Token], number: int) -> list[tuple[int, int, str]]:
    """Return the shown texts, each with the first and last index of the replaced tokens."""
    shown: list[tuple[int, int, str]] = []
    index, end = 0, _end(tokens)
    while index < end:
        if tokens[index].kind in _LITERALS:
            number += 1
            text = f"${number}"
            more = _rest_of_list(tokens, index)
            shown.append((index, index + more, text + _MORE if more else text))
            index += more
        else:
            shown.append((index, index, tokens[index].text))
        index += 1
    return shown


def _end(tokens: Sequence[Token]) -> int:
    """Return the end of the statement without trailing semicolons."""
    end = len(tokens)
    while end and tokens[end - 1].text == ";":
        end -= 1
    return end


def _rest_of_list(tokens: Sequence[Token], first: int) -> int:
    """Count the tokens of ``, 2, 3`` in ``IN (1, 2, 3)``; 0 for any other text."""
    if first < 2 or tokens[first - 1].text != "(" or tokens[first - 2].upper != "IN":
        return 0
    index = first + 1
    while index + 1 < len(tokens) and tokens[index].text == ",":
        if tokens[index + 1].kind not in _LITERALS:
            return 0
        index += 2
    is_closed = index < len(tokens) and tokens[index].text == ")"
    return index - first - 1 if is_closed else 0


def _highest_parameter(tokens: Sequence[Token]) -> int:
    """Return the statement's highest parameter number; literals are numbered after it."""
    numbers = (
        int(token.text[1:])
        for token in tokens
        if token.kind is TokenKind.PARAMETER and token.text[1:].isdecimal()
    )
    return max(numbers, default=0)
