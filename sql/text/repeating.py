"""Conditions for repeating a changing statement, as far as its text shows them.

DuckDB has no savepoints. The front returns to a savepoint by repeating the transaction's earlier
changes (dbfront/statement/redo_log.py). Repeating is correct only if the changes affect the same
rows again. This module reads tokens and knows no tables.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from tierkv.sql.text.lexer import Token, TokenKind, depth_change, name_value
from tierkv.sql.text.statement import StatementKind, main_verb

_TIME_WORDS: Final = frozenset(
    {"current_timestamp", "current_date", "current_time", "localtime", "localtimestamp"}
)
_READS: Final = frozenset({"SELECT", "FROM", "USING"})


@dataclass(frozen=True, slots=True)
class ChangeText:
    """Properties of a changing statement, from its text.

    Attributes:
        functions: names of called functions and time keywords, in lower case.
        tables: names of possible insert targets, as written.
        insert_into: the table of a plain INSERT, as written; empty for any other statement, and for
            an INSERT that may change existing rows.
        returns: the INSERT has a RETURNING clause.
        reads: its changes may depend on rows in tables.
    """

    functions: frozenset[str]
    tables: tuple[str, ...]
    insert_into: str
    returns: bool
    reads: bool


def change_text(text: str, tokens: list[Token], kind: StatementKind) -> ChangeText:
    """Read the text of a changing statement.

    Args:
        text: the statement.
        tokens: tokens of the statement.
        kind: kind of the statement.
    """
    verb = main_verb(tokens)
    inserts = tuple(_inserts(text, tokens))
    plain = kind is StatementKind.INSERT and len(inserts) == 1 and not _upserts(tokens, verb)
    words = {token.upper for token in tokens if token.kind is TokenKind.WORD}
    return ChangeText(
        functions=frozenset(called_functions(tokens)),
        tables=inserts,
        insert_into=inserts[0] if plain else "",
        returns=_returning(tokens),
        reads=kind in (StatementKind.UPDATE, StatementKind.DELETE, StatementKind.MERGE)
        or not words.isdisjoint(_READS)
        or (kind is StatementKind.INSERT and "TABLE" in words),
    )


def called_functions(tokens: list[Token]) -> set[str]:
    """Return the lower-case names of called functions, and time keywords."""
    called = set()
    for index, token in enumerate(tokens):
        if token.kind not in (TokenKind.WORD, TokenKind.QUOTED):
            continue
        name = name_value(token).lower()
        opens = index + 1 < len(tokens) and tokens[index + 1].text == "("
        if opens or name in _TIME_WORDS:
            called.add(name)
    return called


def _inserts(text: str, tokens: list[Token]) -> list[str]:
    """Return the targets of INSERT and MERGE anywhere in the statement."""
    targets = []
    for index, token in enumerate(tokens):
        if token.upper == "INTO" and token.kind is TokenKind.WORD:
            end = index + 1
            while end + 2 < len(tokens) and tokens[end + 1].text == ".":
                end += 2
            if end < len(tokens):
                targets.append(text[tokens[index + 1].start : tokens[end].end])
    return targets


def _upserts(tokens: list[Token], verb: int) -> bool:
    """Return whether an INSERT may change existing rows (OR REPLACE, ON CONFLICT)."""
    if verb + 1 < len(tokens) and tokens[verb + 1].upper == "OR":
        return True
    pairs = itertools.pairwise(tokens)
    return any(one.upper == "ON" and two.upper == "CONFLICT" for one, two in pairs)


def _returning(tokens: list[Token]) -> bool:
    depth = 0
    for token in tokens:
        depth += depth_change(token)
        if depth == 0 and token.kind is TokenKind.WORD and token.upper == "RETURNING":
            return True
    return False
