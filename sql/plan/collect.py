"""The SELECT with the same AI calls as a writing statement.

DuckDB has no savepoints to try and undo a write inside the client's transaction. The calls of a
write are first collected with this SELECT; the statement itself then runs once.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tierkv.sql.plan.changes import writing_bodies
from tierkv.sql.plan.rewrite import Piece
from tierkv.sql.text.lexer import Token, TokenKind, closing_index, depth_change
from tierkv.sql.text.statement import StatementKind, main_verb

_TARGET_ENDS = frozenset(
    {
        "SET",
        "WHERE",
        "USING",
        "RETURNING",
        "ON",
        "DEFAULT",
        "BY",
        "SELECT",
        "VALUES",
        "FROM",
        "WITH",
        "TABLE",
    }
)
_QUERY_STARTS = frozenset({"SELECT", "VALUES", "FROM", "WITH", "TABLE"})
_BEFORE_TARGET = frozenset({"INTO", "FROM", "OR", "REPLACE", "IGNORE"})
_NOTHING_RETURNED: tuple[Piece, ...] = ('SELECT 0 AS "Count"',)


@dataclass(frozen=True, slots=True)
class CollectForm:
    """Pieces of the SELECT, in order."""

    pieces: tuple[Piece, ...]


def collect_form(tokens: list[Token], kind: StatementKind) -> CollectForm | None:
    """Derive the SELECT of a writing statement; None for an unknown statement shape."""
    verb = main_verb(tokens)
    if verb >= len(tokens):
        return None
    with_clause: tuple[Piece, ...] = ((0, verb), " ") if verb else ()
    pieces: tuple[Piece, ...] | None = None
    if kind is StatementKind.INSERT:
        pieces = _insert(tokens, verb)
    elif kind is StatementKind.UPDATE:
        pieces = _update(tokens, verb)
    elif kind is StatementKind.DELETE:
        pieces = _delete(tokens, verb)
    elif kind is StatementKind.CREATE_TABLE_AS:
        pieces = _create_table_as(tokens, verb)
    elif kind is StatementKind.COPY and tokens[verb + 1].text == "(":
        pieces = ((verb + 2, closing_index(tokens, verb + 1)),)
    return None if pieces is None else CollectForm(with_clause + pieces)


def columns_form(tokens: list[Token], kind: StatementKind) -> tuple[Piece, ...] | None:
    """Derive a SELECT with the result columns of a writing statement; None without any."""
    if kind is StatementKind.QUERY:
        return _query_columns(tokens)
    return _returned(tokens, main_verb(tokens), len(tokens))


def _query_columns(tokens: list[Token]) -> tuple[Piece, ...] | None:
    """Replace each writing query of a WITH by a SELECT of its result columns."""
    pieces: list[Piece] = []
    at = 0
    for (first, last), verb in writing_bodies(tokens):
        pieces += [(at, first), *(_returned(tokens, verb, last) or _NOTHING_RETURNED)]
        at = last
    return (*pieces, (at, len(tokens))) if pieces else None


def _returned(tokens: list[Token], verb: int, last: int) -> tuple[Piece, ...] | None:
    """Derive a SELECT with the columns of a RETURNING clause; None without the clause."""
    returning = find_word(tokens, verb + 1, {"RETURNING"}, last)
    if returning >= last or tokens[verb].upper not in ("INSERT", "UPDATE", "DELETE"):
        return None
    target = next(
        index for index in range(verb + 1, last) if tokens[index].upper not in _BEFORE_TARGET
    )
    end = find_word(tokens, target, _TARGET_ENDS, last)
    if tokens[verb].upper == "INSERT":
        end = next((index for index in range(target, end) if tokens[index].text == "("), end)
    return ("SELECT ", (returning + 1, last), " FROM ", (target, end))


def _insert(tokens: list[Token], verb: int) -> tuple[Piece, ...] | None:
    start = next(
        (
            index
            for index in range(verb + 1, len(tokens))
            if tokens[index].upper in _QUERY_STARTS and tokens[index - 1].upper != "DEFAULT"
        ),
        None,
    )
    if start is None:
        return None
    while tokens[start - 1].text == "(":
        start -= 1
    end = find_word(tokens, start, {"RETURNING"})
    conflict = start
    while conflict < end:
        conflict = find_word(tokens, conflict + 1, {"ON"})
        if conflict + 1 < end and tokens[conflict + 1].upper == "CONFLICT":
            end = conflict
    return tuple(_without_default(tokens, start, end))


def _without_default(tokens: list[Token], first: int, last: int) -> list[Piece]:
    """Replace DEFAULT by NULL, because only INSERT and UPDATE know DEFAULT."""
    pieces: list[Piece] = []
    for index in range(first, last):
        token = tokens[index]
        if token.kind is TokenKind.WORD and token.upper == "DEFAULT":
            pieces += [(first, index), " NULL "]
            first = index + 1
    return [*pieces, (first, last)]


def _update(tokens: list[Token], verb: int) -> tuple[Piece, ...] | None:
    set_at = find_word(tokens, verb + 1, {"SET"})
    ends = find_word(tokens, set_at + 1, {"FROM", "WHERE", "RETURNING"})
    if set_at >= len(tokens):
        return None
    pieces: list[Piece] = ["SELECT 1"]
    for first, last in _assigned(tokens, set_at + 1, ends):
        pieces += [", ", *_without_default(tokens, first, last)]
    pieces += [" FROM ", (verb + 1, set_at)]
    where = find_word(tokens, ends, {"WHERE", "RETURNING"})
    if ends < len(tokens) and tokens[ends].upper == "FROM":
        pieces += [", ", (ends + 1, where)]
    return (*pieces, *_where(tokens, where))


def _assigned(tokens: list[Token], first: int, last: int) -> list[tuple[int, int]]:
    """Find the expressions right of each ``=`` of a SET list."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    depth = 0
    for index in range(first, last):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].text == "=" and start is None:
            start = index + 1
        elif depth == 0 and tokens[index].text == "," and start is not None:
            found.append((start, index))
            start = None
    return found if start is None else [*found, (start, last)]


def _delete(tokens: list[Token], verb: int) -> tuple[Piece, ...] | None:
    if verb + 1 >= len(tokens) or tokens[verb + 1].upper != "FROM":
        return None
    using = find_word(tokens, verb + 2, {"USING", "WHERE", "RETURNING"})
    where = find_word(tokens, using, {"WHERE", "RETURNING"})
    pieces: list[Piece] = ["SELECT 1 FROM ", (verb + 2, using)]
    if using < where:
        pieces += [", ", (using + 1, where)]
    return (*pieces, *_where(tokens, where))


def _where(tokens: list[Token], where: int) -> tuple[Piece, ...]:
    if where >= len(tokens) or tokens[where].upper != "WHERE":
        return ()
    return (" ", (where, find_word(tokens, where, {"RETURNING"})))


def _create_table_as(tokens: list[Token], verb: int) -> tuple[Piece, ...] | None:
    start = find_word(tokens, verb, {"AS"}) + 1
    if any(token.upper == "EXISTS" for token in tokens[verb:start]):
        # IF NOT EXISTS: the calls may be unnecessary; only running the statement tells.
        return None
    end = len(tokens)
    if tokens[-1].upper == "DATA" and end - start > 2:
        if tokens[-2].upper == "NO":
            return None
        end -= 2
    return ((start, end),)


def find_word(tokens: list[Token], first: int, words: Set[str], last: int | None = None) -> int:
    """Return the index of the first of the words outside brackets, ``last`` if none."""
    last = len(tokens) if last is None else last
    depth = 0
    for index in range(first, last):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].kind is TokenKind.WORD and tokens[index].upper in words:
            return index
    return last
