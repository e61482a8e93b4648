r"""Installs PostgreSQL's catalog in the engine: an attached in-memory database named tierkv_pg.

The views and macros are in sql/ddl/pg_catalog*.sql. The type tables come from types.py, so the OIDs
in the catalog are the OIDs on the wire. Nothing is ever written into the user's database. The AI
functions (sql/calls/functions.py) are rows of pg_proc, so ``\df ai*`` and tools list them.

rewriting/rewrite.py replaces each catalog that sql/ddl/pg_catalog*.sql do not define by an empty
query. A client's query then finds every column it names, and no view has to be created. The columns
are read once from sql/ddl/pg_catalog_shapes.txt.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.postgres_dialect.rewriting.rewrite import qualify
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import (
    DATABASE,
    INFORMATION_SCHEMA,
    CatalogNames,
)
from tierkv.dbfront.postgres_values.sql_tokens import tokens
from tierkv.dbfront.postgres_values.types import (
    ARRAY_FUNCTIONS,
    DUCKDB_TYPES,
    ENUM_FUNCTIONS,
    FUNCTION_OIDS,
    FUNCTIONS_BY_TYPE,
    JSON,
    TEXT,
    WIRE_TYPES,
    PgType,
    TypeFunctions,
    pg_type,
)
from tierkv.dbfront.sql_session import SqlServer, SqlSession
from tierkv.sql.calls.functions import AI_FUNCTIONS, AiFunction

_FIRST_OID: Final = 16_000
"""Below PostgreSQL's first OID for users (16384), so no object of a user has the same OID."""

_DUCKDB: Final = {
    "boolean": "BOOLEAN",
    "double precision": "DOUBLE",
    "integer": "INTEGER",
    "real[]": "FLOAT[]",
    "text[]": "VARCHAR[]",
}


def _oid(type_name: str) -> int:
    if type_name == "json":
        return JSON.oid
    return pg_type(_DUCKDB[type_name]).oid if type_name in _DUCKDB else TEXT.oid


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"


def signature(function: AiFunction) -> str:
    """Return the parameters as ``\\df`` shows them: ``prompt text, model text DEFAULT NULL``."""
    return ", ".join(
        f"{one.name} {one.kind}" + ("" if one.required else " DEFAULT NULL")
        for one in function.parameters
    )


def _row(oid: int, function: AiFunction) -> str:
    other = "" if function.canonical == function.name else f"same as {function.canonical}()"
    cells = (
        f"{oid}::BIGINT",
        _text(function.name),
        "'a'" if function.aggregate else "'f'",
        str(sum(not one.required for one in function.parameters)),
        _list(_text(one.name) for one in function.parameters),
        _list(f"{_oid(one.kind)}::BIGINT" for one in function.parameters),
        f"{_oid(function.returns)}::BIGINT",
        _text(function.returns),
        _text(signature(function)),
        _text(other),
    )
    return f"({', '.join(cells)})"


def ai_functions_view() -> str:
    """Return the DDL of the view ``own_ai_functions``."""
    rows = [_row(_FIRST_OID + at, function) for at, function in enumerate(AI_FUNCTIONS.values())]
    return (
        f"CREATE VIEW own_ai_functions AS SELECT * FROM (VALUES {', '.join(rows)}) v(oid, name, "
        "kind, defaults, names, types, result_type, result, arguments, description)"
    )


_FILES: Final = ("pg_catalog.sql", "pg_catalog_functions.sql", "pg_catalog_information.sql")
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
_EXTRA_TYPES: Final = (  # known to clients, never sent by the server
    ("varchar", 1043, 1015, -1, "S", "character varying", 0),
    ("bpchar", 1042, 1014, -1, "S", "character", 0),
    ("name", 19, 1003, 64, "S", "name", 0),
    ("int2vector", 22, 1006, -1, "A", "int2vector", 21),
    ("oidvector", 30, 1013, -1, "A", "oidvector", 26),
    ("jsonb", 3802, 3807, -1, "U", "jsonb", 0),
    ("inet", 869, 1041, -1, "I", "inet", 0),
    ("trigger", 2279, 0, 4, "P", "trigger", 0),
    ("internal", 2281, 0, 8, "P", "internal", 0),
    ("void", 2278, 0, 4, "P", "void", 0),
    ("record", 2249, 0, -1, "P", "record", 0),
    ("unknown", 705, 0, -2, "X", "unknown", 0),
)
_ACTIVITY: Final = (
    "(SELECT NULL::BIGINT AS datid, c.database_name AS datname, pid::INTEGER AS pid, "
    "NULL::INTEGER AS leader_pid, 16384::BIGINT AS usesysid, usename, application_name, "
    "NULL::VARCHAR AS client_addr, NULL::VARCHAR AS client_hostname, NULL::INTEGER AS client_port, "
    "NULL::TIMESTAMPTZ AS backend_start, query_start AS xact_start, query_start, "
    "query_start AS state_change, NULL::VARCHAR AS wait_event_type, NULL::VARCHAR AS wait_event, "
    "state, NULL::BIGINT AS backend_xid, NULL::BIGINT AS backend_xmin, NULL::BIGINT AS query_id, "
    "query, 'client backend' AS backend_type "
    f"FROM tierkv.stat_activity, {DATABASE}.main.own_client c)"
)
"""Rows of another view, which the session fills when a statement names the view."""

_COMPLETE: Final = "own_complete"
"""The view that is created last; its existence proves a complete catalog."""

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
            f"({kind.oid}::BIGINT, '{kind.name}', {array}::BIGINT, {kind.size}, '{_category(kind)}'"
            f", '{shown}', {kind.element.oid if kind.element else 0}::BIGINT, "
            f"{_functions(ARRAY_FUNCTIONS if kind.element else FUNCTIONS_BY_TYPE[kind.name])})"
        )
    for name, oid, array, size, category, shown, element in _EXTRA_TYPES:
        functions = _functions(FUNCTIONS_BY_TYPE[name])
        if array:
            of_array = _functions(ARRAY_FUNCTIONS)
            yield f"({array}, '_{name}', 0, -1, 'A', '{shown}[]', {oid}, {of_array})"
        yield f"({oid}, '{name}', {array}, {size}, '{category}', '{shown}', {element}, {functions})"


def _functions(of: TypeFunctions) -> str:
    oids = (of.input, of.output, of.receive, of.send)
    return f"[{', '.join(f'{oid}::UINTEGER' for oid in oids)}]"


def _type_statements() -> list[str]:
    oids = {name: kind.oid for name, kind in DUCKDB_TYPES.items() if kind.element is None} | {
        "VARCHAR": 25
    }
    array_oids = {t.element.oid: t.oid for t in WIRE_TYPES if t.element is not None}
    oids |= {f"{name}[]": array_oids[oid] for name, oid in list(oids.items())}
    pairs = ", ".join(f"'{name}': {oid}::BIGINT" for name, oid in oids.items())
    names = " ".join(f"WHEN {oid} THEN '{name}'" for name, oid in FUNCTION_OIDS.items())
    rows = ", ".join(f"({oid}::BIGINT, '{name}')" for name, oid in FUNCTION_OIDS.items())
    return [
        f"CREATE VIEW own_type_names AS SELECT * FROM (VALUES {', '.join(_type_rows())}) "
        "v(oid, typname, typarray, typlen, typcategory, format_name, typelem, functions)",
        f"CREATE MACRO own_type_function(function_oid) AS (CASE function_oid::BIGINT {names} "
        "WHEN 0 THEN '-' ELSE function_oid::VARCHAR END)",
        f"CREATE MACRO own_enum_functions() AS ({_functions(ENUM_FUNCTIONS)})",
        f"CREATE VIEW own_type_functions AS SELECT * FROM (VALUES {rows}) v(oid, proname)",
        f"CREATE MACRO own_type_oid(type_text) AS coalesce(MAP {{{pairs}}}["
        r"regexp_replace(regexp_replace(type_text, '\(\d+,\s*\d+\)', ''), '\[\d+\]$', '[]')], 25)",
        "CREATE MACRO own_type_length(type_text) AS coalesce((SELECT tn_l FROM (SELECT "
        "oid AS tn_o, typlen AS tn_l FROM own_type_names) "
        "WHERE tn_o = own_type_oid(type_text)), -1)::SMALLINT",
        "CREATE MACRO own_type_modifier(type_text) AS CASE WHEN type_text LIKE 'DECIMAL(%)' "
        r"THEN (regexp_extract(type_text, '\((\d+)', 1)::INTEGER << 16) + "
        r"regexp_extract(type_text, ',\s*(\d+)', 1)::INTEGER + 4 ELSE -1 END",
    ]


def _file_statements(name: str) -> list[str]:
    """Return the statements of one file in sql/ddl."""
    text = (importlib.resources.files("tierkv.sql") / "ddl" / name).read_text()
    statements, start = [], 0
    for token in tokens(text):
        if token.text == ";":
            statements.append(text[start : token.start].strip())
            start = token.end
    return statements


def _defined(statement: str) -> tuple[str, str]:
    """Return VIEW or MACRO, and the name; views of information_schema have this prefix."""
    words = [token for token, _ in zip(tokens(statement), range(5), strict=False)]
    if words[3].text == ".":
        return words[1].upper, f"{INFORMATION_SCHEMA}.{words[4].name}"
    return words[1].upper, words[2].name


@lru_cache(maxsize=1)
def _statements() -> tuple[str, ...]:
    made = [
        *_type_statements(),
        system_relations(),
        ai_functions_view(),
        *(statement for name in _FILES for statement in _file_statements(name)),
    ]
    return (f"CREATE SCHEMA {DATABASE}.information", *made)


@lru_cache(maxsize=1)
def catalog_names() -> CatalogNames:
    """Return all names in the catalog, including the names for the catalog's own DDL."""
    names = [_defined(statement) for statement in _statements()[1:]]
    views = {name for kind, name in names if kind == "VIEW"}
    prefix = f"{INFORMATION_SCHEMA}."
    return CatalogNames(
        views=frozenset(name for name in views if not name.startswith(prefix)),
        functions=frozenset(name for kind, name in names if kind == "MACRO"),
        information=frozenset(n.removeprefix(prefix) for n in views if n.startswith(prefix)),
        empty={**empty_catalogs(views), "pg_stat_activity": _ACTIVITY},
    )


@lru_cache(maxsize=1)
def client_names() -> CatalogNames:
    """Return the names that clients may use."""
    return catalog_names().for_clients()


@lru_cache(maxsize=1)
def catalog_statements() -> tuple[str, ...]:
    """Return all statements, in order, with every catalog name qualified."""
    names = catalog_names()
    schema, *statements = _statements()
    return (schema, *(qualify(statement, names) for statement in statements))


class SharedCatalog:
    """The catalog of one engine, created for all sessions when a statement first names the catalog.

    A separate session creates the catalog. The transaction of the waiting client therefore holds no
    part of the catalog and may be rolled back.
    """

    def __init__(self, server: SqlServer) -> None:
        self._server = server
        self._making: asyncio.Task[None] | None = None

    async def need(self) -> None:
        """Wait until the catalog exists; the creation goes on if the client leaves."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        await asyncio.shield(self._making)

    async def _make(self) -> None:
        try:
            session = await self._server.open_session(ClientInfo(application_name=DATABASE))
            try:
                await _install(session)
            finally:
                await session.close()
        except BaseException:
            self._making = None  # The next client tries again.
            raise

    async def close(self) -> None:
        """Stop the creation of the catalog."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])


async def _install(session: SqlSession) -> None:
    """Create the catalog unless this engine has a complete catalog."""
    probe = (
        "SELECT 1 FROM duckdb_views() "
        f"WHERE database_name = '{DATABASE}' AND view_name = '{_COMPLETE}'"
    )
    if await session.execute_own(probe):
        return
    await session.execute_own(f"DETACH DATABASE IF EXISTS {DATABASE}")
    await session.execute_own(f"ATTACH ':memory:' AS {DATABASE}")
    for statement in catalog_statements():
        await session.execute_own(statement)
    await session.execute_own(f"CREATE VIEW {DATABASE}.main.{_COMPLETE} AS SELECT true AS whole")


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
