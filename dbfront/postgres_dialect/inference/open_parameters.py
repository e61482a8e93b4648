"""Types of parameters without a declaration or cast, from the columns that the parameters meet.

PostgreSQL infers the types while parsing; DuckDB does not report its own inference. Drivers rely on
the types: asyncpg sends integers as integers only to an integer parameter, JDBC sends dates and
timestamps with an offset and without a type. pgwire/conversation/extended_query.py calls
``infer_types`` before describing a statement. A statement that sqlglot parses is walked as a tree.
Any other statement is read token by token: a parameter that is inserted into a column by itself, or
compared with a column, has the column's type.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.postgres_dialect.inference.parsing import TableColumns, parsed, tables_sql
from tierkv.dbfront.postgres_dialect.inference.statements import parameter_types
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.dbfront.postgres_values.types import PgType, by_name, pg_type

_COMPARES: Final = frozenset({"=", "<>", "!=", "<", ">", "<=", ">="})
_BEFORE_TABLE: Final = frozenset({"FROM", "JOIN", "UPDATE", "INTO"})
_ENDS: Final = frozenset({")", ",", ";", ""})
_BEFORE_COLUMN: Final = frozenset({"(", ","})
_NOT_COLUMNS: Final = frozenset({"AND", "OR", "NOT", "WHERE", "ON", "WHEN", "THEN", "ELSE", "IN"})


@dataclass(slots=True)
class ParameterUses:
    """The places of parameters in a statement.

    Attributes:
        tables: names after FROM, JOIN, UPDATE and INTO: schema (or empty) and table.
        columns: name of the column that parameter ``n`` meets.
        positions: position in the table of the INSERT, from 0.
        counts: parameters of LIMIT and OFFSET.
    """

    tables: set[tuple[str, str]] = field(default_factory=set)
    columns: dict[int, str] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)


def parameter_uses(sql: str) -> ParameterUses:
    """Find the columns that the parameters of one statement are compared with or inserted into."""
    uses, words = ParameterUses(), tokens(sql)
    for at, word in enumerate(words):
        if word.upper in _BEFORE_TABLE:
            _table(uses, words, at + 1)
        elif word.parameter:
            _parameter(uses, words, at)
    if words and words[0].upper == "INSERT":
        _insert(uses, words)
    return uses


def _text(words: Sequence[SqlToken], at: int) -> str:
    return words[at].upper if 0 <= at < len(words) else ""


def _is_name(words: Sequence[SqlToken], at: int) -> bool:
    if not 0 <= at < len(words) or words[at].kind not in ("word", "ident"):
        return False
    return words[at].kind == "ident" or words[at].upper not in _NOT_COLUMNS


def _table(uses: ParameterUses, words: Sequence[SqlToken], at: int) -> None:
    if not _is_name(words, at):
        return
    names = [words[at].name]
    while _text(words, at + 1) == "." and _is_name(words, at + 2):
        names.append(words[at + 2].name)
        at += 2
    if _text(words, at + 1) != "(" or _text(words, at - 2 * len(names) + 1) == "INTO":
        uses.tables.add((names[-2] if len(names) > 1 else "", names[-1]))


def _column_ending_at(words: Sequence[SqlToken], at: int) -> str:
    """Return the column whose name ends at ``at``; '' if the column is part of a computation."""
    if not _is_name(words, at):
        return ""
    name = words[at].name
    while _text(words, at - 1) == "." and _is_name(words, at - 2):
        at -= 2
    before = words[at - 1] if at else None
    alone = before is None or before.kind == "word" or before.text in _BEFORE_COLUMN
    return name if alone else ""


def _parameter(uses: ParameterUses, words: Sequence[SqlToken], at: int) -> None:
    number, before = words[at].parameter, _text(words, at - 1)
    after = words[at + 1] if at + 1 < len(words) else None
    if after is not None and after.kind == "symbol" and after.text not in _ENDS:
        return  # part of a computation
    column = ""
    if before in ("LIMIT", "OFFSET"):
        uses.counts.add(number)
    elif before in _COMPARES or before == "BETWEEN":
        column = _column_ending_at(words, at - 2)
    elif before == "AND" and _text(words, at - 3) == "BETWEEN" and words[at - 2].parameter:
        column = _column_ending_at(words, at - 4)
    else:
        column = _in_list(words, at)
    if column:
        uses.columns.setdefault(number, column)


def _in_list(words: Sequence[SqlToken], at: int) -> str:
    """Return the column of ``column [NOT] IN ($1, $2)``."""
    while _text(words, at - 1) == "," and words[at - 2].parameter:
        at -= 2
    if (_text(words, at - 2), _text(words, at - 1)) != ("IN", "("):
        return ""
    return _column_ending_at(words, at - (4 if _text(words, at - 3) == "NOT" else 3))


def _insert(uses: ParameterUses, words: Sequence[SqlToken]) -> None:
    """Read ``INSERT INTO t [(a, b)] VALUES ($1, $2), ($3, $4)``."""
    start = next((at for at, word in enumerate(words) if word.upper == "VALUES"), len(words))
    opening = next((at for at in range(start) if words[at].text == "("), None)
    names = [] if opening is None else [w.name for w in words[opening:start] if _listed(w)]
    depth, place = 0, 0
    for at in range(start + 1, len(words)):
        text = words[at].text
        if depth == 0 and text not in ("(", ","):
            return
        if text in ("(", ")"):
            depth += 1 if text == "(" else -1
            place = 0 if depth == 1 and text == "(" else place
        elif depth == 1 and text == ",":
            place += 1
        elif depth == 1 and words[at].parameter and _alone(words, at):
            _inserted(uses, words[at].parameter, place, names)


def _alone(words: Sequence[SqlToken], at: int) -> bool:
    return _text(words, at - 1) in ("(", ",") and _text(words, at + 1) in (")", ",")


def _listed(word: SqlToken) -> bool:
    return word.kind in ("word", "ident")


def _inserted(uses: ParameterUses, number: int, place: int, names: Sequence[str]) -> None:
    if not names:
        uses.positions.setdefault(number, place)
    elif place < len(names):
        uses.columns.setdefault(number, names[place])


def lookup_sql(uses: ParameterUses) -> str:
    """Return a query for the columns of the tables: column, type, position from 1."""
    tests = []
    for schema, table in sorted(uses.tables):
        test = f"lower(table_name) = lower({_literal(table)})"
        tests.append(
            f"({test} AND lower(schema_name) = lower({_literal(schema)}))" if schema else test
        )
    return (
        "SELECT column_name, data_type, column_index FROM duckdb_columns() "
        f"WHERE database_name IN (current_database(), 'temp') AND ({' OR '.join(tests)})"
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def inferred_types(uses: ParameterUses, rows: Iterable[Sequence[object]]) -> dict[int, str]:
    """Return the DuckDB type per parameter; a name with columns of two types is skipped."""
    by_name: dict[str, set[str]] = {}
    by_place: dict[int, set[str]] = {}
    for name, kind, place in rows:
        by_name.setdefault(str(name).lower(), set()).add(str(kind))
        by_place.setdefault(int(str(place)) - 1, set()).add(str(kind))
    found = dict.fromkeys(uses.counts, "BIGINT")
    for number, name in uses.columns.items():
        if len(kinds := by_name.get(name.lower(), set())) == 1:
            found[number] = next(iter(kinds))
    for number, place in uses.positions.items():
        if len(kinds := by_place.get(place, set())) == 1:
            found[number] = next(iter(kinds))
    return found


Rows = Callable[[str], Awaitable[Iterable[Sequence[object]]]]
"""Runs an internal query."""


async def infer_types(sql: str, rows: Rows) -> dict[int, PgType]:
    """Return the inferable types of parameters, by number."""
    tree = parsed(sql)
    if tree is None:
        return await _by_tokens(sql, rows)
    tables = TableColumns()
    if query := tables_sql(tree):
        tables.add(await rows(query))
    found = {number: by_name(name) for number, name in parameter_types(tree, tables).items()}
    return {number: kind for number, kind in found.items() if kind is not None}


async def _by_tokens(sql: str, rows: Rows) -> dict[int, PgType]:
    uses = parameter_uses(sql)
    found: Iterable[Sequence[object]] = ()
    if uses.tables and (uses.columns or uses.positions):
        found = await rows(lookup_sql(uses))
    kinds = inferred_types(uses, found)
    return {number: pg_type(name) for number, name in kinds.items()}
