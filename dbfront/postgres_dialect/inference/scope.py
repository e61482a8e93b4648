"""The columns visible to a query and their types: tables, subqueries and WITH queries in scope.

statements.py creates a ``Scope`` per query level. Types are PostgreSQL's names; ``tables_sql`` and
``TableColumns`` read the columns of tables from the engine's catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from tierkv.dbfront.postgres_dialect.inference.signatures import TypeName
from tierkv.dbfront.postgres_values.types import pg_type

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
