"""lastval() and currval(): the values that this session's statements drew from sequences.

The engine keeps the last value of a sequence for all sessions. The value that an INSERT gives a
serial column is therefore read with RETURNING and kept here. INSERT ... SELECT may write many rows:
its value is only kept if the client itself asks for it with RETURNING; otherwise currval() returns
the engine's value. session/engine_statements.py and
session/preparation.py use the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from tierkv.dbfront.postgres_dialect.rewriting.rewriter import ENGINE_SCHEMA, PUBLIC, Rewriter
from tierkv.dbfront.postgres_values.sql_tokens import tokens
from tierkv.dbfront.sql_session import SqlSession
from tierkv.dbfront.statement_results import StatementResult
from tierkv.kvcore.errors import SqlError

_NAME: Final = r'(?:"(?:[^"]|"")+"|\w+)'
_INSERT: Final = re.compile(
    rf"\s*INSERT\s+INTO\s+(?P<table>{_NAME}(?:\s*\.\s*{_NAME})*)\s*(?:AS\s+{_NAME}\s*)?"
    r"(?P<columns>\([^()]*\))?\s*(?P<source>VALUES|DEFAULT\s+VALUES|SELECT|WITH)\b",
    re.IGNORECASE,
)
_DEFAULT: Final = re.compile(r"nextval\('((?:[^']|'')+)'\)")
_NEXT: Final = re.compile(r"\s*SELECT\s+(?:pg_catalog\.)?nextval\s*\(\s*'([^']+)'", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SerialColumn:
    """A column whose default draws from a sequence."""

    name: str
    sequence: str


def _plain(sequence: str) -> str:
    """Return a sequence's own name, without schema and quotes."""
    return sequence.rsplit(".", 1)[-1].strip('"')


class SequenceValues:
    """The values of one session; only ``note`` and ``note_query`` change the values."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._last: int | None = None
        self._serial: dict[str, SerialColumn | None] = {}

    def forget_tables(self) -> None:
        """Drop the cached serial columns: a table may have changed."""
        self._serial.clear()

    def literals(self, lowered: str) -> dict[str, str]:
        """Return facts for the rewriting of a statement, which is given in lower case.

        Raises:
            SqlError: 55000, the statement asks for a last value that does not exist.
        """
        found: dict[str, str] = {}
        if "lastval" in lowered and re.search(r"\blastval\s*\(", lowered):
            if self._last is None:
                raise SqlError("lastval is not yet defined in this session", sqlstate="55000")
            found["lastval()"] = f"{self._last}::BIGINT"
        if "currval" in lowered and self._values:
            pairs = (
                f"'{name.replace(chr(39), chr(39) * 2)}': {value}"
                for key, value in self._values.items()
                for name in (key, f"{ENGINE_SCHEMA}.{key}", f"{PUBLIC}.{key}")
            )
            found["currval"] = f"MAP {{{', '.join(pairs)}}}"
        return found

    def note(self, sequence: str, value: Any) -> None:
        """Store a drawn value."""
        if isinstance(value, int):
            self._values[_plain(sequence)] = self._last = value

    def note_query(self, sql: str, result: StatementResult) -> None:
        """Store the value that ``SELECT nextval('s')`` drew."""
        drawn = _NEXT.match(sql)
        if drawn is not None and result.rows:
            self.note(drawn[1], result.rows[-1][0])

    async def serial_insert(
        self, inner: SqlSession, sql: str, *, of_query: bool
    ) -> SerialColumn | None:
        """Return the column that an INSERT of values, or ``of_query``, leaves to a sequence."""
        match = _INSERT.match(sql)
        if match is None or inner.transaction_status == "E":
            return None
        source = match["source"].upper()
        if source in ("SELECT", "WITH") and not of_query:
            return None
        table = match["table"]
        if table not in self._serial:
            self._serial[table] = await _look_up(inner, table)
        column = self._serial[table]
        if column is None or source.startswith("DEFAULT"):
            return column
        if match["columns"] is None:
            return None
        given = {token.name.lower() for token in tokens(match["columns"][1:-1])}
        return None if column.name.lower() in given else column


async def _look_up(inner: SqlSession, table: str) -> SerialColumn | None:
    quoted = table.replace("'", "''")
    asked = f"SELECT name, dflt_value FROM pragma_table_info('{quoted}')"
    # If the table does not exist, the INSERT itself fails with a better message.
    known = "SELECT 1 FROM duckdb_tables() WHERE table_name = '{}'"
    name = tokens(table)[-1].name.replace("'", "''")
    if not (await inner.execute(known.format(name))).rows:
        return None
    for column, default in (await inner.execute(asked)).rows:
        drawn = _DEFAULT.match(str(default))
        if drawn is not None:
            return SerialColumn(column, drawn[1])
    return None


def returning(sql: str, column: SerialColumn) -> str:
    """Return the INSERT with a RETURNING of the drawn values."""
    name = column.name.replace('"', '""')
    return f'{sql.rstrip().rstrip(";")}\nRETURNING "{name}"'


def current_value(r: Rewriter, first: int) -> int:
    """Rewrite ``currval('s')``: the session's value if the session drew one, else the engine's."""
    i = first + 2 if (r.at(first), r.at(first + 1)) == ("pg_catalog", ".") else first
    values = r.literals.get("currval")
    if values is None or r.at(i) != "currval" or r.at(i + 1) != "(":
        return 0
    end = r.closing(i + 1)
    inner = r.nested(r.sql[r.tokens[i + 1].end : r.tokens[end].start])
    call = f"{values}[replace({inner}, '\"', '')]"
    if end == i + 3 and r.tokens[i + 2].kind == "string":
        engine = re.sub(rf"^'{PUBLIC}\.", f"'{ENGINE_SCHEMA}.", r.tokens[i + 2].text)
        call = f"coalesce({call}, currval({engine}))"
    return r.replace(first, end + 1 - first, call)
