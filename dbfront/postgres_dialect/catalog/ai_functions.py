"""The AI functions as rows of pg_proc, so that ``\\df ai*`` and tools list them.

install.py puts the view into the catalog; names, parameters and types come from
sql/calls/functions.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tierkv.dbfront.postgres_values.types import JSON, TEXT, pg_type
from tierkv.sql.calls.functions import AI_FUNCTIONS, AiFunction

_FIRST_OID: Final = 16_000
"""Below PostgreSQL's first OID for users (16384), so that no object of theirs has it."""

_DUCKDB: Final = {
    "boolean": "BOOLEAN",
    "double precision": "DOUBLE",
    "integer": "INTEGER",
    "real[]": "FLOAT[]",
    "text[]": "VARCHAR[]",
}


def _oid(type_name: str) -> int:
    if type_name == "jsonb":
        return JSON.oid
    return pg_type(_DUCKDB[type_name]).oid if type_name in _DUCKDB else TEXT.oid


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"


def signature(function: AiFunction) -> str:
    """Parameters as ``\\df`` shows them: ``prompt text, model text DEFAULT NULL``."""
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
    """DDL of the view ``own_ai_functions``."""
    rows = [_row(_FIRST_OID + at, function) for at, function in enumerate(AI_FUNCTIONS.values())]
    return (
        f"CREATE VIEW own_ai_functions AS SELECT * FROM (VALUES {', '.join(rows)}) v(oid, name, "
        "kind, defaults, names, types, result_type, result, arguments, description)"
    )
