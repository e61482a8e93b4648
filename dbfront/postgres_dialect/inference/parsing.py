"""A statement as sqlglot's tree with every call as written, and the meaning of its nodes.

column_names.py names columns from the tree, origins.py finds their tables, and statements.py infers
types of parameters. The tree of a text is cached and must not be changed.

A ``Scope`` has the columns visible to a query and their types: tables, subqueries and WITH queries.
statements.py creates one per query level. Types are PostgreSQL's names; ``tables_sql`` and
``TableColumns`` read the columns of tables from the engine's catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError

from tierkv.dbfront.postgres_dialect.inference.signatures import TypeName
from tierkv.dbfront.postgres_values.sql_tokens import SqlToken, tokens
from tierkv.dbfront.postgres_values.types import pg_type

PARAMETER: Final = "tierkv_parameter_"
"""Prefix of the column name that replaces ``$1`` in the parsed text."""

_MAX_PARSED_CHARS: Final = 8_192
"""Longer statements are mostly lists of VALUES; open_parameters.py types them faster by tokens."""
_QUERY_WORDS: Final = frozenset({"SELECT", "WITH", "VALUES", "INSERT", "UPDATE", "DELETE", "MERGE"})
_OWN_SYNTAX: Final = frozenset({"CAST", "TRY_CAST", "EXTRACT", "POSITION", "SUBSTRING", "TRIM"})
_MARK: Final = "?"
_PREFIXED: Final = frozenset({"EXPLAIN", "DECLARE"})
_CAST_NAMES: Final = {
    "BPCHAR": "bpchar", "CHAR": "bpchar", "VARCHAR": "varchar", "JSONB": "jsonb", "INT": "int4",
    "TEXT": "text", "STRING": "text", "BYTEA": "bytea", "SERIAL": "int4", "BIGSERIAL": "int8",
}  # fmt: skip


class _PlainCalls(Postgres):
    """PostgreSQL's grammar, with every function call left as written."""

    class Parser(Postgres.Parser):  # type: ignore[misc,valid-type]
        FUNCTIONS: Any = {}
        FUNCTION_PARSERS: Any = {
            name: parse
            for name, parse in Postgres.Parser.FUNCTION_PARSERS.items()
            if name in _OWN_SYNTAX
        }


@lru_cache(maxsize=256)
def parsed(sql: str) -> exp.Expr | None:
    """Parse a statement; None if too long or not understood. The tree must not be changed."""
    if len(sql) > _MAX_PARSED_CHARS:
        return None
    words = tokens(sql)
    tree = _tree(sql, words)
    if tree is None and any(word.text == _MARK for word in words):
        tree = _tree(sql, words, marks=True)
    return tree


def _tree(sql: str, words: Sequence[SqlToken], *, marks: bool = False) -> exp.Expr | None:
    """Parse with ``$1`` as a column; ``marks``: each ``?`` is a parameter, not an operator."""
    parts: list[str] = []
    at, count = _start(words), 0
    for token in words:
        count += marks and token.text == _MARK
        number = token.parameter or (count if marks and token.text == _MARK else 0)
        if number:
            parts += [sql[at : token.start], f"{PARAMETER}{number}"]
            at = token.end
    try:
        return _PlainCalls().parse("".join(parts) + sql[at:])[0]
    except (SqlglotError, RecursionError, TypeError, AttributeError, IndexError):
        return None  # sqlglot fails on odd text; types are optional


def _start(words: Sequence[SqlToken]) -> int:
    """Return the start of the query of EXPLAIN or DECLARE, else 0."""
    if not words or words[0].upper not in _PREFIXED:
        return 0
    return next((word.start for word in words[1:] if word.upper in _QUERY_WORDS), 0)


def parameter_number(node: object) -> int:
    """Return ``n`` if a node is the parameter ``$n``, else 0."""
    if isinstance(node, exp.Column):
        node = None if node.table else node.this
    name = node.name if isinstance(node, exp.Identifier) else ""
    number = name.removeprefix(PARAMETER)
    return int(number) if number != name and number.isdecimal() else 0


def cast_kind(target: exp.Expr | None) -> str | None:
    """Return PostgreSQL's name of the type in a cast; None if the wire has no such type."""
    if not isinstance(target, exp.DataType):
        return None
    if target.this == exp.DataType.Type.ARRAY:
        element = cast_kind(target.expressions[0]) if target.expressions else None
        return None if element is None or element.startswith("_") else f"_{element}"
    name = target.this.value if isinstance(target.this, exp.DataType.Type) else str(target.this)
    if name in _CAST_NAMES:
        return _CAST_NAMES[name]
    kind = pg_type(target.sql("postgres").partition("(")[0])
    found = kind if kind.name != "text" else pg_type(target.sql("duckdb").partition("(")[0])
    return None if found.name == "text" else found.name


Columns = Mapping[str, TypeName]
"""Columns of a relation by lower-case name, in order."""

_NO_COLUMNS: Final[Columns] = {}


@dataclass(slots=True)
class TableColumns:
    """Columns of a statement's tables, by schema and name, and by name alone."""

    by_name: dict[tuple[str, str], dict[str, TypeName]] = field(default_factory=dict)

    def add(self, rows: Iterable[Sequence[object]]) -> None:
        """Add rows of ``tables_sql``."""
        for schema, table, column, kind in rows:
            for key in ((str(schema).lower(), str(table).lower()), ("", str(table).lower())):
                columns = self.by_name.setdefault(key, {})
                columns.setdefault(str(column).lower(), pg_type(str(kind)).name)

    def of(self, table: exp.Table) -> Columns:
        """Return a table's columns; none if the table is unknown."""
        schema = "main" if table.db.lower() in ("public", "pg_catalog") else table.db.lower()
        return self.by_name.get((schema, table.name.lower()), _NO_COLUMNS)


def tables_sql(tree: exp.Expr) -> str:
    """Return a query for the columns of a statement's tables; empty if no table is named."""
    names = {t.name.lower() for t in tree.find_all(exp.Table) if isinstance(t.this, exp.Identifier)}
    if not names:
        return ""
    listed = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted(names))
    return (
        "SELECT schema_name, table_name, column_name, data_type FROM duckdb_columns() "
        "WHERE database_name IN (current_database(), 'temp', 'tierkv_pg') "
        f"AND lower(table_name) IN ({listed}) ORDER BY database_name <> 'temp', "
        "database_name <> current_database(), schema_name <> current_schema(), schema_name, "
        "table_name, column_index"
    )


@dataclass(slots=True)
class Scope:
    """The meaning of names inside one query.

    Attributes:
        outer: the enclosing scope, for correlated subqueries.
        queries: WITH queries by lower-case name.
        relations: items of FROM by lower-case alias.
    """

    outer: Scope | None = None
    queries: dict[str, Columns] = field(default_factory=dict)
    relations: dict[str, Columns] = field(default_factory=dict)

    def query(self, name: str) -> Columns | None:
        """Return the columns of a WITH query, searching from this scope outwards."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.queries:
                return scope.queries[name]
            scope = scope.outer
        return None

    def column(self, table: str, name: str) -> TypeName:
        """Return a column's type, from the first relation with the name; None if unknown."""
        scope: Scope | None = self
        while scope is not None:
            relations = scope.relations
            near = [relations[table]] if table in relations else []
            for columns in near if table else relations.values():
                if name in columns:
                    return columns[name]
            scope = scope.outer
        return None

    def star(self, table: str) -> dict[str, TypeName]:
        """Return the columns of ``*`` or ``table.*``."""
        found: dict[str, TypeName] = {}
        for name, columns in self.relations.items():
            if table in ("", name):
                found |= columns
        return found
