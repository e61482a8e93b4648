"""Infers the types of expressions and of their parameters, as PostgreSQL's parser does.

``ExpressionTyper.kind`` walks an expression from left to right and from the inside out. The first
place of a parameter decides the parameter's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sqlglot import exp

from tierkv.dbfront.postgres_dialect.inference.parsing import (
    Columns,
    Scope,
    cast_kind,
    parameter_number,
)
from tierkv.dbfront.postgres_dialect.inference.signatures import (
    UNKNOWN,
    Signature,
    TypeName,
    signatures,
)
from tierkv.sql.calls.functions import AI_FUNCTIONS, ArgumentKind

_OPERATORS: Final[dict[type[exp.Expr], str]] = {
    exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%", exp.Pow: "^",
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
    exp.NullSafeEQ: "=", exp.NullSafeNEQ: "=", exp.DPipe: "||", exp.Like: "~~",
    exp.ILike: "~~*", exp.SimilarTo: "~", exp.RegexpLike: "~", exp.RegexpILike: "~*",
    exp.JSONExtract: "->", exp.JSONExtractScalar: "->>", exp.ArrayContainsAll: "@>",
    exp.ArrayContainedBy: "<@", exp.ArrayOverlaps: "&&",
}  # fmt: skip
_BOOLEAN_PARTS: Final = (exp.And, exp.Or, exp.Not)
_COMMON: Final = frozenset({"coalesce", "greatest", "least", "ifnull"})
_OF_ALL: Final = frozenset({"any", "some", "all"})
_AI_TYPES: Final = {ArgumentKind.JSON: "jsonb", ArgumentKind.TEXTS: "_text"}
_PG_NAMES: Final = {
    "boolean": "bool", "double precision": "float8", "real[]": "_float4", "text[]": "_text",
    "integer": "int4", "json": "jsonb", "tierkv.ai_result": "json",
}  # fmt: skip
_NAMED: Final[dict[type[exp.Expr], str]] = {
    exp.CurrentDate: "date", exp.CurrentTimestamp: "timestamptz", exp.Exists: "bool",
    exp.CurrentUser: "text", exp.Interval: "interval", exp.Boolean: "bool", exp.Null: UNKNOWN,
}  # fmt: skip


class ExpressionTyper:
    """Infers the type of each expression.

    Attributes:
        found: types of parameters, by number.
        query: returns the columns of a query inside an expression.
    """

    def __init__(self, query: Callable[[exp.Expr, Scope], Columns]) -> None:
        self.found: dict[int, str] = {}
        self.query = query

    def want(self, node: exp.Expr | None, kind: TypeName) -> None:
        """Give a parameter without a type this type; other expressions already have a type."""
        while isinstance(node, exp.Paren | exp.Collate):
            node = node.this
        number = parameter_number(node)
        if number and kind not in (None, UNKNOWN, "any"):
            assert kind is not None, "tested above"
            self.found.setdefault(number, kind)

    def wanted(self, node: exp.Expr | None, kind: TypeName, scope: Scope) -> None:
        """Infer the type of an expression in a place that expects the given type."""
        if node is not None:
            self.kind(node, scope)
            self.want(node, kind)

    def kind(self, node: exp.Expr, scope: Scope) -> TypeName:
        """Return the type of an expression."""
        if number := parameter_number(node):
            return self.found.get(number, UNKNOWN)
        if type(node) in _OPERATORS:
            return self._operator(_OPERATORS[type(node)], node, scope)
        if isinstance(node, _BOOLEAN_PARTS):
            for part in (node.this, node.args.get("expression")):
                self.wanted(part, "bool", scope)
            return "bool"
        method = _METHODS.get(type(node))
        if method is not None:
            return method(self, node, scope)
        for child in node.iter_expressions():
            self.kind(child, scope)
        return _NAMED.get(type(node))

    def common(self, nodes: Sequence[exp.Expr], scope: Scope) -> TypeName:
        """Return the common type of several expressions, and give the type to their parameters."""
        kind = signatures().common([self.kind(node, scope) for node in nodes])
        for node in nodes:
            self.want(node, kind)
        return kind

    def call(self, name: str, arguments: Sequence[exp.Expr], scope: Scope) -> TypeName:
        """Return the type of a function's call."""
        return self._apply(
            signatures().function(name, [self.kind(node, scope) for node in arguments]), arguments
        )

    def compared(self, name: str, left: exp.Expr, right: exp.Expr, scope: Scope) -> TypeName:
        """Return the type of an operator between two expressions."""
        if isinstance(left, exp.Tuple) and isinstance(right, exp.Tuple):
            for one, other in zip(left.expressions, right.expressions, strict=False):
                self.compared(name, one, other, scope)
            return "bool"
        kinds = self.kind(left, scope), self.kind(right, scope)
        if None in kinds and name not in ("=", "<>", "<", "<=", ">", ">="):
            return self._apply(signatures().operator(name, *kinds), (left, right))
        if None in kinds:
            return "bool"
        return self._apply(signatures().operator(name, *kinds), (left, right))

    def _apply(self, chosen: Signature | None, arguments: Sequence[exp.Expr]) -> TypeName:
        if chosen is None:
            return None
        for node, kind in zip(arguments, chosen.arguments, strict=True):
            self.want(node, kind)
        return None if chosen.result == "any" else chosen.result

    def _operator(self, name: str, node: exp.Expr, scope: Scope) -> TypeName:
        left, right = node.this, node.args["expression"]
        if isinstance(right, exp.Escape):
            self.wanted(right.args["expression"], "text", scope)
            right = right.this
        listed = _list_of(right)
        if listed is not None:
            return self._any(name, left, listed, scope)
        return self.compared(name, left, right, scope)

    def _any(self, name: str, left: exp.Expr, listed: exp.Expr, scope: Scope) -> TypeName:
        """Type ``x = ANY ($1)``: the parameter is a list of the type expected in ``x = $1``."""
        kind, inner = self.kind(left, scope), listed
        while isinstance(inner, exp.Paren | exp.Subquery):
            inner = inner.this
        if isinstance(inner, exp.Query):
            columns = list(self.query(inner, scope).values())
            other: TypeName = columns[0] if columns else None
        else:
            listed_kind = self.kind(inner, scope)
            plain = listed_kind in (UNKNOWN, None)
            other = listed_kind if plain else str(listed_kind).removeprefix("_")
        chosen = None if None in (kind, other) else signatures().operator(name, kind, other)
        if chosen is not None:
            self.want(left, chosen.arguments[0])
            self.want(inner, f"_{chosen.arguments[1]}")
        elif parameter_number(inner):
            self.want(inner, "_text")  # always a list; the engine casts its items
        return "bool"

    def _column(self, node: exp.Expr, scope: Scope) -> TypeName:
        if isinstance(node.this, exp.Star):
            return None
        table = node.text("table").lower()
        return scope.column(table, node.name.lower())

    def _literal(self, node: exp.Expr, scope: Scope) -> TypeName:
        if node.is_string:
            return UNKNOWN
        text = node.name
        if not text.isdecimal():
            return "numeric"
        return "int4" if int(text) < 1 << 31 else "int8" if int(text) < 1 << 63 else "numeric"

    def _inside(self, node: exp.Expr, scope: Scope) -> TypeName:
        return self.kind(node.this, scope)

    def _filter(self, node: exp.Expr, scope: Scope) -> TypeName:
        kind = self.kind(node.this, scope)
        self.wanted(node.args["expression"].this, "bool", scope)
        return kind

    def _window(self, node: exp.Expr, scope: Scope) -> TypeName:
        kind = self.kind(node.this, scope)
        for child in node.iter_expressions():
            if child is not node.this:
                self.kind(child, scope)
        return kind

    def _negative(self, node: exp.Expr, scope: Scope) -> TypeName:
        kind = self.kind(node.this, scope)
        return self._apply_prefix(node, kind)

    def _apply_prefix(self, node: exp.Expr, kind: TypeName) -> TypeName:
        return None if kind is None else self._apply(
            signatures().operator("-", "-", kind), (node.this,)
        )  # fmt: skip

    def _cast(self, node: exp.Expr, scope: Scope) -> TypeName:
        kind = cast_kind(node.args["to"])
        if isinstance(node.this, exp.Array) and kind is not None and kind.startswith("_"):
            for item in node.this.expressions:
                self.wanted(item, kind[1:], scope)
        self.wanted(node.this, kind, scope)
        return kind

    def _between(self, node: exp.Expr, scope: Scope) -> TypeName:
        self.compared(">=", node.this, node.args["low"], scope)
        self.compared("<=", node.this, node.args["high"], scope)
        return "bool"

    def _in(self, node: exp.Expr, scope: Scope) -> TypeName:
        items = node.args.get("expressions") or []
        query = node.args.get("query")
        if query is not None:
            return self._any("=", node.this, query, scope)
        if isinstance(node.this, exp.Tuple):
            for item in items:
                self.compared("=", node.this, item, scope)
            return "bool"
        constants = [item for item in items if not item.find(exp.Column) or parameter_number(item)]
        if len(constants) > 1:
            self.common([node.this, *constants], scope)
        for item in items if len(constants) <= 1 else [i for i in items if i not in constants]:
            self.compared("=", node.this, item, scope)
        return "bool"

    def _case(self, node: exp.Expr, scope: Scope) -> TypeName:
        branches = node.args.get("ifs") or []
        for branch in branches:
            if node.this is not None:
                self.compared("=", node.this, branch.this, scope)
            else:
                self.wanted(branch.this, "bool", scope)
        default = node.args.get("default")
        results = [branch.args["true"] for branch in branches]
        return self.common(([default] if default is not None else []) + results, scope)

    def _array(self, node: exp.Expr, scope: Scope) -> TypeName:
        items = node.expressions
        if len(items) == 1 and isinstance(items[0], exp.Query):
            kinds = list(self.query(items[0], scope).values())
            kind: TypeName = kinds[0] if kinds else None
        else:
            kind = self.common(items, scope)
        return None if kind is None else f"_{kind}"

    def _bracket(self, node: exp.Expr, scope: Scope) -> TypeName:
        kind = self.kind(node.this, scope)
        for index in node.expressions:
            parts = index.iter_expressions() if isinstance(index, exp.Slice) else (index,)
            for part in parts:
                self.wanted(part, "int4", scope)
        if kind is None or any(isinstance(index, exp.Slice) for index in node.expressions):
            return kind
        return kind[1:] if kind.startswith("_") else None

    def _subquery(self, node: exp.Expr, scope: Scope) -> TypeName:
        columns = list(self.query(node, scope).values())
        return columns[0] if len(columns) == 1 else None

    def _extract(self, node: exp.Expr, scope: Scope) -> TypeName:
        self.kind(node.args["expression"], scope)
        return "numeric"

    def _is(self, node: exp.Expr, scope: Scope) -> TypeName:
        truth = isinstance(node.args["expression"], exp.Boolean)
        self.wanted(node.this, "bool" if truth else None, scope)
        return "bool"

    def _special(self, node: exp.Expr, scope: Scope) -> TypeName:
        """Type functions with special syntax: ``substring(x FROM 1)``, ``position(a IN b)``."""
        name, keys = _SPECIAL[type(node)]
        arguments = [node.args[key] for key in keys if node.args.get(key) is not None]
        return self.call(name, arguments, scope)

    def _function(self, node: exp.Expr, scope: Scope) -> TypeName:
        name = node.name.lower()
        arguments = [a for a in node.expressions if isinstance(a, exp.Expr)]
        if name in AI_FUNCTIONS:
            return self._ai_call(name, arguments, scope)
        if name in _COMMON:
            return self.common(arguments, scope)
        if name == "nullif" and len(arguments) == 2:
            self.compared("=", arguments[0], arguments[1], scope)
            return self.kind(arguments[0], scope)
        if name == "count":
            for argument in arguments:
                self.kind(argument, scope)
            return "int8"
        if name == "if" and arguments:
            self.wanted(arguments[0], "bool", scope)
            return self.common(arguments[1:], scope)
        return self.call(name, arguments, scope)

    def _ai_call(self, name: str, arguments: Sequence[exp.Expr], scope: Scope) -> TypeName:
        function = AI_FUNCTIONS[name]
        for at, argument in enumerate(arguments):
            named = isinstance(argument, exp.Kwarg | exp.PropertyEQ)
            key = argument.name.lower() if named else (function.names[at : at + 1] or ("",))[0]
            value = argument.args["expression"] if named else argument
            if key in function.names:
                self.wanted(value, _AI_TYPES.get(function.parameter(key).kind, "text"), scope)
        return _PG_NAMES.get(function.returns.value, function.returns.value)


def _list_of(node: exp.Expr) -> exp.Expr | None:
    """Return the list of ``ANY (list)``, ``SOME`` and ``ALL``."""
    if isinstance(node, exp.Any | exp.All):
        return node.this if isinstance(node.this, exp.Expr) else None
    if isinstance(node, exp.Anonymous) and node.name.lower() in _OF_ALL:
        return node.expressions[0] if len(node.expressions) == 1 else None
    return None


_SPECIAL: Final[dict[type[exp.Expr], tuple[str, tuple[str, ...]]]] = {
    exp.Substring: ("substring", ("this", "start", "length")),
    exp.StrPosition: ("position", ("this", "substr")),
    exp.Trim: ("btrim", ("this", "expression")),
    exp.AtTimeZone: ("timezone", ("zone", "this")),
}

_Method = Callable[[ExpressionTyper, exp.Expr, Scope], TypeName]
_METHODS: Final[dict[type[exp.Expr], _Method]] = {
    exp.Column: ExpressionTyper._column,
    exp.Literal: ExpressionTyper._literal,
    exp.Paren: ExpressionTyper._inside,
    exp.Collate: ExpressionTyper._inside,
    exp.Alias: ExpressionTyper._inside,
    exp.Ordered: ExpressionTyper._inside,
    exp.Distinct: ExpressionTyper._inside,
    exp.Filter: ExpressionTyper._filter,
    exp.Window: ExpressionTyper._window,
    exp.Neg: ExpressionTyper._negative,
    exp.Cast: ExpressionTyper._cast,
    exp.TryCast: ExpressionTyper._cast,
    exp.Between: ExpressionTyper._between,
    exp.In: ExpressionTyper._in,
    exp.Case: ExpressionTyper._case,
    exp.Array: ExpressionTyper._array,
    exp.Bracket: ExpressionTyper._bracket,
    exp.Subquery: ExpressionTyper._subquery,
    exp.Select: ExpressionTyper._subquery,
    exp.Extract: ExpressionTyper._extract,
    exp.Is: ExpressionTyper._is,
    exp.Anonymous: ExpressionTyper._function,
    **dict.fromkeys(_SPECIAL, ExpressionTyper._special),
}
