"""Puts PostgreSQL's catalog into the engine: an attached in-memory database named tierkv_pg.

The views and macros are in sql/ddl/pg_catalog.sql; the type tables come from types.py, so the OIDs
in the catalog are those on the wire. Nothing is ever written into the user's database.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from dbfront.contracts import SqlSession
from dbfront.pgwire.catalog.rewrite import DATABASE, CatalogNames, qualify
from dbfront.pgwire.sql_tokens import tokens
from dbfront.pgwire.types import DUCKDB_TYPES, WIRE_TYPES, PgType

_FORMAT_NAMES: Final = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
    "time": "time without time zone",
    "timetz": "time with time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}
_EXTRA_TYPES: Final = (  # known to clients, never sent by us
    ("varchar", 1043, 1015, -1, "S", "character varying"),
    ("bpchar", 1042, 1014, -1, "S", "character"),
    ("name", 19, 1003, 64, "S", "name"),
    ("jsonb", 3802, 3807, -1, "U", "jsonb"),
)
_CATEGORIES: Final = {"bool": "B", "text": "S", "interval": "T", "bytea": "U", "json": "U"}


def _category(kind: PgType) -> str:
    if kind.element is not None:
        return "A"
    if kind.name in _CATEGORIES:
        return _CATEGORIES[kind.name]
    if kind.name.startswith(("int", "float", "numeric")):
        return "N"
    return "D" if kind.name.startswith(("date", "time")) else "U"


def _type_rows() -> Iterator[str]:
    array_oids = {t.element.name: t.oid for t in WIRE_TYPES if t.element is not None}
    for kind in WIRE_TYPES:
        base = kind.element or kind
        shown = _FORMAT_NAMES.get(base.name, base.name) + ("[]" if kind.element else "")
        array = 0 if kind.element else array_oids.get(kind.name, 0)
        yield (
            f"({kind.oid}::BIGINT, '{kind.name}', {array}::BIGINT, {kind.size}, "
            f"'{_category(kind)}', '{shown}', {kind.element.oid if kind.element else 0}::BIGINT)"
        )
    for name, oid, array, size, category, shown in _EXTRA_TYPES:
        yield f"({oid}, '{name}', {array}, {size}, '{category}', '{shown}', 0)"


def _type_statements() -> list[str]:
    oids = {name: kind.oid for name, kind in DUCKDB_TYPES.items()} | {"VARCHAR": 25}
    array_oids = {t.element.oid: t.oid for t in WIRE_TYPES if t.element is not None}
    oids |= {f"{name}[]": array_oids[oid] for name, oid in list(oids.items())}
    pairs = ", ".join(f"'{name}': {oid}::BIGINT" for name, oid in oids.items())
    return [
        f"CREATE VIEW type_names AS SELECT * FROM (VALUES {', '.join(_type_rows())}) "
        "v(oid, typname, typarray, typlen, typcategory, format_name, typelem)",
        f"CREATE MACRO type_oid(type_text) AS coalesce(MAP {{{pairs}}}["
        r"regexp_replace(regexp_replace(type_text, '\(\d+,\s*\d+\)', ''), '\[\d+\]$', '[]')], 25)",
        "CREATE MACRO type_modifier(type_text) AS CASE WHEN type_text LIKE 'DECIMAL(%)' "
        r"THEN (regexp_extract(type_text, '\((\d+)', 1)::INTEGER << 16) + "
        r"regexp_extract(type_text, ',\s*(\d+)', 1)::INTEGER + 4 ELSE -1 END",
    ]


def _file_statements() -> list[str]:
    """The statements of pg_catalog.sql."""
    text = (importlib.resources.files("sql") / "ddl" / "pg_catalog.sql").read_text()
    statements, start = [], 0
    for token in tokens(text):
        if token.text == ";":
            statements.append(text[start : token.start].strip())
            start = token.end
    return statements


@lru_cache(maxsize=1)
def catalog_names() -> CatalogNames:
    """What there is: public views and functions, and all names, internal ones too."""
    views: set[str] = set()
    functions: set[str] = set()
    for statement in (*_type_statements(), *_file_statements()):
        words = [token for token, _ in zip(tokens(statement), range(3), strict=False)]
        (views if words[1].upper == "VIEW" else functions).add(words[2].name)
    return CatalogNames(frozenset(views), frozenset(functions))


@lru_cache(maxsize=1)
def catalog_statements() -> tuple[str, ...]:
    """All statements, in order, with every name of ours qualified."""
    names = catalog_names()
    statements = (*_type_statements(), *_file_statements())
    return tuple(qualify(statement, names) for statement in statements)


async def install(session: SqlSession) -> None:
    """Make the catalog if this engine does not have it yet; calls must not overlap."""
    probe = f"SELECT 1 FROM duckdb_databases() WHERE database_name = '{DATABASE}'"
    if (await session.execute(probe)).rows:
        return
    await session.execute(f"ATTACH ':memory:' AS {DATABASE}")
    for statement in catalog_statements():
        await session.execute(statement)
