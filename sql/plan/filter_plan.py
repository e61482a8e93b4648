"""AI filters of a SELECT: evaluated after the rest of WHERE, and nested in each other.

An engine evaluates conjuncts in any order, even for rows dropped by another conjunct; with AI calls
this costs calls. Therefore WHERE is rewritten from the user's own conjuncts: first the conjuncts
without AI calls, then ``CASE WHEN first THEN second END``, which evaluates the second only for rows
passing the first. Exactly the same rows pass both forms: NULL passes neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.placement import Placement, has_site
from tierkv.sql.plan.changes import with_writes
from tierkv.sql.plan.rewrite import Piece, RewrittenSql, SqlRewriter, joined
from tierkv.sql.plan.stream_shape import conjuncts_of
from tierkv.sql.text.clauses import Range, SelectClauses, select_clauses
from tierkv.sql.text.lexer import Token
from tierkv.sql.text.statement import main_verb

VALUE_NAMES: Final = frozenset(
    {"user", "session_user", "system_user", "current_user", "current_role", "current_catalog"}
    | {"current_schema", "current_date", "current_time", "current_timestamp"}
    | {"localtime", "localtimestamp"}
)
"""Functions that are written like columns."""

_SOURCES: Final = ("with", "with_", "from", "from_", "joins", "laterals")


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """A SELECT whose AI filters can be reordered.

    Attributes:
        head: the statement up to its first AI filter.
        filters: each a predicate in brackets.
        tail: the text after WHERE.
        samples: per filter a query without LIMIT to test the filter on all rows passing the
            conjuncts without AI calls. Empty if there is nothing to choose.
        count: a query for the number of these rows; None without ``samples``.
    """

    head: RewrittenSql
    filters: tuple[RewrittenSql, ...]
    tail: RewrittenSql
    samples: tuple[RewrittenSql, ...] = ()
    count: RewrittenSql | None = None

    def ordered(self, order: Sequence[int]) -> RewrittenSql:
        """Write the statement with its filters, by number, in the given order."""
        nested: list[str | RewrittenSql] = []
        for number in order[:-1]:
            nested += ["CASE WHEN ", self.filters[number], " THEN "]
        nested.append(self.filters[order[-1]])
        return joined((self.head, *nested, " END" * (len(order) - 1), self.tail))


def filter_plan(
    tokens: list[Token], placement: Placement, rewriter: SqlRewriter
) -> FilterPlan | None:
    """Plan the AI filters of a SELECT; None if the filters can stay in place."""
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
    # Samples run in parallel with the statement, including its WITH, so WITH must not write.
    if len(filters) > 1 and not _asks_in_sources(tree) and not with_writes(list(rewriter.tokens)):
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
    """Write an always true condition with columns of every joined relation.

    PostgreSQL pushes a filter below joins to the only relation read by the filter, whatever the
    cost. A filter reading all relations stays above the joins, with fewer rows and never more
    distinct calls. The fence uses only columns already read by the statement, because the user may
    lack permission for further columns. Empty without a join, or if the fence can't read every
    relation.
    """
    source = tree.args.get("from") or tree.args.get("from_")
    joins = tree.args.get("joins") or []
    if source is None or not joins:
        return ""
    relations = [source.this, *(join.this for join in joins)]
    names = [_name_of(relation) for relation in relations]
    if "" in names or len(set(names)) < len(names):
        return ""
    columns, loose = _columns_read(tree, joins, names)
    computed = _computed_relations(tree)
    read: dict[str, None] = {}
    for relation, name in zip(relations, names, strict=True):
        if name in columns:
            read[f"{name}.{columns[name]}"] = None
        elif not isinstance(relation.this, exp.Identifier) or name in computed:
            read[f"{name}.*"] = None
        elif loose:
            read.update(dict.fromkeys(loose))
        else:
            return ""
    return f"pg_catalog.num_nulls({', '.join(read)}) OPERATOR(pg_catalog.>=) 0"


def _computed_relations(tree: exp.Select) -> set[str]:
    """Return the names of relations computed by WITH; their rows may be read whole."""
    clause = tree.args.get("with") or tree.args.get("with_")
    names = [] if clause is None else [cte.args["alias"].this for cte in clause.expressions]
    return {quoted_name(name) for name in names}


def _columns_read(
    tree: exp.Select, joins: list[exp.Expr], relations: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Return a column read from each relation, by the relation's name, both as written.

    Also returns the unqualified columns of WHERE, and of the ON of a single join.
    """
    found: dict[str, str] = {}
    loose: dict[str, None] = {}
    ons = [join.args["on"] for join in joins if join.args.get("on")]
    in_scope = [*conjuncts_of(tree.args["where"].this), *(ons if len(joins) == 1 else ())]
    for node in (*tree.expressions, *ons, *in_scope):
        for column in () if node.find(exp.Query) else node.find_all(exp.Column):
            *relation, name = (quoted_name(part) for part in column.parts)
            if isinstance(column.this, exp.Star):
                continue
            if len(relation) == 1:
                found.setdefault(relation[0], name)
            elif not relation and any(node is one for one in in_scope):
                loose[name] = None
    for number, join in enumerate(joins, 1):
        for using in filter(_is_name, join.args.get("using") or ()):
            found.setdefault(relations[number], quoted_name(using))
            if number == 1:
                found.setdefault(relations[0], quoted_name(using))
    values = {quoted_name(exp.to_identifier(name)) for name in VALUE_NAMES}
    return found, [name for name in loose if name not in values and name not in relations]


def _is_name(node: exp.Expr) -> bool:
    return isinstance(node, exp.Identifier)


def _name_of(relation: exp.Expr) -> str:
    """Return a relation's name, quoted; empty for a relation without a name."""
    if not isinstance(relation, exp.Table | exp.Subquery | exp.Values | exp.Lateral):
        return ""
    alias = relation.args.get("alias")
    named = alias.this if isinstance(alias, exp.TableAlias) else relation.this
    return quoted_name(named) if isinstance(named, exp.Identifier) else ""


def quoted_name(identifier: exp.Expr) -> str:
    """Quote a name; PostgreSQL converts an unquoted name to lower case."""
    name = identifier.name if identifier.args.get("quoted") else identifier.name.lower()
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
