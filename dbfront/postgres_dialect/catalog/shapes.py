"""The shapes of PostgreSQL's catalogs, for those that stand empty here.

rewrite.py puts an empty query in the place of each catalog that sql/ddl/pg_catalog*.sql do not
define, so that a client's query finds every column it names and nothing has to be made for it.
Read once from sql/ddl/pg_catalog_shapes.txt.
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
    """One catalog; ``name`` has the prefix ``information_schema.`` if it is one of those.

    Attributes:
        oid: PostgreSQL's fixed OID of a table; 0 for a view.
        columns: name and DuckDB type.
    """

    name: str
    oid: int
    columns: tuple[tuple[str, str], ...]

    @property
    def query(self) -> str:
        """A query without rows that has the columns; tables also have their system column."""
        columns = [f'NULL::{kind} AS "{name}"' for name, kind in self.columns]
        if self.oid:
            columns.append(f"{self.oid}::BIGINT AS tableoid")
        return f"(SELECT {', '.join(columns)} WHERE false)"


def _type(text: str) -> str:
    return _TYPES[text[0]] + text[1:]


@lru_cache(maxsize=1)
def shapes() -> tuple[Shape, ...]:
    """All catalogs."""
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
    """Queries that stand for the catalogs whose names are not in ``defined``, by name."""
    return {shape.name: shape.query for shape in shapes() if shape.name not in defined}


def system_relations() -> str:
    """DDL of the view that knows the OIDs of PostgreSQL's own tables."""
    rows = ", ".join(f"({shape.oid}::BIGINT, '{shape.name}')" for shape in shapes() if shape.oid)
    return f"CREATE VIEW own_system_relations AS SELECT * FROM (VALUES {rows}) v(oid, relname)"
