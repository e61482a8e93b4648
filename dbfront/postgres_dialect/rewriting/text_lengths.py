"""``varchar(n)`` and ``char(n)``: DuckDB ignores n, so a recognisable CHECK keeps the length.

Pure. ``ddl.py`` writes the checks, ``sql/ddl/pg_catalog.sql`` shows lengths in place of the
constraints, and ``databases/duckdb_errors.py`` reports PostgreSQL's error for a longer text. The
checks call only ``length``: DuckDB must know the functions of a check for the recovery after a
kill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken
from tierkv.kvcore.errors import SqlError

_MOST: Final = 10_485_760
_VARYING: Final = frozenset({"VARCHAR"})
_FIXED: Final = frozenset({"CHAR", "CHARACTER", "BPCHAR", "NCHAR"})


@dataclass(frozen=True, slots=True)
class TextLength:
    """A text type with a length, as written.

    Attributes:
        kind: ``varchar`` or ``char``.
        characters: maximum length.
        words: number of tokens of the type.
    """

    kind: str
    characters: int
    words: int

    def check(self, column: str) -> str:
        """Return the length's constraint for a quoted ``column``; DuckDB keeps the spelling."""
        most = self.characters
        return f"CHECK (length({column}) <= {most} OR '{self.kind}({most})' IS NULL)"


def text_length(words: Sequence[SqlToken], first: int) -> TextLength | None:
    """Read a type at ``first``; None for another type, or an array.

    Raises:
        SqlError: 22023 for a length out of range.
    """
    at, kind = first, ""
    if _upper(words, at) == "NATIONAL":
        at += 1
    if _upper(words, at) in _FIXED:
        kind, at = "char", at + 1
        if _upper(words, at) == "VARYING":
            kind, at = "varchar", at + 1
    elif _upper(words, at) in _VARYING:
        kind, at = "varchar", at + 1
    if not kind or _upper(words, at) != "(" or not _upper(words, at + 1).isdigit():
        return None
    if _upper(words, at + 2) != ")" or _upper(words, at + 3) in ("[", "ARRAY"):
        return None
    characters = int(words[at + 1].text)
    if not 1 <= characters <= _MOST:
        bound = "at least 1" if characters < 1 else f"not above {_MOST}"
        raise SqlError(f"length for type {kind} must be {bound}", sqlstate="22023")
    return TextLength(kind, characters, at + 3 - first)


def _upper(words: Sequence[SqlToken], index: int) -> str:
    return words[index].upper if index < len(words) else ""
