"""The columns of PostgreSQL's catalogs that are empty here.

rewrite.py replaces each catalog that sql/ddl/pg_catalog*.sql do not define by an empty query. A
client's query then finds every column it names, and no view has to be created. The columns are read
once from sql/ddl/pg_catalog_shapes.txt.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_TYPES: Final = {
    "b": "BOOLEAN",
    "s": "SMALLINT",
    "i": "INTEGER",
    "l": "BIGINT",
    "f": "FLOAT",
    "d": "DOUBLE",
    "o": "BIGINT",
    "t": "VARCHAR",
    "y": "BLOB",
    "z": "TIMESTAMPTZ",
    "v": "INTERVAL",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """One catalog; the names of information_schema have the prefix ``information_schema.``.

    Attributes:
        oid: PostgreSQL's fixed OID of a table; 0 for a view.
        columns: name and DuckDB type.
    """

    name: str
    oid: int
    columns: tuple[tuple[str, str], ...]

    @property
    def query(self) -> str:
        """Return a query with the columns and without rows; for a table, add the system column."""
        columns = [f'NULL::{kind} AS "{name}"' for name, kind in self.columns]
        if self.oid:
            columns.append(f"{self.oid}::BIGINT AS tableoid")
        return f"(SELECT {', '.join(columns)} WHERE false)"


def _type(text: str) -> str:
    return _TYPES[text[0]] + text[1:]


@lru_cache(maxsize=1)
def shapes() -> tuple[Shape, ...]:
    """Return all catalogs."""
    text = (importlib.resources.files("tierkv.sql") / "ddl" / "pg_catalog_shapes.txt").read_text()
    found = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        head, columns = line.split(": ", 1)
        name, oid = head.split()
        pairs = [column.split() for column in columns.split(", ")]
        found.append(Shape(name, int(oid), tuple((pair[0], _type(pair[1])) for pair in pairs)))
    return tuple(found)


def empty_catalogs(defined: Collection[str]) -> dict[str, str]:
    """Return the empty queries for the catalogs whose names are not in ``defined``, by name."""
    return {shape.name: shape.query for shape in shapes() if shape.name not in defined}


def system_relations() -> str:
    """Return the DDL of the view with the OIDs of PostgreSQL's own tables."""
    rows = ", ".join(f"({shape.oid}::BIGINT, '{shape.name}')" for shape in shapes() if shape.oid)
    return f"CREATE VIEW own_system_relations AS SELECT * FROM (VALUES {rows}) v(oid, relname)"
