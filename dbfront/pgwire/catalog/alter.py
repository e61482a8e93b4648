"""ALTER TABLE where a column has, gets or loses the length of a text (text_lengths.py).

DuckDB adds no check to a table that is there, and changes no column that has one. So the table is
made again with other checks, its rows copied and its name taken over, all in one transaction. Where
an index or a foreign key hangs on a table, it can't be: then the length is not kept, as a NOTICE
says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dbfront.contracts import Notice, SqlSession, StatementResult
from dbfront.pgwire.catalog.text_lengths import TextLength, text_length
from dbfront.pgwire.sql_tokens import Token, tokens
from kvcore.errors import FeatureNotSupportedError

Params = Sequence[Any] | Mapping[str, Any] | None

_FIND: Final = """
SELECT database_name, schema_name, table_name, sql, comment,
       (SELECT count(*) FROM duckdb_indexes() i WHERE i.table_oid = t.table_oid)
       + (SELECT count(*) FROM duckdb_constraints() f
                      WHERE f.referenced_table = t.table_name AND f.schema_name = t.schema_name
                        AND f.database_name = t.database_name),
       (SELECT first(k.constraint_text) FROM duckdb_constraints() k
        WHERE k.table_oid = t.table_oid AND k.constraint_type = 'CHECK'
          AND len(k.constraint_column_names) = 1
          AND lower(k.constraint_column_names[1]) = lower({column})
          AND tierkv_pg.main.own_is_length(k.expression)),
       (SELECT first(c.column_name) FROM duckdb_columns() c
        WHERE c.table_oid = t.table_oid AND lower(c.column_name) = lower({column})),
       (SELECT list([c.column_name, c.comment]) FROM duckdb_columns() c
        WHERE c.table_oid = t.table_oid AND c.comment IS NOT NULL)
FROM duckdb_tables() t
WHERE lower(table_name) = lower({table}) AND database_name IN (current_database(), 'temp')
  AND ({schema} = '' OR lower(schema_name) = lower({schema}))
  AND (list_contains(current_schemas(true), schema_name) OR {schema} <> '' OR temporary)
ORDER BY NOT temporary, list_position(current_schemas(true), schema_name) LIMIT 1
"""
_NEW: Final = "tierkv_altered"


@dataclass(frozen=True, slots=True)
class _Change:
    """What a statement does to a column's type.

    Attributes:
        table: names as written, unquoted, outermost first.
        column: its name, unquoted.
        adds: the column is new; else its type changes.
        length: of the new type; None if it has none.
    """

    table: tuple[str, ...]
    column: str
    adds: bool
    length: TextLength | None


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the database, and the column that is changed.

    Attributes:
        name: quoted and qualified.
        new_name: the same of the one that takes its place.
        plain_name: quoted only.
        create: CREATE [TEMP] TABLE.
        body: columns and constraints in parentheses, as DuckDB writes them.
        comments: of the table, by an empty name, and of columns.
        can_be_made_again: nothing hangs on it that would be lost.
        check: the constraint that keeps the column's length; empty if there is none.
        column: quoted; empty if there is none of that name.
    """

    name: str
    new_name: str
    plain_name: str
    create: str
    body: str
    comments: dict[str, str]
    can_be_made_again: bool
    check: str
    column: str


def without_only(sql: str) -> str:
    """``ALTER TABLE [IF EXISTS] ONLY t`` without ONLY: no table has others below it."""
    words = tokens(sql)[:5]
    only = next((word for word in words[2:] if word.upper == "ONLY"), None)
    if only is None or [word.upper for word in words[:2]] != ["ALTER", "TABLE"]:
        return sql
    return sql[: only.start] + " " * (only.end - only.start) + sql[only.end :]


async def alter_text_length(inner: SqlSession, sql: str, params: Params) -> StatementResult | None:
    """Run an ALTER TABLE that concerns a text's length; None if this is another statement."""
    change = _read(sql)
    if change is None:
        return None
    table = await _find(inner, change)
    if table is None or (change.adds and table.column):
        return None
    if change.length is None and not table.check:
        return None
    if inner.transaction_status != "I":
        return await _run(inner, sql, params, change, table)
    await inner.execute("BEGIN TRANSACTION")
    try:
        result = await _run(inner, sql, params, change, table)
        await inner.execute("COMMIT")
    except BaseException:
        if inner.transaction_status != "I":
            await inner.execute("ROLLBACK")
        raise
    return result


async def _run(
    inner: SqlSession, sql: str, params: Params, change: _Change, table: _Table
) -> StatementResult:
    if table.check and not table.can_be_made_again:
        raise FeatureNotSupportedError(
            f"the type of column {table.column} can't be changed: an index, a generated column or "
            "a foreign key hangs on its table",
            hint="Drop the table's indexes, alter the column, and create them again; else make a "
            "new table, INSERT ... SELECT the rows, DROP the old one, RENAME the new one.",
        )
    if table.check:
        await _make_again(inner, table, "")
    result = await inner.execute(sql, params)
    if change.length is None:
        return result
    found = await _find(inner, change)
    assert found is not None and found.column, "it was altered"
    if not found.can_be_made_again:
        notice = Notice(
            "NOTICE",
            f"the length of column {found.column} is not kept: an index, a generated column or a "
            "foreign key hangs on its table",
            sqlstate="0A000",
        )
        return replace(result, notices=(*result.notices, notice))
    await _make_again(inner, found, change.length.check(found.column))
    return result


async def _make_again(inner: SqlSession, table: _Table, check: str) -> None:
    """Put a table in a table's place that has another check on the column, or none."""
    body = table.body.replace(f", {table.check}", "", 1) if table.check else table.body
    if check:
        body = f"{body[:-1]}, {check})"
    await inner.execute(f"{table.create} {table.new_name}{body}")
    await inner.execute(f"INSERT INTO {table.new_name} SELECT * FROM {table.name}")
    await inner.execute(f"DROP TABLE {table.name}")
    await inner.execute(f"ALTER TABLE {table.new_name} RENAME TO {table.plain_name}")
    for column, comment in table.comments.items():
        what = f"COLUMN {table.name}.{_quoted(column)}" if column else f"TABLE {table.name}"
        await inner.execute(f"COMMENT ON {what} IS {_literal(comment)}")


async def _find(inner: SqlSession, change: _Change) -> _Table | None:
    schema, table = change.table[-2] if len(change.table) > 1 else "", change.table[-1]
    asked = _FIND.format(
        column=_literal(change.column), table=_literal(table), schema=_literal(schema)
    )
    rows = (await inner.execute(asked)).rows
    if not rows:
        return None
    database, schema, table, sql, comment, hanging, check, column, comments = rows[0]
    opening = next(token.start for token in tokens(sql) if token.text == "(")
    before = ".".join(map(_quoted, (database, schema)))
    return _Table(
        name=f"{before}.{_quoted(table)}",
        new_name=f"{before}.{_NEW}",
        plain_name=_quoted(table),
        create="CREATE TEMP TABLE" if database == "temp" else "CREATE TABLE",
        body=sql[opening:].rstrip().rstrip(";"),
        comments=({"": comment} if comment else {}) | dict(comments or []),
        can_be_made_again=not hanging and "GENERATED ALWAYS" not in sql,
        check=check or "",
        column=_quoted(column) if column else "",
    )


def _read(sql: str) -> _Change | None:
    """Understand ``ALTER TABLE t ADD c type`` and ``ALTER TABLE t ALTER c TYPE type``."""
    words = [token for token in tokens(sql) if token.text != ";"]
    at = 2
    if [word.upper for word in words[:at]] != ["ALTER", "TABLE"]:
        return None
    at = _skip(words, at, "IF", "EXISTS")
    table = []
    while at < len(words):
        table.append(words[at].name)
        if at + 1 >= len(words) or words[at + 1].text != ".":
            break
        at += 2
    at += 1
    verb = words[at].upper if at < len(words) else ""
    if verb not in ("ADD", "ALTER"):
        return None
    at = _skip(words, at + 1, "COLUMN")
    at = _skip(words, at, "IF", "NOT", "EXISTS")
    if at >= len(words):
        return None
    column, at = words[at].name, at + 1
    if verb == "ALTER":
        typed = _skip(words, _skip(words, at, "SET", "DATA"), "TYPE")
        if typed == at:
            return None
        at = typed
    length = text_length(words, at)
    if verb == "ADD" and length is None:
        return None
    return _Change(tuple(table), column, verb == "ADD", length)


def _skip(words: Sequence[Token], at: int, *keywords: str) -> int:
    """Step over some keywords, if all of them are there."""
    there = tuple(word.upper for word in words[at : at + len(keywords)])
    return at + len(keywords) if there == keywords else at


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
