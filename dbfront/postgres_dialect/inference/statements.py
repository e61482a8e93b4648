"""Infers types of a statement's open parameters by walking its tree as PostgreSQL's parser does.

open_parameters.py gets the tree from parsing.py, looks up the tables' columns, and passes both to
``parameter_types``. If sqlglot can't parse a statement, there is no tree, and open_parameters.py
handles the plain cases by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from tierkv.dbfront.postgres_dialect.inference.expressions import ExpressionTyper
from tierkv.dbfront.postgres_dialect.inference.parsing import (
    Columns,
    Scope,
    TableColumns,
    parameter_number,
)
from tierkv.dbfront.postgres_dialect.inference.signatures import UNKNOWN, TypeName, signatures


def parameter_types(tree: exp.Expr, tables: TableColumns) -> dict[int, str]:
    """Infer PostgreSQL's type names of the parameters, by number; uncertain types are left out."""
    typer = _StatementTyper(tables)
    try:
        typer.statement(tree)
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return {}  # a tree of unexpected form; types are optional
    return typer.expressions.found


class _StatementTyper:
    """Walks queries and changes; ``expressions`` infers the types of their expressions."""

    def __init__(self, tables: TableColumns) -> None:
        self._tables = tables
        self.expressions = ExpressionTyper(self.query)

    def statement(self, tree: exp.Expr) -> None:
        """Walk a whole statement."""
        if isinstance(tree, exp.Create):
            self.statement(tree.args["expression"])
        else:
            self.query(tree, Scope())

    def query(self, node: exp.Expr, outer: Scope, into: Sequence[TypeName] = ()) -> Columns:
        """Walk a query or change and return the columns; ``into``: column types of an INSERT."""
        scope = Scope(outer)
        self._with(node, scope)
        match node:
            case exp.Subquery():
                columns = self.query(node.this, scope, into)
                self._ends(node, scope)
                return columns
            case exp.SetOperation():
                return self._union(node, scope, into)
            case exp.Select():
                return self._select(node, scope, into)
            case exp.Values():
                return self._values(node, scope, into)
            case exp.Insert():
                return self._insert(node, scope)
            case exp.Update():
                return self._update(node, scope)
            case exp.Delete() | exp.Merge():
                return self._change(node, scope)
            case exp.Table():
                return dict(self._relation(node, scope))
        self.expressions.kind(node, scope)
        return {}

    def _with(self, node: exp.Expr, scope: Scope) -> None:
        clause = node.args.get("with_")
        if clause is None:
            return
        for item in clause.expressions:
            name = item.alias.lower()
            if clause.recursive and isinstance(item.this, exp.SetOperation):
                first = self.query(item.this.this, scope)
                scope.queries[name] = _renamed(first, item.args.get("alias"))
            scope.queries[name] = _renamed(self.query(item.this, scope), item.args.get("alias"))

    def _select(self, node: exp.Expr, scope: Scope, into: Sequence[TypeName]) -> Columns:
        source = node.args.get("from_")
        if source is not None:
            self._from(source.this, scope)
        for join in node.args.get("joins") or ():
            self._join(join, scope)
        columns: dict[str, TypeName] = {}
        for at, item in enumerate(node.expressions):
            columns |= self._item(item, at, scope, into)
        for clause in ("where", "having", "qualify"):
            if node.args.get(clause) is not None:
                self.expressions.wanted(node.args[clause].this, "bool", scope)
        for clause in ("group", "windows", "distinct"):
            part = node.args.get(clause)
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, exp.Expr):
                    self.expressions.kind(child, scope)
        self._ends(node, scope)
        return columns

    def _item(
        self, item: exp.Expr, at: int, scope: Scope, into: Sequence[TypeName]
    ) -> dict[str, TypeName]:
        """Type one item of the select list."""
        if isinstance(item, exp.Star) or isinstance(item.this, exp.Star):
            return scope.star(item.text("table").lower())
        value = item.unalias()
        kind = self.expressions.kind(value, scope)
        self.expressions.want(value, into[at] if at < len(into) else "text")
        name = item.alias_or_name.lower() or f"column{at}"
        return {name: "text" if kind == UNKNOWN else kind}

    def _ends(self, node: exp.Expr, scope: Scope) -> None:
        """Walk ORDER BY, LIMIT and OFFSET."""
        order = node.args.get("order")
        for key in order.expressions if order is not None else ():
            self.expressions.wanted(key, "text", scope)
        for clause in ("limit", "offset"):
            part = node.args.get(clause)
            if part is not None:
                value = part.args.get("count") or part.args.get("expression")
                self.expressions.wanted(value, "int8", scope)

    def _from(self, node: exp.Expr, scope: Scope) -> None:
        alias = node.args.get("alias")
        named = node.alias_or_name.lower() or f"relation {len(scope.relations)}"
        scope.relations[named] = _renamed(self._relation(node, scope), alias)
        for join in node.args.get("joins") or ():
            self._join(join, scope)

    def _join(self, join: exp.Expr, scope: Scope) -> None:
        self._from(join.this, scope)
        if join.args.get("on") is not None:
            self.expressions.wanted(join.args["on"], "bool", scope)

    def _relation(self, node: exp.Expr, scope: Scope) -> Columns:
        """Return the columns of one item of FROM."""
        match node:
            case exp.Table() if isinstance(node.this, exp.Identifier):
                query = None if node.db else scope.query(node.name.lower())
                return self._tables.of(node) if query is None else query
            case exp.Unnest():
                kinds = [self.expressions.kind(item, scope) for item in node.expressions]
                return {f"unnest{at}": _element(kind) for at, kind in enumerate(kinds)}
            case exp.Subquery() | exp.Values() | exp.Query():
                return self.query(node, scope)
            case exp.Table() | exp.Lateral():
                inner = node.this
                if isinstance(inner, exp.Query):
                    return self.query(inner, scope)
                return {inner.name.lower() or "value": self.expressions.kind(inner, scope)}
        return {}

    def _union(self, node: exp.Expr, scope: Scope, into: Sequence[TypeName]) -> Columns:
        """Walk a UNION: both sides have the same column types, and parameters get these types."""
        sides = [node.this, node.args["expression"]]
        items = [side.expressions if isinstance(side, exp.Select) else [] for side in sides]
        described = [self._guess(side, scope) for side in sides]
        kinds = tuple(
            into[at] if at < len(into) else signatures().common(pair)
            for at, pair in enumerate(zip(*described, strict=False))
        ) if all(items) else tuple(into)  # fmt: skip
        columns = self.query(sides[0], scope, kinds)
        self.query(sides[1], scope, kinds)
        self._ends(node, scope)
        return columns

    def _guess(self, side: exp.Expr, scope: Scope) -> list[TypeName]:
        """Return the types of a side's columns, with bare parameters left open."""
        open_at = {
            at for at, item in enumerate(side.expressions) if parameter_number(item.unalias())
        } if isinstance(side, exp.Select) else set()  # fmt: skip
        before = dict(self.expressions.found)
        kinds = list(self.query(side, scope).values())
        self.expressions.found = before
        return [UNKNOWN if at in open_at else kind for at, kind in enumerate(kinds)]

    def _values(self, node: exp.Expr, scope: Scope, into: Sequence[TypeName]) -> Columns:
        rows = [
            row.expressions if isinstance(row, exp.Tuple) else [row] for row in node.expressions
        ]
        columns: dict[str, TypeName] = {}
        for at, column in enumerate(zip(*rows, strict=False)):
            if at < len(into):
                for value in column:
                    self.expressions.wanted(value, into[at], scope)
                kind = into[at]
            else:
                kind = self.expressions.common(column, scope)
            columns[f"column{at + 1}"] = kind
        self._ends(node, scope)
        return _renamed(columns, node.args.get("alias"))

    def _insert(self, node: exp.Expr, scope: Scope) -> Columns:
        target = node.this
        table = target.this if isinstance(target, exp.Schema) else target
        columns = self._tables.of(table)
        listed = [part.name.lower() for part in target.expressions] if target is not table else []
        into = tuple(columns.get(name) for name in listed or columns)
        if node.args.get("expression") is not None:
            self.query(node.args["expression"], scope, into)
        for name in (table.alias_or_name.lower(), "excluded"):
            scope.relations[name] = columns
        conflict = node.args.get("conflict")
        if conflict is not None:
            self._assignments(conflict.expressions, columns, scope)
            if conflict.args.get("where") is not None:
                self.expressions.wanted(conflict.args["where"].this, "bool", scope)
        del scope.relations["excluded"]
        return self._returning(node, scope)

    def _update(self, node: exp.Expr, scope: Scope) -> Columns:
        self._from(node.this, scope)
        source = node.args.get("from_")
        if source is not None:
            self._from(source.this, scope)
        self._assignments(node.expressions, self._tables.of(node.this), scope)
        return self._finished(node, scope)

    def _change(self, node: exp.Expr, scope: Scope) -> Columns:
        """Walk DELETE and MERGE."""
        self._from(node.this, scope)
        using = node.args.get("using")
        for item in using if isinstance(using, list) else [using]:
            if isinstance(item, exp.Expr):
                self._from(item, scope)
        if node.args.get("on") is not None:
            self.expressions.wanted(node.args["on"], "bool", scope)
        for update in node.find_all(exp.Update):
            self._assignments(update.expressions, self._tables.of(node.this), scope)
        return self._finished(node, scope)

    def _finished(self, node: exp.Expr, scope: Scope) -> Columns:
        if node.args.get("where") is not None:
            self.expressions.wanted(node.args["where"].this, "bool", scope)
        return self._returning(node, scope)

    def _returning(self, node: exp.Expr, scope: Scope) -> Columns:
        clause = node.args.get("returning")
        columns: dict[str, TypeName] = {}
        for at, item in enumerate(clause.expressions if clause is not None else ()):
            columns |= self._item(item, at, scope, ())
        return columns

    def _assignments(self, items: Sequence[exp.Expr], columns: Columns, scope: Scope) -> None:
        for item in items:
            target, value = item.this, item.args["expression"]
            pairs = [(target, value)]
            if isinstance(target, exp.Tuple) and isinstance(value, exp.Tuple):
                pairs = list(zip(target.expressions, value.expressions, strict=False))
            for column, assigned in pairs:
                self.expressions.wanted(assigned, columns.get(column.name.lower()), scope)


def _element(kind: TypeName) -> TypeName:
    return kind[1:] if kind is not None and kind.startswith("_") else None


def _renamed(columns: Columns, alias: exp.Expr | None) -> dict[str, TypeName]:
    """Rename columns as in ``AS t (a, b)``."""
    given = [part.name.lower() for part in (alias.args.get("columns") or ())] if alias else []
    names = [*given, *list(columns)[len(given) :]]
    return dict(zip(names, columns.values(), strict=False))
