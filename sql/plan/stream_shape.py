"""The conditions for streaming a statement, read from sqlglot's tree; see stream_plan.py.

Each check raises NotStreamableError with the reason in words. In doubt a statement is refused and
then replayed, which is right for every shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from sqlglot import exp

from tierkv.sql.calls.placement import children_of, has_site, site_number
from tierkv.sql.text.lexer import Token, TokenKind, name_value


class NotStreamableError(Exception):
    """The reason, in words, for not streaming a statement; never leaves this room."""


_CLAUSES: Final = frozenset(
    {"with", "from", "joins", "where", "expressions", "limit", "offset", "order", "kind", "hint"}
    | {"laterals"}
)
_CLAUSE_NAMES: Final = {
    "distinct": "DISTINCT needs all rows",
    "group": "GROUP BY needs all rows",
    "having": "HAVING needs all rows",
    "qualify": "QUALIFY needs all rows",
    "windows": "window functions need all rows",
    "sample": "it uses sampling",
}
_AGGREGATES: Final = (exp.AggFunc, exp.IgnoreNulls, exp.RespectNulls, exp.WithinGroup, exp.Filter)
_MANY_ROWS: Final = (exp.Explode, exp.Unnest, exp.UDTF)
_STARS: Final = (exp.Star, exp.Columns)


def check_shape(tree: exp.Select, *, ordered_by_answers: bool = False) -> None:
    """Refuse clauses that need all rows, and AI calls outside items and WHERE.

    Args:
        tree: the statement.
        ordered_by_answers: ORDER BY may hold AI calls too.
    """
    for key, value in tree.args.items():
        name = key.strip("_")
        if value and name not in _CLAUSES:
            raise NotStreamableError(_CLAUSE_NAMES.get(name, f"it has a {name.upper()} clause"))
        if name in ("with", "from", "joins", "laterals", "order", "limit", "offset") and any(
            map(has_site, _expressions(value))
        ):
            if name == "order" and ordered_by_answers:
                continue
            where = "ORDER BY" if name == "order" else name.upper()
            raise NotStreamableError(f"an AI call is in {where}")
    for node in item_nodes(tree):
        _check_per_row(node)
    stars = any(isinstance(node, _STARS) for node in item_nodes(tree))
    for by in _order_keys(tree):
        named = isinstance(by, exp.Literal) and stars
        if named or by.name.upper() == "ALL" or any(by.find_all(exp.PositionalColumn, *_STARS)):
            raise NotStreamableError("its ORDER BY may order by answers")


def _check_per_row(node: exp.Expr) -> None:
    """Refuse expressions without exactly one value per row."""
    if isinstance(node, _AGGREGATES):
        raise NotStreamableError("an aggregate needs all rows")
    if isinstance(node, exp.Window):
        raise NotStreamableError("window functions need all rows")
    if isinstance(node, _MANY_ROWS):
        raise NotStreamableError("UNNEST in its select list adds rows")


class ItemNames:
    """Names of a select list's items: the last item of each name, and duplicates.

    Built once for a statement, to check each AI call without visiting all items.
    """

    def __init__(self, tree: exp.Select) -> None:
        names = [item.alias.lower() for item in tree.expressions]
        self._last = {name: number for number, name in enumerate(names)}
        self._counts = Counter(names)

    def may_mean_another(self, name: str, number: int) -> bool:
        """Return whether a name at an item may mean this item, a later item or a duplicate."""
        return self._last.get(name, -1) >= number or self._counts[name] > 1


def check_moved(items: ItemNames, part: exp.Expr, number: int) -> None:
    """Refuse expressions with a different meaning at the end of the base's select list.

    An argument of a call must be a single value of a row and a single column. No column around the
    call may be an item invisible, or visible differently, at its original place.

    Args:
        items: names of the statement's items.
        part: an item or a conjunct of WHERE, with AI calls.
        number: number of the item, from 0; for a conjunct of WHERE, above all items.
    """
    for node in (node for argument in call_arguments(part) for node in _own_nodes(argument)):
        _check_per_row(node)
        if isinstance(node, _STARS):
            raise NotStreamableError(f"{shown(node)} may expand to several columns in an AI call")
    for column in part.find_all(exp.Column):
        name = column.name.lower()
        if not column.table and items.may_mean_another(name, number):
            raise NotStreamableError(f'"{column.name}" next to an AI call may name another item')


def items_ordered_by(tree: exp.Select) -> frozenset[int] | None:
    """Return the items named by ORDER BY, by number from 0; None for an order without answers."""
    keys = list(_order_keys(tree))
    answers = any(map(has_site, keys))
    named: set[int] = set()
    for number, item in enumerate(tree.expressions):
        names = {str(number + 1), item.alias.lower()} - {""}
        if has_site(item) and any(
            isinstance(key, exp.Literal | exp.Column) and key.name.lower() in names for key in keys
        ):
            named.add(number)
    return frozenset(named) if answers or named else None


def check_aliases(
    tokens: list[Token], tree: exp.Select, kept: frozenset[int] = frozenset()
) -> None:
    """Refuse names of AI items elsewhere, where they may mean the answer.

    Args:
        tokens: tokens of the statement.
        tree: the statement.
        kept: items, by number from 0, whose names may stand anywhere.
    """
    names = Counter(name_value(t) for t in tokens if t.kind is not TokenKind.OPERATOR)
    for number, item in enumerate(tree.expressions, 1):
        if not has_site(item):
            continue
        if number - 1 in kept:
            if not item.alias:
                raise NotStreamableError("ORDER BY refers to an item without an alias")
            continue
        if item.alias and names[item.alias.lower()] > 1:
            raise NotStreamableError(f'"{item.alias}" may refer to an AI answer elsewhere')
        if any(
            isinstance(key, exp.Literal) and key.name == str(number) for key in _order_keys(tree)
        ):
            raise NotStreamableError("ORDER BY needs all answers")
    # Without its own name an item is named after its function, or after its text.
    for column in tree.find_all(exp.Column):
        if "ai_" in column.name.lower():
            raise NotStreamableError(f'"{column.name}" may refer to an AI answer')


def _order_keys(tree: exp.Select) -> Iterator[exp.Expr]:
    order = tree.args.get("order")
    if order is not None:
        for key in order.expressions:
            yield (key.this if isinstance(key, exp.Ordered) else key).unnest()


def item_nodes(tree: exp.Select) -> Iterator[exp.Expr]:
    """Walk the select list without its subqueries."""
    return (node for item in tree.expressions for node in _own_nodes(item))


def conjuncts_of(predicate: exp.Expr) -> list[exp.Expr]:
    """Return the top-level conjuncts of a WHERE."""
    return list(predicate.flatten()) if isinstance(predicate, exp.And) else [predicate]


def _expressions(value: object) -> list[exp.Expr]:
    if isinstance(value, exp.Expr):
        return [value]
    return [item for item in value if isinstance(item, exp.Expr)] if isinstance(value, list) else []


def _own_nodes(node: exp.Expr) -> Iterator[exp.Expr]:
    """Walk an expression without its subqueries."""
    yield node
    if not isinstance(node, exp.Query | exp.Subquery):
        for child in children_of(node):
            yield from _own_nodes(child)


# Expressions allowed around AI calls: their value depends neither on the session nor on the place
# of a row.
AROUND_CALLS: Final = (
    exp.Alias, exp.Identifier, exp.Literal, exp.ByteString, exp.Paren, exp.Null, exp.Boolean,
    exp.Case, exp.If, exp.Not, exp.And, exp.Or, exp.Is, exp.In, exp.Between, exp.Like, exp.ILike,
    exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.DPipe,
    exp.Concat,
    exp.Lower, exp.Upper, exp.Trim, exp.Length, exp.Substring, exp.Replace, exp.Contains,
    exp.StartsWith, exp.Coalesce, exp.Nullif, exp.JSONExtract, exp.JSONExtractScalar, exp.JSONPath,
    exp.JSONPathKey, exp.JSONPathRoot, exp.JSONPathSubscript, exp.Add, exp.Sub, exp.Mul, exp.Div,
    exp.Neg, exp.Abs, exp.Round, exp.Cast, exp.TryCast, exp.DataType, exp.Dot, exp.Bracket,
    exp.PropertyEQ, exp.Kwarg, exp.Placeholder, exp.Parameter, exp.Var,
)  # fmt: skip
_COMPARES: Final = (
    exp.Predicate, exp.Nullif, exp.Replace, exp.Contains, exp.StartsWith,
)  # fmt: skip
CAST_TO: Final = frozenset(
    {"TEXT", "VARCHAR", "BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "INT128", "FLOAT"}
    | {"DOUBLE", "DECIMAL", "DATE", "TIMESTAMP", "JSON"}
)
# Expressions that can't fail: they are computed even for rows dropped by a filter later.
_NEVER_FAILS: Final = (
    exp.Alias, exp.Identifier, exp.Column, exp.Star, exp.Columns, exp.Literal, exp.ByteString,
    exp.Paren, exp.Null, exp.Boolean, exp.Case, exp.If, exp.Not, exp.And, exp.Or, exp.Is, exp.In,
    exp.Between, exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.DPipe, exp.Concat,
    exp.Lower, exp.Upper, exp.Trim, exp.Length, exp.Coalesce, exp.TryCast, exp.DataType,
    exp.Placeholder, exp.Parameter, exp.PropertyEQ, exp.Kwarg, exp.Var, exp.Array, exp.Struct,
    exp.Tuple,
)  # fmt: skip

_CASTING: Final = (
    exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In,
)  # fmt: skip


def guards(part: exp.Expr) -> bool:
    """Return whether a call in an expression may be unnecessary."""
    return any(
        isinstance(node, exp.Case | exp.If | exp.Coalesce | exp.And | exp.Or | exp.Nullif | exp.In)
        for node in _around(part)
    )


def _around(node: exp.Expr) -> Iterator[exp.Expr]:
    """Walk an expression without the arguments of its calls."""
    yield node
    if site_number(node) is None:
        for child in children_of(node):
            yield from _around(child)


def check_never_fails(roots: Iterable[exp.Expr]) -> None:
    """Refuse fallible expressions, because the base computes them for additional rows."""
    for node in (node for root in roots for node in root.walk()):
        if isinstance(node, exp.Cast) and node.to.is_type("text"):
            continue
        if not isinstance(node, _NEVER_FAILS) or _casts_text(node):
            raise NotStreamableError(f"{shown(node)} may fail for rows that don't need it")


def _casts_text(node: exp.Expr) -> bool:
    """Return whether the engine may cast text for a node, which fails for some texts.

    Types are not known here. Text next to a number is cast to a number, and a condition to BOOLEAN.
    """
    if isinstance(node, exp.And | exp.Or | exp.Not):
        return not all(map(_is_condition, children_of(node)))
    if isinstance(node, exp.Is):
        return not isinstance(node.expression, exp.Null) and not _is_condition(node.this)
    operands = children_of(node)
    if isinstance(node, exp.Case):
        tested = [branch.this for branch in node.args.get("ifs") or ()]
        if node.this is None:
            return not all(map(_is_condition, tested))
        operands = [node.this, *tested]
    elif isinstance(node, exp.If) and not isinstance(node.parent, exp.Case):
        return not _is_condition(node.this)
    elif not isinstance(node, _CASTING):
        return False
    return sum(not _is_text(operand.unnest()) for operand in operands) > 1


def _is_condition(node: exp.Expr) -> bool:
    return isinstance(
        node.unnest(), exp.Predicate | exp.Connector | exp.Not | exp.Boolean | exp.Null
    )


def _is_text(node: exp.Expr) -> bool:
    """Return whether a constant takes the type of the other operand of a comparison."""
    return isinstance(node, exp.Null) or (isinstance(node, exp.Literal) and node.is_string)


def compares(node: exp.Expr) -> bool:
    """Return whether a node compares its operands, where collations matter."""
    return isinstance(node, _COMPARES) or (isinstance(node, exp.Case) and node.this is not None)


def call_arguments(item: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the arguments of every call in an expression."""
    for node in item.find_all(exp.Anonymous):
        if site_number(node) is not None:
            yield from children_of(node)


def reads_plain_column(node: exp.Expr) -> bool:
    """Return whether a column is read outside every unknown function."""
    if isinstance(node, exp.Column):
        return True
    if isinstance(node, exp.Anonymous | exp.Query | exp.Subquery):
        return False
    return any(map(reads_plain_column, children_of(node)))


def shown(node: exp.Expr) -> str:
    """Return the text of an expression for an error message."""
    if isinstance(node, exp.Query | exp.Subquery):
        return "a subquery"
    if isinstance(node, exp.Anonymous):
        return f"{node.name}()"
    text = node.sql(dialect="duckdb")
    return text if len(text) <= 40 else f"{text[:37]}..."
