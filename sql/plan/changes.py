"""What a statement may change, read from its tokens: one shared check, and what a repeat needs.

Collecting, transactions, savepoints, cursors, streams and plans depend on ``may_change``: a
read-only query may run again, or in parallel with the statement. DuckDB 2.0 and PostgreSQL let the
queries of a WITH change tables, and the first keyword of a statement is not enough. In doubt the
result is True.

DuckDB has no savepoints. The front returns to a savepoint by repeating the transaction's earlier
changes (dbfront/statement/redo_log.py), which is correct only if the changes affect the same rows
again. ``change_text`` gives the conditions that the text shows. This module knows no tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.sql.plan.explain_options import explain_options
from tierkv.sql.text.clauses import Range
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, depth_change, name_value
from tierkv.sql.text.statement import StatementKind, classify, main_verb

_CHANGES: Final = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "TRUNCATE", "COPY"})
_READING_KINDS: Final = frozenset(
    {StatementKind.SHOW, StatementKind.SET, StatementKind.RESET, StatementKind.SAVEPOINT}
    | {StatementKind.BEGIN, StatementKind.COMMIT, StatementKind.ROLLBACK}
)
_READING_WORDS: Final = frozenset(
    {"DESCRIBE", "DESC", "SUMMARIZE", "PRAGMA", "FETCH", "MOVE", "CLOSE", "DEALLOCATE", "DISCARD"}
    | {"LISTEN", "UNLISTEN"}
)


def may_change(tokens: list[Token]) -> bool:
    """Return whether running a statement may change tables, the schema or files.

    An EXPLAIN changes data only with ANALYZE, and a DECLARE only if its query does. Settings and
    sequences don't count: no transaction rolls them back.
    """
    if not tokens or tokens[0].upper in _READING_WORDS:
        return False
    try:
        options = explain_options(tokens)
    except SqlSyntaxError:
        return True  # The statement will be refused.
    if options is not None:
        return options.analyze and may_change(tokens[options.start :])
    if tokens[0].upper == "DECLARE":
        return may_change(_declared(tokens))
    kind = classify(tokens)
    if kind is StatementKind.QUERY:
        return query_writes(tokens)
    return kind not in _READING_KINDS


def query_writes(tokens: list[Token]) -> bool:
    """Return whether a SELECT changes tables: by an INTO, or by a WITH whose query writes."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += depth_change(token)
        names = index > 0 and tokens[index - 1].upper in ("AS", ".")
        if depth == 0 and token.upper == "INTO" and token.kind is TokenKind.WORD and not names:
            return True
    return with_writes(tokens)


def with_writes(tokens: list[Token]) -> bool:
    """Return whether a query of a WITH writes, in any kind of statement."""
    return next(writing_bodies(tokens), None) is not None


def writing_bodies(tokens: list[Token]) -> Iterator[tuple[Range, int]]:
    """Yield the writing queries of a WITH: the token range and the verb of each."""
    for index in range(1, len(tokens)):
        if tokens[index - 1].text != "(" or tokens[index].kind is not TokenKind.WORD:
            continue
        verb = index
        if tokens[index].upper == "WITH":
            last = closing_index(tokens, index - 1)
            verb += main_verb(tokens[index:last])
        if verb < len(tokens) and _changes(tokens, index - 1, verb):
            yield (index, closing_index(tokens, index - 1)), verb


def _changes(tokens: list[Token], opening: int, verb: int) -> bool:
    """Return whether a word is the verb of a writing query, not the name of a column."""
    if tokens[verb].upper not in _CHANGES or verb + 1 >= len(tokens):
        return False
    following = tokens[verb + 1]
    if following.text == "(":  # COPY (SELECT ...), or a function of that name
        return opening > 0 and tokens[opening - 1].upper in ("AS", "MATERIALIZED")
    return following.kind is not TokenKind.OPERATOR


def _declared(tokens: list[Token]) -> list[Token]:
    """Return the query of a DECLARE CURSOR."""
    starts = (at for at, token in enumerate(tokens) if token.upper == "FOR")
    return tokens[next(starts, len(tokens)) + 1 :]


_TIME_WORDS: Final = frozenset(
    {"current_timestamp", "current_date", "current_time", "localtime", "localtimestamp"}
)
_READING_CLAUSES: Final = frozenset({"SELECT", "FROM", "USING"})


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
        or not words.isdisjoint(_READING_CLAUSES)
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
