"""The clauses of a plain SELECT as token ranges: select items, WHERE conjuncts, ORDER BY, LIMIT.

Used for streaming and for ordering AI filters, which splice text. This module only reads tokens;
callers have checked with sqlglot's tree that the statement is one plain SELECT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.sql.text.lexer import Token, TokenKind, depth_change

Range = tuple[int, int]
"""Tokens ``[first, last)``."""

_CLAUSES: Final = frozenset(
    {"FROM", "WHERE", "GROUP", "HAVING", "WINDOW", "QUALIFY", "ORDER", "LIMIT", "OFFSET"}
    | {"FETCH", "FOR"}
)


@dataclass(frozen=True, slots=True)
class SelectClauses:
    """Ranges of the clauses of a SELECT.

    Attributes:
        verb: the token SELECT.
        items: items of the select list, including aliases.
        conjuncts: conjuncts of WHERE; empty without WHERE.
        order: ORDER BY and its keys; None without ORDER BY.
        limits: LIMIT, OFFSET and FETCH FIRST; None without any.
        last: end of the statement.
    """

    verb: int
    items: tuple[Range, ...]
    conjuncts: tuple[Range, ...]
    order: Range | None
    limits: Range | None
    last: int


def select_clauses(tokens: list[Token], verb: int) -> SelectClauses | None:
    """Find the clauses of the SELECT at token ``verb``; None for any other token."""
    if verb >= len(tokens) or tokens[verb].upper != "SELECT":
        return None
    starts = _clause_starts(tokens, verb + 1)
    ends = {name: end for name, (_, end) in starts.items()}
    first_clause = min((first for first, _ in starts.values()), default=len(tokens))
    first_item = verb + 1 + (tokens[verb + 1 : verb + 2] != [] and tokens[verb + 1].upper == "ALL")
    where = starts.get("WHERE")
    limits = [starts[name] for name in ("LIMIT", "OFFSET", "FETCH") if name in starts]
    return SelectClauses(
        verb=verb,
        items=tuple(split_at(tokens, first_item, first_clause, ",")),
        conjuncts=() if where is None else conjunct_ranges(tokens, where[0] + 1, ends["WHERE"]),
        order=starts.get("ORDER"),
        limits=(min(f for f, _ in limits), max(e for _, e in limits)) if limits else None,
        last=len(tokens),
    )


def split_at(tokens: list[Token], first: int, last: int, mark: str) -> list[Range]:
    """Cut tokens at a mark outside brackets."""
    parts: list[Range] = []
    depth = 0
    start = first
    for index in range(first, last):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].text == mark:
            parts.append((start, index))
            start = index + 1
    return [*parts, (start, last)]


def conjunct_ranges(tokens: list[Token], first: int, last: int) -> tuple[Range, ...]:
    """Cut a predicate at its top-level ANDs; a predicate with a top-level OR stays whole."""
    parts: list[Range] = []
    depth = cases = betweens = 0
    start = first
    for index in range(first, last):
        token = tokens[index]
        depth += depth_change(token)
        if depth or token.kind is not TokenKind.WORD:
            continue
        if token.upper in ("CASE", "END"):
            cases += 1 if token.upper == "CASE" else -1
        elif cases:
            continue
        elif token.upper == "OR":
            return ((first, last),)
        elif token.upper == "BETWEEN":
            betweens += 1
        elif token.upper == "AND" and betweens:
            betweens -= 1
        elif token.upper == "AND":
            parts.append((start, index))
            start = index + 1
    return (*parts, (start, last))


def begins_clause(tokens: list[Token], index: int) -> bool:
    """Return whether a word is a clause keyword: no name after AS or a dot, no part of another."""
    token, before = tokens[index], tokens[index - 1].upper if index else ""
    if token.kind is not TokenKind.WORD or before in ("AS", "."):
        return False
    return (before, token.upper) not in (("DISTINCT", "FROM"), ("WITHIN", "GROUP"))


def _clause_starts(tokens: list[Token], first: int) -> dict[str, Range]:
    """Return each clause's range by its keyword."""
    found: list[tuple[str, int]] = []
    depth = 0
    for index in range(first, len(tokens)):
        token = tokens[index]
        depth += depth_change(token)
        if depth or token.upper not in _CLAUSES or not begins_clause(tokens, index):
            continue
        if token.upper in dict(found):
            continue
        found.append((token.upper, index))
    ends = [*(index for _, index in found), len(tokens)][1:]
    return {name: (index, end) for (name, index), end in zip(found, ends, strict=True)}
