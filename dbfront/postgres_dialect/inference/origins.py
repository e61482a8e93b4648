"""The table and column of each output column, as PostgreSQL reports them to clients.

PostgreSQL names the table of each output column that is a plain reference to a table's or view's
column, also through subqueries and WITH queries. For any other column, for example an expression or
a column of a UNION, PostgreSQL names no table. ``origins`` walks a statement's tree with the
columns of its tables. The result is exact or silent: an uncertain origin is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

from sqlglot import exp

from tierkv.dbfront.postgres_dialect.inference.parsing import parsed
from tierkv.dbfront.postgres_values.sql_tokens import first_word

_FIRST_WORDS: Final = frozenset({"SELECT", "WITH", "TABLE", "INSERT", "UPDATE", "DELETE"})
_OUTER: Final = frozenset({"FULL", "RIGHT"})
_STAR_OPTIONS: Final = frozenset({"this", "except_", "table"})


@dataclass(frozen=True, slots=True)
class Origin:
    """A column of a table: the table's number, the column's number and the column's type."""

    table_oid: int
    attnum: int
    type_name: str


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column of a table, subquery or result; the name is empty if only the engine knows it."""

    name: str
    origin: Origin | None = None


Columns = Sequence[OutputColumn]


class Tables(Protocol):
    """The tables behind the names in a statement."""

    def columns(self, database: str, schema: str, table: str) -> Columns | None: ...

    def same_schema(self, written: str, also_written: str) -> bool: ...


class _Unknown(Exception):
    """The columns of the output can't be inferred."""


@lru_cache(maxsize=256)
def tables_of_output(sql: str) -> frozenset[str]:
    """Return the names, in lower case, of the tables that output columns may come from."""
    if first_word(sql) not in _FIRST_WORDS:
        return frozenset()
    tree = parsed(sql)
    try:
        if tree is None or not any(map(_may_refer, _items(tree))):
            return frozenset()
        return frozenset(
            table.name.lower()
            for table in tree.find_all(exp.Table)
            if isinstance(table.this, exp.Identifier)
        )
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return frozenset()  # a tree of unexpected form


def origins(sql: str, tables: Tables) -> tuple[OutputColumn, ...]:
    """Return the output columns of a statement; no columns if inference fails."""
    tree = parsed(sql)
    try:
        return () if tree is None else tuple(_query(tree, _Scope(tables)))
    except (_Unknown, AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return ()


def _items(tree: exp.Expr) -> Sequence[exp.Expr]:
    while isinstance(tree, exp.Subquery):
        tree = tree.this
    if isinstance(tree, exp.Select):
        return tuple(tree.expressions)
    returning = tree.args.get("returning")
    return () if returning is None else tuple(returning.expressions)


def _may_refer(item: exp.Expr) -> bool:
    return isinstance(_bare(item), exp.Column | exp.Star)


def _bare(item: exp.Expr) -> exp.Expr:
    """Remove the alias and parentheses."""
    item = item.unalias()
    while isinstance(item, exp.Paren):
        item = item.this
    return item


@dataclass(frozen=True, slots=True)
class _Relation:
    """An item of FROM; ``columns`` is None if unknown, ``schema`` is as written."""

    columns: Columns | None
    schema: str = ""


@dataclass(slots=True)
class _Scope:
    """The meaning of names inside one query.

    Attributes:
        merged: columns of ``USING``, by name.
        hidden: columns of ``USING`` that ``*`` omits, by the alias of the right side.
    """

    tables: Tables
    outer: _Scope | None = None
    queries: dict[str, Columns | None] = field(default_factory=dict)
    relations: dict[str, _Relation] = field(default_factory=dict)
    merged: dict[str, Origin | None] = field(default_factory=dict)
    hidden: dict[str, frozenset[str]] = field(default_factory=dict)

    def add(self, alias: str, relation: _Relation) -> None:
        if alias in self.relations:
            raise _Unknown
        self.relations[alias] = relation

    def query(self, name: str) -> tuple[Columns | None] | None:
        """Find a WITH query, from this scope outwards."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.queries:
                return (scope.queries[name],)
            scope = scope.outer
        return None

    def column(self, column: exp.Column) -> Origin | None:
        """Return the origin of a column; None if the origin is uncertain."""
        name, table = column.name.lower(), column.table.lower()
        scope: _Scope | None = self
        while scope is not None:
            if table and table in scope.relations:
                return scope._of(table, column.db.lower(), name)
            if not table:
                if name in scope.merged:
                    return scope.merged[name]
                near = [r.columns for r in scope.relations.values()]
                found = [one for known in near for one in known or () if one.name == name]
                if found:
                    return found[0].origin if len(found) == 1 else None
                if None in near:
                    return None
            scope = scope.outer
        return None

    def _of(self, table: str, schema: str, name: str) -> Origin | None:
        relation = self.relations[table]
        if schema and not self.tables.same_schema(schema, relation.schema):
            return None
        found = [one for one in relation.columns or () if one.name == name]
        return found[0].origin if len(found) == 1 else None

    def star(self, table: str, schema: str) -> list[OutputColumn]:
        """Return the columns of ``*`` or ``table.*``."""
        if table:
            relation = self.relations.get(table)
            if relation is None or relation.columns is None:
                raise _Unknown
            if schema and not self.tables.same_schema(schema, relation.schema):
                raise _Unknown
            return list(relation.columns)
        if not self.relations:
            raise _Unknown
        found: list[OutputColumn] = []
        for alias, relation in self.relations.items():
            if relation.columns is None:
                raise _Unknown
            hidden = self.hidden.get(alias, frozenset())
            for one in relation.columns:
                if one.name not in hidden:
                    merged = one.name in self.merged
                    found.append(OutputColumn(one.name, self.merged[one.name]) if merged else one)
        return found


def _query(node: exp.Expr, scope: _Scope) -> list[OutputColumn]:
    """Return the columns of a query or of RETURNING."""
    _with(node, scope)
    match node:
        case exp.Subquery() if not node.args.get("joins"):
            return _query(node.this, _Scope(scope.tables, scope))
        case exp.SetOperation():
            left = _query(node.this, _Scope(scope.tables, scope))
            return [OutputColumn(column.name) for column in left]
        case exp.Select():
            source = node.args.get("from_")
            if node.args.get("laterals") or node.args.get("into"):
                raise _Unknown
            if source is not None:
                _from(source.this, scope)
            for join in node.args.get("joins") or ():
                _join(join, scope)
            return _output(node.expressions, scope)
        case exp.Insert() | exp.Update() | exp.Delete():
            return _changed(node, scope)
    raise _Unknown


def _changed(node: exp.Expr, scope: _Scope) -> list[OutputColumn]:
    target = node.this.this if isinstance(node.this, exp.Schema) else node.this
    alone = _Scope(scope.tables)
    alone.add(target.alias_or_name.lower(), _table(target, alone))
    return _output(node.args["returning"].expressions, alone)


def _with(node: exp.Expr, scope: _Scope) -> None:
    clause = node.args.get("with_")
    if clause is None:
        return
    for item in clause.expressions:
        name = item.alias.lower()
        if clause.recursive:
            scope.queries[name] = None
        scope.queries[name] = _renamed(_inner(item.this, scope), item.args.get("alias"))


def _inner(node: exp.Expr, scope: _Scope) -> Columns | None:
    """Return the columns of a query inside another query; None if inference fails."""
    try:
        return _query(node, _Scope(scope.tables, scope))
    except _Unknown:
        return None


def _from(node: exp.Expr, scope: _Scope) -> None:
    alias = node.args.get("alias")
    inner = node.this if isinstance(node, exp.Subquery) else None
    if isinstance(inner, exp.Table) and alias is None:  # FROM (a JOIN b ON ...)
        _from(inner, scope)
    else:
        relation = _relation(node, scope)
        columns = _renamed(relation.columns, alias)
        named = node.alias_or_name.lower() or f" {len(scope.relations)}"
        schema = relation.schema if alias is None or not alias.name else ""
        scope.add(named, _Relation(columns, schema))
    for join in node.args.get("joins") or ():
        _join(join, scope)


def _relation(node: exp.Expr, scope: _Scope) -> _Relation:
    if node.args.get("pivots"):
        return _Relation(None)
    match node:
        case exp.Table() if isinstance(node.this, exp.Identifier):
            query = None if node.db else scope.query(node.name.lower())
            return _table(node, scope) if query is None else _Relation(query[0])
        case exp.Subquery():
            return _Relation(_inner(node.this, scope))
        case exp.Lateral() if isinstance(node.this, exp.Subquery):
            return _Relation(_inner(node.this.this, scope))
    return _Relation(None)


def _table(node: exp.Table, scope: _Scope) -> _Relation:
    database, schema = node.catalog.lower(), node.db.lower()
    return _Relation(scope.tables.columns(database, schema, node.name.lower()), schema)


def _join(join: exp.Join, scope: _Scope) -> None:
    if join.kind in ("SEMI", "ANTI") or join.method not in ("", "NATURAL"):
        raise _Unknown
    before = list(scope.relations)
    _from(join.this, scope)
    alias = list(scope.relations)[len(before)]
    names = [part.name.lower() for part in join.args.get("using") or ()]
    if join.method == "NATURAL":
        names = _common(scope, before, alias)
    if names and len(scope.relations) != len(before) + 1:
        raise _Unknown
    for name in names:
        _merge(scope, before, alias, name, join.side)
    if names:
        scope.hidden[alias] = frozenset(names)


def _common(scope: _Scope, before: Sequence[str], alias: str) -> list[str]:
    """Return the column names that both sides of a NATURAL JOIN have."""
    sides = [scope.relations[one].columns for one in (*before, alias)]
    if None in sides:
        raise _Unknown
    left = {one.name for columns in sides[:-1] for one in columns or ()}
    return [one.name for one in sides[-1] or () if one.name in left]


def _merge(scope: _Scope, before: Sequence[str], alias: str, name: str, side: str) -> None:
    """Note the origin of a column of USING: the left side, or the right side of a RIGHT JOIN."""
    left: list[Origin | None] = [
        one.origin
        for relation in before
        for one in scope.relations[relation].columns or ()
        if one.name == name
    ]
    if name in scope.merged:
        left = [scope.merged[name]]
    known = all(scope.relations[one].columns is not None for one in before)
    right = [one.origin for one in scope.relations[alias].columns or () if one.name == name]
    merged: Origin | None = None
    if known and len(left) == 1 and len(right) == 1 and side != "FULL":
        chosen, other = (right[0], left[0]) if side in _OUTER else (left[0], right[0])
        if chosen and other and chosen.type_name == other.type_name:
            merged = chosen
    scope.merged[name] = merged


def _output(items: Sequence[exp.Expr], scope: _Scope) -> list[OutputColumn]:
    found: list[OutputColumn] = []
    for item in items:
        bare = _bare(item)
        if isinstance(item, exp.Star) or (isinstance(item, exp.Column) and item.is_star):
            found += _starred(item, scope)
        elif _is_star(bare) or _is_star(bare.args.get("this")):
            raise _Unknown
        elif isinstance(bare, exp.Column):
            name = item.alias.lower() if isinstance(item, exp.Alias) else bare.name.lower()
            found.append(OutputColumn(name, scope.column(bare)))
        else:
            found.append(OutputColumn(item.alias.lower()))
    return found


def _is_star(node: object) -> bool:
    return isinstance(node, exp.Expr) and node.is_star and not isinstance(node, exp.Query)


def _starred(item: exp.Expr, scope: _Scope) -> list[OutputColumn]:
    star = item if isinstance(item, exp.Star) else item.this
    if any(value for key, value in star.args.items() if key not in _STAR_OPTIONS):
        raise _Unknown
    table, schema = (item.table, item.db) if isinstance(item, exp.Column) else ("", "")
    without = {part.name.lower() for part in star.args.get("except_") or ()}
    columns = scope.star(table.lower(), schema.lower())
    return [column for column in columns if column.name not in without]


def _renamed(columns: Columns | None, alias: exp.Expr | None) -> Columns | None:
    """Rename columns as in ``AS t (a, b)``."""
    given = [part.name.lower() for part in alias.args.get("columns") or ()] if alias else []
    if columns is None or not given:
        return columns
    names: Mapping[int, str] = dict(enumerate(given))
    return [
        OutputColumn(names.get(at, column.name), column.origin) for at, column in enumerate(columns)
    ]
