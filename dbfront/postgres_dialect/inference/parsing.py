"""A statement as sqlglot's tree with every call as written, and the meaning of its nodes.

column_names.py names columns from the tree, origins.py finds their tables, and statements.py infers
types of parameters. The tree of a text is cached and must not be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from sqlglot import exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError

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
