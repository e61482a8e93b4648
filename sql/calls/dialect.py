"""How the two engines spell what the front puts around AI calls.

Used by sql/plan/rewrite.py only. Each AI call becomes ``ai_call(form key, text)``; the text is the
row's only argument, or a JSON array of several, and the answer's text is cast to the function's
type. PostgreSQL's names have their schema: a user's own function of exact types would be preferred.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from tierkv.sql.calls.functions import ENGINE_PREFIX, RESULT_FIELDS, ArgumentKind, Returns

Around = tuple[str, str]
"""What stands before and after an expression."""


class Dialect(StrEnum):
    """Which engine a text is for; the value is sqlglot's name of it."""

    DUCKDB = "duckdb"
    POSTGRES = "postgres"


def engine_function(dialect: Dialect, *, kept_in_place: bool) -> str:
    """Name the engine function that looks a call up.

    Args:
        dialect: of the engine.
        kept_in_place: DuckDB only: the one registered as volatile, which the engine neither folds
            at plan time nor pushes below joins and semi-joins, where it would run for rows nobody
            asks about. PostgreSQL's is expensive by declaration instead.
    """
    if dialect is Dialect.POSTGRES:
        return "tierkv.ai_call"
    return f"{ENGINE_PREFIX}call{'_kept' * kept_in_place}"


_TEXT: Final[dict[Dialect, Around]] = {
    Dialect.DUCKDB: ("CAST(", " AS VARCHAR)"),
    Dialect.POSTGRES: ("CAST(", " AS pg_catalog.text)"),
}
_ARGUMENTS: Final[dict[Dialect, dict[ArgumentKind, Around]]] = {
    # to_json keeps JSON as it is and makes JSON of a STRUCT. It is packed as text, because
    # DuckDB's json_array would round its numbers to doubles; the front decodes it again.
    Dialect.DUCKDB: {
        ArgumentKind.TEXT: _TEXT[Dialect.DUCKDB],
        ArgumentKind.JSON: ("CAST(to_json(", ") AS VARCHAR)"),
        ArgumentKind.TEXTS: ("CAST(", " AS VARCHAR[])"),
    },
    Dialect.POSTGRES: {
        ArgumentKind.TEXT: _TEXT[Dialect.POSTGRES],
        ArgumentKind.JSON: ("pg_catalog.to_jsonb(", ")"),
        ArgumentKind.TEXTS: ("CAST(", " AS pg_catalog.text[])"),
    },
}
_PARAMETER_JSON: Final[Around] = ("CAST(", " AS pg_catalog.jsonb)")


def argument(dialect: Dialect, kind: ArgumentKind, *, untyped: bool = False) -> Around:
    """Return what turns an argument into something ``packed`` takes; ``untyped``: a lone ``$1``."""
    if untyped and dialect is Dialect.POSTGRES and kind is ArgumentKind.JSON:
        return _PARAMETER_JSON
    return _ARGUMENTS[dialect][kind]


def packed(dialect: Dialect) -> Around:
    """Return what makes JSON text of a list of arguments."""
    if dialect is Dialect.POSTGRES:
        return "CAST(pg_catalog.json_build_array(", ") AS pg_catalog.text)"
    return "CAST(json_array(", ") AS VARCHAR)"


def gathered(dialect: Dialect) -> str:
    """Name the aggregate that makes a list."""
    return "pg_catalog.array_agg" if dialect is Dialect.POSTGRES else "list"


def texts(dialect: Dialect) -> Around:
    """Return what makes texts of a list."""
    return _ARGUMENTS[dialect][ArgumentKind.TEXTS]


_DUCKDB_TYPES: Final = {"text": "VARCHAR", "integer": "INTEGER", "double precision": "DOUBLE"}
_RESULT_STRUCT: Final = ", ".join(
    f'"{name}" {_DUCKDB_TYPES[type_name]}' for name, type_name in RESULT_FIELDS.items()
)
_ANSWERS: Final[dict[Dialect, dict[Returns, Around]]] = {
    Dialect.DUCKDB: {
        Returns.JSON: ("CAST(", " AS JSON)"),
        Returns.BOOLEAN: ("CAST(", " AS BOOLEAN)"),
        Returns.DOUBLE: ("CAST(", " AS DOUBLE)"),
        Returns.INTEGER: ("CAST(", " AS INTEGER)"),
        Returns.VECTOR: ("CAST(CAST(", " AS JSON) AS FLOAT[])"),
        Returns.TEXTS: ("CAST(CAST(", " AS JSON) AS VARCHAR[])"),
        Returns.RESULT: ("CAST(CAST(", f" AS JSON) AS STRUCT({_RESULT_STRUCT}))"),
    },
    Dialect.POSTGRES: {
        Returns.JSON: ("CAST(", " AS pg_catalog.jsonb)"),
        Returns.BOOLEAN: ("CAST(", " AS boolean)"),
        Returns.DOUBLE: ("CAST(", " AS double precision)"),
        Returns.INTEGER: ("CAST(", " AS integer)"),
        Returns.VECTOR: ("CAST(", " AS real[])"),
        Returns.TEXTS: ("CAST(", " AS pg_catalog.text[])"),
        Returns.RESULT: (
            "pg_catalog.jsonb_populate_record(CAST(NULL AS tierkv.ai_result), CAST(",
            " AS pg_catalog.jsonb))",
        ),
    },
}


def answer(dialect: Dialect, returns: Returns) -> Around:
    """Return what turns an answer's text into the function's type."""
    return _ANSWERS[dialect].get(returns, ("", ""))


def concatenation(dialect: Dialect) -> str:
    """Return the operator between two texts."""
    return "OPERATOR(pg_catalog.||)" if dialect is Dialect.POSTGRES else "||"
