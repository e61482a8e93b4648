"""Names of result columns without a name in the statement: PostgreSQL's names.

``count(*)`` is ``count``, a cast has the name of its column or type, an expression is ``?column?``.
Only the names sent to the client change: names inside the engine, of subqueries, views and tables
made by a query, stay DuckDB's names. Statements that sqlglot can't parse keep DuckDB's names too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from sqlglot import exp

from tierkv.dbfront.postgres_dialect.inference.parsing import (
    cast_kind,
    parameter_number,
    parsed,
)
from tierkv.dbfront.postgres_values.sql_tokens import first_word
from tierkv.dbfront.statement_results import Column

UNNAMED: Final = "?column?"
_NAMED: Final = frozenset({"", "SELECT", "WITH", "VALUES", "INSERT", "UPDATE", "DELETE", "MERGE"})
_FIXED: Final[dict[type[exp.Expr], str]] = {
    exp.Exists: "exists", exp.Array: "array", exp.Tuple: "row", exp.Interval: "interval",
    exp.Extract: "extract", exp.Substring: "substring",
    exp.StrPosition: "position", exp.AtTimeZone: "timezone", exp.CurrentDate: "current_date",
    exp.CurrentTimestamp: "current_timestamp", exp.CurrentTime: "current_time",
    exp.CurrentUser: "current_user",
}  # fmt: skip
_UNNAMED: Final = (
    *(
        exp.Binary,
        exp.Literal,
        exp.Boolean,
        exp.Null,
        exp.Not,
        exp.Neg,
        exp.Between,
        exp.In,
        exp.RegexpLike,
    ),
    *(exp.ByteString, exp.RawString, exp.UnicodeString, exp.HexString, exp.BitString, exp.National),
    *(exp.RegexpILike, exp.JSONExtract, exp.JSONExtractScalar, exp.Parameter, exp.Placeholder),
)
_TRIMS: Final = {"LEADING": "ltrim", "TRAILING": "rtrim"}
_MANY: Final = "columns"


def with_names(columns: tuple[Column, ...], sql: str) -> tuple[Column, ...]:
    """Return the columns of a statement's result with PostgreSQL's names."""
    names = _column_names(sql)
    stars = [at for at, name in enumerate(names) if name == "*"]
    if not names or (not stars and len(names) != len(columns)):
        return columns
    first, last = (stars[0], len(names) - 1 - stars[-1]) if stars else (len(names), 0)
    if first + last > len(columns):
        return columns
    middle: list[str | None] = [None] * (len(columns) - first - last)
    wanted = [*names[:first], *middle, *names[len(names) - last :]]
    return tuple(
        column if name is None else replace(column, name=name)
        for column, name in zip(columns, wanted, strict=True)
    )


@lru_cache(maxsize=256)
def _column_names(sql: str) -> tuple[str | None, ...]:
    """Return names by place: None if the engine's name is right, ``*`` for several columns."""
    if first_word(sql) not in _NAMED:
        return ()
    tree = parsed(sql)
    try:
        return () if tree is None else tuple(_of_statement(tree))
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return ()  # a tree of unexpected form; the engine's names are good enough


def _of_statement(tree: exp.Expr) -> Sequence[str | None]:
    if isinstance(tree, exp.SetOperation | exp.Subquery):
        return _of_statement(tree.this)
    if isinstance(tree, exp.Values):
        row = tree.expressions[0]
        count = len(row.expressions) if isinstance(row, exp.Tuple) else 1
        return [f"column{at}" for at in range(1, count + 1)]
    source = tree if isinstance(tree, exp.Select) else tree.args.get("returning")
    return [_of_item(item) for item in source.expressions] if source is not None else ()


def _of_item(item: exp.Expr) -> str | None:
    if isinstance(item, exp.Star) or isinstance(item.this, exp.Star):
        return "count" if isinstance(item, exp.Anonymous) else "*"
    if isinstance(item, exp.Alias):
        return None
    if isinstance(item, exp.Column):
        return UNNAMED if parameter_number(item) else None
    if any(node.name.lower() == _MANY for node in item.find_all(exp.Anonymous)):
        return "*"
    name, _ = _figured(item)
    return name


def _figured(node: exp.Expr) -> tuple[str | None, int]:
    """Return a name and its strength, as PostgreSQL's FigureColname does.

    Strength 0 means no name, 1 a guess, 2 the expression's own name. The name None is for an
    unknown expression: the engine's name stays.
    """
    if type(node) in _FIXED:
        return _FIXED[type(node)], 1 if isinstance(node, exp.Interval) else 2
    for kinds, figure in _RULES:
        if isinstance(node, kinds):
            return figure(node)
    return (UNNAMED, 0) if isinstance(node, _UNNAMED) else (None, 2)


def _of_column(node: exp.Expr) -> tuple[str | None, int]:
    return (UNNAMED, 0) if parameter_number(node) else (node.name.lower(), 2)


def _of_call(node: exp.Expr) -> tuple[str | None, int]:
    return node.name.lower(), 2


def _of_inner(node: exp.Expr) -> tuple[str | None, int]:
    return _figured(node.this)


def _of_field(node: exp.Expr) -> tuple[str | None, int]:
    last = node.args["expression"]
    return _figured(last) if isinstance(last, exp.Anonymous) else (last.name.lower(), 2)


def _of_cast(node: exp.Expr) -> tuple[str | None, int]:
    name, strength = _figured(node.this)
    if strength > 1:
        return name, strength
    target = node.args["to"]
    kind = cast_kind(target) or target.sql("duckdb").lower()
    return kind.removeprefix("_").partition("(")[0], 1


def _of_case(node: exp.Expr) -> tuple[str | None, int]:
    default = node.args.get("default")
    name, strength = (None, 0) if default is None else _figured(default)
    return (name, strength) if strength > 1 else ("case", 1)


def _of_subquery(node: exp.Expr) -> tuple[str | None, int]:
    select = node.this if isinstance(node, exp.Subquery) else node
    while isinstance(select, exp.SetOperation | exp.Subquery):
        select = select.this
    item = select.expressions[0]
    return (item.alias, 2) if isinstance(item, exp.Alias) else (_figured(item)[0], 2)


def _of_trim(node: exp.Expr) -> tuple[str | None, int]:
    return _TRIMS.get(node.text("position").upper(), "btrim"), 2


_Figure = Callable[[exp.Expr], tuple[str | None, int]]
_RULES: Final[tuple[tuple[tuple[type[exp.Expr], ...], _Figure], ...]] = (
    ((exp.Column,), _of_column),
    ((exp.Anonymous,), _of_call),
    ((exp.Paren, exp.Collate, exp.Bracket, exp.Window, exp.Filter, exp.WithinGroup), _of_inner),
    ((exp.Dot,), _of_field),
    ((exp.Cast, exp.TryCast), _of_cast),
    ((exp.Case,), _of_case),
    ((exp.Subquery, exp.Select), _of_subquery),
    ((exp.Trim,), _of_trim),
)
