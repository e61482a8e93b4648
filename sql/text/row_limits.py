"""LIMIT, OFFSET and FETCH FIRST of one SELECT, read from its tokens.

A number or a parameter is understood, in brackets or cast to an integer: drivers send parameters
with a type, which the wire writes as a cast. Any other form (an expression, a share of the rows,
WITH TIES) is not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from tierkv.sql.text.lexer import Token

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
    return _Reader(tokens, first, last, parameter_name).read()


def number_of_rows(value: object) -> int | None:
    """Return a parameter's value as a number of rows; None for an invalid number."""
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


class _NotUnderstoodError(Exception):
    """Ends the reading; never leaves this module."""


@dataclass(slots=True)
class _Reader:
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
