"""Rewrites PostgreSQL's spellings in CREATE TABLE that DuckDB lacks.

``SERIAL`` and identity columns become a default from a sequence, ``jsonb`` becomes JSON, precisions
of timestamps are dropped (DuckDB keeps microseconds), lengths of texts become checks
(text_lengths.py). Pure and token-wise; session/engine_statements.py creates the sequences before
the statement runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.postgres_dialect.rewriting.text_lengths import text_length
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens

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
