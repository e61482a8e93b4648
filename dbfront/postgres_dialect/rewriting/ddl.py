"""Rewrites CREATE TABLE and ALTER TABLE in PostgreSQL's spelling; pure and token-wise.

``SERIAL`` and identity columns become a default from a sequence, ``jsonb`` becomes JSON, and
precisions of timestamps are dropped (DuckDB keeps microseconds). DuckDB ignores the length of
``varchar(n)`` and ``char(n)``, so a recognisable CHECK keeps the length: sql/ddl/pg_catalog.sql
shows lengths in place of these constraints, and databases/duckdb_errors.py reports PostgreSQL's
error for a longer text. The checks call only ``length``, because DuckDB must know the functions of
a check for the recovery after a kill. DuckDB adds no check to an existing table, so an added column
keeps no length.

session/engine_statements.py creates the sequences before the statement runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import SqlError

_SERIAL: Final = {
    "SERIAL": "INTEGER",
    "SERIAL4": "INTEGER",
    "BIGSERIAL": "BIGINT",
    "SERIAL8": "BIGINT",
    "SMALLSERIAL": "SMALLINT",
    "SERIAL2": "SMALLINT",
}
_TIMES: Final = frozenset({"TIMESTAMP", "TIMESTAMPTZ", "TIME", "TIMETZ"})
_TYPES: Final = {"JSONB": "JSON"}


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A rewritten CREATE TABLE.

    Attributes:
        sql: the text to run.
        schema: as written, unquoted; empty for the current schema.
        table: unquoted.
        sequences: quoted, qualified names of the required sequences, with their options.
    """

    sql: str
    schema: str
    table: str
    sequences: tuple[tuple[str, str], ...]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class _Definition:
    """One pass over the column list."""

    def __init__(self, sql: str, words: list[SqlToken], opening: int) -> None:
        self.sql = sql
        self.words = words
        dotted = opening >= 2 and words[opening - 2].text == "."
        self.schema = words[opening - 3].name if dotted else ""
        self.table = words[opening - 1].name
        self.edits: list[tuple[int, int, str]] = []
        self.sequences: list[tuple[str, str]] = []
        self._column = ""

    def upper(self, index: int) -> str:
        return self.words[index].upper if index < len(self.words) else ""

    def replace(self, first: int, last: int, text: str) -> None:
        self.edits.append((self.words[first].start, self.words[last].end, text))

    def default(self, options: str = "") -> str:
        """Return a default from the column's own sequence."""
        name = _quoted(f"{self.table}_{self._column}_seq")
        full = f"{_quoted(self.schema)}.{name}" if self.schema else name
        self.sequences.append((full, options))
        return f"DEFAULT nextval('{full.replace(chr(39), chr(39) * 2)}')"

    def read(self, opening: int) -> None:
        """Read the columns; ``opening`` is the parenthesis before the first column."""
        depth, starts = 0, False
        for index in range(opening, len(self.words)):
            text = self.words[index].text
            if text == "(" or text == ")":
                depth += 1 if text == "(" else -1
                starts = depth == 1 and text == "("
            elif depth == 1 and text == ",":
                starts = True
            elif depth == 1 and starts:
                self._column, starts = self.words[index].name, False
                self._length(index)
            elif depth == 1:
                self._word(index)

    def _length(self, index: int) -> None:
        """Add a check after ``v varchar(20) [COLLATE c]``."""
        length = text_length(self.words, index + 1)
        if length is None:
            return
        last = index + length.words
        check = length.check(_quoted(self._column))
        if self.upper(last + 1) == "COLLATE" and last + 2 < len(self.words):
            self.replace(index + 1, last, "VARCHAR")
            end = self.words[last + 2].end
            self.edits.append((end, end, f" {check}"))
        else:
            self.replace(index + 1, last, f"VARCHAR {check}")

    def _word(self, index: int) -> None:
        word = self.upper(index)
        if word in _SERIAL and self.words[index - 1].name == self._column:
            self.replace(index, index, f"{_SERIAL[word]} {self.default()}")
        elif word in _TYPES:
            self.replace(index, index, _TYPES[word])
        elif word in _TIMES and self.upper(index + 1) == "(" and self.upper(index + 3) == ")":
            self.replace(index + 1, index + 3, "")
        elif word == "GENERATED":
            self._identity(index)

    def _identity(self, index: int) -> None:
        """Rewrite ``GENERATED { ALWAYS | BY DEFAULT } AS IDENTITY [ ( options ) ]``."""
        at = index + (2 if self.upper(index + 1) == "ALWAYS" else 3)
        if (self.upper(at), self.upper(at + 1)) != ("AS", "IDENTITY"):
            return
        last, options = at + 1, ""
        if self.upper(last + 1) == "(":
            close = next(
                (i for i in range(last + 2, len(self.words)) if self.words[i].text == ")"), last + 1
            )
            options = self.sql[self.words[last + 1].end : self.words[close].start].strip()
            last = close
        self.replace(index, last, self.default(options))

    def result(self) -> str:
        parts, at = [], 0
        for start, end, text in self.edits:
            parts += [self.sql[at:start], text]
            at = end
        return "".join(parts) + self.sql[at:]


def rewrite_create(sql: str) -> TableDefinition | None:
    """Rewrite a CREATE TABLE; None for other statements, or if nothing needs rewriting."""
    words = [token for token in tokens(sql) if token.text != ";"]
    verbs = [word.upper for word in words[:6]]
    if verbs[:1] != ["CREATE"] or "TABLE" not in verbs:
        return None
    opening = next((i for i, word in enumerate(words) if word.text == "("), 0)
    if opening < 2 or any(word.upper == "AS" for word in words[:opening]):
        return None
    definition = _Definition(sql, words, opening)
    definition.read(opening)
    if not definition.edits:
        return None
    return TableDefinition(
        definition.result(), definition.schema, definition.table, tuple(definition.sequences)
    )


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
        f'the length of column "{words[column].name}" is ignored: DuckDB can\'t add a constraint '
        "to an existing table",
        sqlstate="0A000",
    )


def _skip(words: Sequence[SqlToken], at: int, *keywords: str) -> int:
    """Skip the keywords, if all of the keywords are present."""
    there = tuple(word.upper for word in words[at : at + len(keywords)])
    return at + len(keywords) if there == keywords else at


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
