"""AI filters of a SELECT: asked after everything else in WHERE, and one inside the other.

An engine evaluates conjuncts in an order of its own, some of them for rows that another one drops;
here that costs calls. So WHERE is written anew from the user's own conjuncts: those without AI
calls first, then ``CASE WHEN first THEN second END``, which asks the second about rows that pass
the first only. A row passes one exactly as it passes the other: NULL passes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from sql.clauses import Range, SelectClauses, select_clauses
from sql.dialect import Dialect
from sql.lexer import Token
from sql.placement import Placement, has_site
from sql.rewrite import Piece, RewrittenSql, SqlRewriter, joined
from sql.statement import main_verb
from sql.stream_shape import conjuncts_of

_SOURCES: Final = ("with", "with_", "from", "from_", "joins", "laterals")


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """A SELECT whose AI filters can be put in order.

    Attributes:
        head: the statement up to its first AI filter.
        filters: each a predicate in brackets.
        tail: what follows WHERE.
        samples: a query per filter that says of the rows it may be asked about whether they pass;
            without a LIMIT. Empty where there is nothing to choose.
        count: a query for the number of these rows; None without ``samples``.
    """

    head: RewrittenSql
    filters: tuple[RewrittenSql, ...]
    tail: RewrittenSql
    samples: tuple[RewrittenSql, ...] = ()
    count: RewrittenSql | None = None

    def ordered(self, order: Sequence[int]) -> RewrittenSql:
        """Write the statement with its filters, by number, in an order."""
        nested: list[str | RewrittenSql] = []
        for number in order[:-1]:
            nested += ["CASE WHEN ", self.filters[number], " THEN "]
        nested.append(self.filters[order[-1]])
        return joined((self.head, *nested, " END" * (len(order) - 1), self.tail))


def filter_plan(
    tokens: list[Token], placement: Placement, rewriter: SqlRewriter
) -> FilterPlan | None:
    """Plan the AI filters of a SELECT; None when they can stay where they are."""
    tree = placement.tree
    if not isinstance(tree, exp.Select) or tree.args.get("where") is None:
        return None
    clauses = select_clauses(tokens, main_verb(tokens))
    parts = conjuncts_of(tree.args["where"].this)
    if clauses is None or len(parts) != len(clauses.conjuncts):
        return None
    spans = list(zip(parts, clauses.conjuncts, strict=True))
    filters = [span for part, span in spans if has_site(part)]
    others = [span for part, span in spans if not has_site(part)]
    fence = _fence(tree) if rewriter.dialect is Dialect.POSTGRES else ""
    last_ones = filters == [span for _, span in spans][len(others) :]
    if not filters or (len(filters) == 1 and last_ones and not fence):
        return None
    return _written(tree, clauses, filters, others, fence, rewriter)


def _written(
    tree: exp.Select,
    clauses: SelectClauses,
    filters: list[Range],
    others: list[Range],
    fence: str,
    rewriter: SqlRewriter,
) -> FilterPlan:
    first = min(span[0] for span in (*filters, *others))
    last = max(span[1] for span in (*filters, *others))
    plain: list[Piece] = []
    for span in others:
        plain += [" (", span, ") AND"]
    opening, closing = (f"CASE WHEN {fence} THEN (", ") END") if fence else ("(", ")")
    texts = tuple(rewriter.rewrite((opening, span, closing)) for span in filters)
    head = rewriter.rewrite(((0, first), *plain, " "))
    tail = rewriter.rewrite((" ", (last, clauses.last)))
    samples: tuple[RewrittenSql, ...] = ()
    count: RewrittenSql | None = None
    if len(filters) > 1 and not _asks_in_sources(tree):
        sources = (clauses.items[-1][1], first)
        for span in filters:
            pieces: list[Piece] = [(0, clauses.verb), " SELECT (", span, ") IS TRUE "]
            samples += (rewriter.rewrite([*pieces, sources, *plain, " TRUE"], named=False),)
        count = rewriter.rewrite(
            [(0, clauses.verb), " SELECT count(*) ", sources, *plain, " TRUE"], named=False
        )
    return FilterPlan(head, texts, tail, samples, count)


def _asks_in_sources(tree: exp.Select) -> bool:
    for key in _SOURCES:
        value = tree.args.get(key)
        nodes = value if isinstance(value, list) else [value]
        if any(isinstance(node, exp.Expr) and has_site(node) for node in nodes):
            return True
    return False


def _fence(tree: exp.Select) -> str:
    """Write what is always true and reads every joined relation.

    PostgreSQL pushes a filter to the relation it reads, below joins, whatever it costs. One that
    reads all of them stays above: fewer rows are asked about there, never more distinct calls.
    Empty when there is nothing to join, or a relation without a name. A column that the statement
    reads anyway does; a whole row may be wide, and its reader may not be allowed to read it all.
    """
    source = tree.args.get("from") or tree.args.get("from_")
    joins = tree.args.get("joins") or []
    if source is None or not joins:
        return ""
    relations = [source.this, *(join.this for join in joins)]
    columns = _columns_read(tree, joins)
    read = [_read_of(relation, columns) for relation in relations]
    return f"num_nulls({', '.join(read)}) >= 0" if all(read) else ""


def _columns_read(tree: exp.Select, joins: list[exp.Expr]) -> dict[str, str]:
    """Return a column that is read of each relation, by the relation's name, both as written."""
    found: dict[str, str] = {}
    ons = (join.args["on"] for join in joins if join.args.get("on"))
    for node in (*tree.expressions, *ons, *conjuncts_of(tree.args["where"].this)):
        for column in () if node.find(exp.Query) else node.find_all(exp.Column):
            if len(column.parts) == 2 and not isinstance(column.this, exp.Star):
                relation, name = (_as_read(part) for part in column.parts)
                found.setdefault(relation, name)
    return found


def _read_of(relation: exp.Expr, columns: Mapping[str, str]) -> str:
    """Write a column of a relation, else its whole row; empty when it has no name of its own."""
    if not isinstance(relation, exp.Table | exp.Subquery | exp.Values | exp.Lateral):
        return ""
    alias = relation.args.get("alias")
    named = alias.this if isinstance(alias, exp.TableAlias) else relation.this
    if not isinstance(named, exp.Identifier):
        return ""
    name = _as_read(named)
    return f"{name}.{columns.get(name, '*')}"


def _as_read(identifier: exp.Expr) -> str:
    """Quote a name; one that is not quoted is in lower case to PostgreSQL."""
    name = identifier.name if identifier.args.get("quoted") else identifier.name.lower()
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
