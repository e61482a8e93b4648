"""Engine-specific SQL around AI calls.

Used by sql/plan/rewrite.py only. Each AI call becomes ``ai_call(form key, text)``. The text is the
row's only argument, or a JSON array of several, and the answer's text is cast to the function's
type. Names in PostgreSQL are schema-qualified: otherwise a user's own function with exact types
would be preferred.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from tierkv.sql.calls.functions import ENGINE_PREFIX, RESULT_FIELDS, ArgumentKind, Returns

Around = tuple[str, str]
"""Text before and after an expression."""


class Dialect(StrEnum):
    """The target engine of a text; the value is sqlglot's name of the engine."""

    DUCKDB = "duckdb"
    POSTGRES = "postgres"


def engine_function(dialect: Dialect, *, kept_in_place: bool) -> str:
    """Return the name of the engine function that looks up a call.

    Args:
        dialect: the engine.
        kept_in_place: DuckDB only: choose the volatile function. The engine neither folds a
            volatile function at plan time nor pushes the function below joins and semi-joins, to
            run for unneeded rows. PostgreSQL's function is declared expensive instead.
    """
    if dialect is Dialect.POSTGRES:
        return "tierkv.ai_call"
    return f"{ENGINE_PREFIX}call{'_kept' * kept_in_place}"


_TEXT: Final[dict[Dialect, Around]] = {
    Dialect.DUCKDB: ("CAST(", " AS VARCHAR)"),
    Dialect.POSTGRES: ("CAST(", " AS pg_catalog.text)"),
}
_ARGUMENTS: Final[dict[Dialect, dict[ArgumentKind, Around]]] = {
    # to_json keeps JSON unchanged and converts a STRUCT to JSON. JSON is packed as text, because
    # DuckDB's json_array would round its numbers to doubles; the front decodes the text again.
    Dialect.DUCKDB: {
        ArgumentKind.TEXT: _TEXT[Dialect.DUCKDB],
        ArgumentKind.JSON: ("CAST(to_json(", ") AS VARCHAR)"),
        ArgumentKind.FIELDS: ("CAST(to_json(", ") AS VARCHAR)"),
        ArgumentKind.TEXTS: ("CAST(", " AS VARCHAR[])"),
    },
    Dialect.POSTGRES: {
        ArgumentKind.TEXT: _TEXT[Dialect.POSTGRES],
        ArgumentKind.JSON: ("pg_catalog.to_jsonb(", ")"),
        ArgumentKind.FIELDS: ("pg_catalog.to_jsonb(", ")"),
        ArgumentKind.TEXTS: ("CAST(", " AS pg_catalog.text[])"),
    },
}
_PARAMETERS: Final[dict[ArgumentKind, Around]] = {
    ArgumentKind.JSON: ("CAST(", " AS pg_catalog.jsonb)"),
    # The text of JSON or of an array, whichever the driver sends; the front reads both.
    ArgumentKind.FIELDS: ("pg_catalog.to_jsonb(CAST(", " AS pg_catalog.text))"),
}
"""Conversions of a lone ``$1``, whose type PostgreSQL could not infer from ``to_jsonb``."""


def argument(dialect: Dialect, kind: ArgumentKind, *, untyped: bool = False) -> Around:
    """Return the conversion of an argument for ``packed``; ``untyped``: a lone ``$1``."""
    if untyped and dialect is Dialect.POSTGRES and kind in _PARAMETERS:
        return _PARAMETERS[kind]
    return _ARGUMENTS[dialect][kind]


ROW: Final = "tierkv_row"
"""Key of a row in the JSON list of a query's rows on PostgreSQL; its value has all columns."""

ROW_TYPE: Final = "tierkv_type"
"""Key of the type of such a row's first column: a vector is text in JSON, and no document."""


def collected(dialect: Dialect) -> Around:
    """Return the conversion of a bracketed query to a JSON list of its rows, in their order.

    JSON keeps what a cast to text would hide: rows that are lists, and rows that are not text.
    PostgreSQL's ARRAY refuses NULL and empty lists as rows, so each row is made JSON before.
    """
    if dialect is Dialect.DUCKDB:
        return "to_json(ARRAY", ")"
    kind = f"CAST(pg_catalog.pg_typeof({ROW}.tierkv_first) AS text)"
    row = f"pg_catalog.json_build_object('{ROW}', {ROW}, '{ROW_TYPE}', {kind})"
    return f"pg_catalog.to_json(ARRAY(SELECT {row} FROM ", f" AS {ROW}(tierkv_first)))"


def packed(dialect: Dialect) -> Around:
    """Return the conversion of a list of arguments to JSON text."""
    if dialect is Dialect.POSTGRES:
        return "CAST(pg_catalog.json_build_array(", ") AS pg_catalog.text)"
    return "CAST(json_array(", ") AS VARCHAR)"


def gathered(dialect: Dialect) -> str:
    """Return the name of the aggregate that makes a list."""
    return "pg_catalog.array_agg" if dialect is Dialect.POSTGRES else "list"


def texts(dialect: Dialect) -> Around:
    """Return the conversion of a list to texts."""
    return _ARGUMENTS[dialect][ArgumentKind.TEXTS]


_DUCKDB_TYPES: Final = {
    "text": "VARCHAR", "integer": "INTEGER", "double precision": "DOUBLE", "boolean": "BOOLEAN",
}  # fmt: skip
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
    """Return the conversion of an answer's text to the function's type."""
    return _ANSWERS[dialect].get(returns, ("", ""))


VECTOR_OPERATORS: Final = frozenset({"<=>", "<->", "<#>", "<+>"})
"""pgvector's distances: cosine, Euclidean, negative inner product, taxicab."""


DUCKDB_INNER_PRODUCT: Final = "<~>"
"""``<#>`` in the engine, which reads ``#`` as a column's number and takes macros as operators."""


def as_vector(dialect: Dialect) -> Around:
    """Return the conversion of an embedding beside a vector operator.

    DuckDB's operators take lists. pgvector's type has no implicit cast from real[]; without a
    schema its name is found where its operators are found.
    """
    return ("CAST(", " AS vector)") if dialect is Dialect.POSTGRES else ("", "")


def concatenation(dialect: Dialect) -> str:
    """Return the operator between two texts."""
    return "OPERATOR(pg_catalog.||)" if dialect is Dialect.POSTGRES else "||"
