"""The clauses of a plain SELECT as token ranges: select items, WHERE, ORDER BY, row limits.

Used for streaming and for ordering AI filters, which splice text. This module only reads tokens;
callers have checked with sqlglot's tree that the statement is one plain SELECT. In LIMIT, OFFSET
and FETCH FIRST a number or a parameter is understood, in brackets or cast to an integer: drivers
send parameters with a type, which the wire writes as a cast. Any other form (an expression, a share
of the rows, WITH TIES) is not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
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


_INTEGERS: Final = frozenset({"INT", "INTEGER", "BIGINT", "INT4", "INT8"})
_ROWS: Final = frozenset({"ROW", "ROWS"})


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Row limits of a SELECT.

    Attributes:
        limit: largest number of rows: a number, or the name of a parameter; None is no limit.
        offset: rows to skip.
    """

    limit: int | str | None = None
    offset: int | str = 0


def row_limits(
    tokens: Sequence[Token], first: int, last: int, parameter_name: Callable[[int], str]
) -> RowLimits | None:
    """Read the clauses in ``[first, last)``; None for clauses that are not understood.

    Args:
        tokens: tokens of the statement.
        first: LIMIT, OFFSET or FETCH.
        last: end of the clauses.
        parameter_name: returns the name of the parameter at a token; empty for other tokens.
    """
    return _LimitReader(tokens, first, last, parameter_name).read()


def number_of_rows(value: object) -> int | None:
    """Return a parameter's value as a number of rows; None for an invalid number."""
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


class _NotUnderstoodError(Exception):
    """Ends the reading; caught by ``_LimitReader.read``."""


@dataclass(slots=True)
class _LimitReader:
    tokens: Sequence[Token]
    at: int
    last: int
    parameter_name: Callable[[int], str]

    def read(self) -> RowLimits | None:
        found: dict[str, int | str | None] = {}
        try:
            while self.at < self.last:
                name, value = self._clause()
                if name in found:
                    return None
                found[name] = value
        except _NotUnderstoodError:
            return None
        return RowLimits(found.get("LIMIT"), found.get("OFFSET") or 0)

    def _clause(self) -> tuple[str, int | str | None]:
        if self._takes("LIMIT"):
            return "LIMIT", None if self._takes("ALL") else self._value()
        if self._takes("OFFSET"):
            value = self._value()
            self._takes(*_ROWS)
            return "OFFSET", value
        self._must("FETCH")
        self._must("FIRST", "NEXT")
        value = 1 if self._word in _ROWS else self._value()
        self._must(*_ROWS)
        self._must("ONLY")
        return "LIMIT", value

    def _value(self) -> int | str:
        value = self._plain_value()
        while self._takes("::"):
            self._must(*_INTEGERS)
        return value

    def _plain_value(self) -> int | str:
        if self._takes("("):
            value = self._value()
            self._must(")")
            return value
        if self._takes("CAST"):
            self._must("(")
            value = self._value()
            self._must("AS")
            self._must(*_INTEGERS)
            self._must(")")
            return value
        name, text = self.parameter_name(self.at), self._word
        if not name and not (text.isascii() and text.isdigit()):
            raise _NotUnderstoodError
        self.at += 1
        return name or int(text)

    @property
    def _word(self) -> str:
        return self.tokens[self.at].upper if self.at < self.last else ""

    def _takes(self, *words: str) -> bool:
        taken = self._word in words
        self.at += taken
        return taken

    def _must(self, *words: str) -> None:
        if not self._takes(*words):
            raise _NotUnderstoodError
