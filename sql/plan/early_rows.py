"""Number of rows met by a query's AI calls: LIMIT over AI filters, and bounds for estimates.

On PostgreSQL, a round ends after a number of unknown questions. A LIMIT therefore stops AI filters
early when rows reach the filters in final order. ORDER BY runs after WHERE, so a statement over a
single relation gets a sorted subquery below the filters; ``OFFSET 0`` keeps the subquery separate.
EXPLAIN (AI_ESTIMATE) asks no model and does not know which rows pass an AI filter. The bound counts
the rows of FROM and of the rest of WHERE; groups, outputs and sort keys have no more rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.placement import Placement, children_of, has_site, plain_output, site_number
from tierkv.sql.plan.changes import with_writes
from tierkv.sql.plan.filter_plan import VALUE_NAMES, FilterPlan, quoted_name
from tierkv.sql.plan.rewrite import Piece, RewrittenSql, SqlRewriter
from tierkv.sql.plan.stream_shape import conjuncts_of
from tierkv.sql.text.clauses import Range, SelectClauses, select_clauses, split_at
from tierkv.sql.text.lexer import Token, TokenKind, depth_change
from tierkv.sql.text.statement import StatementKind, main_verb

_AFTER_FROM: Final = frozenset(
    {"WHERE", "GROUP", "HAVING", "WINDOW", "QUALIFY", "ORDER", "LIMIT", "OFFSET"}
)
_SETS: Final = frozenset({"UNION", "INTERSECT", "EXCEPT"})
_MORE_ROWS: Final = frozenset(
    {"UNNEST", "ROLLUP", "CUBE", "GROUPING", "GENERATE_SERIES", "GENERATE_SUBSCRIPTS", "SELECT"}
    | {"REGEXP_MATCHES", "REGEXP_SPLIT_TO_TABLE", "JSON_ARRAY_ELEMENTS", "JSONB_ARRAY_ELEMENTS"}
)


def row_bound(tokens: list[Token], start: int, calls: Sequence[FoundCall]) -> list[Piece] | None:
    """Derive a query for the bound on rows; None if no bound is known.

    Args:
        tokens: tokens of the whole text.
        start: first token of the query.
        calls: AI calls anywhere in the text.
    """
    verb = start + main_verb(tokens[start:])
    clauses = select_clauses(tokens, verb)
    if clauses is None or _first_of(tokens, verb, _SETS) < len(tokens) or with_writes(tokens):
        return None
    from_at = clauses.items[-1][1]
    from_end = _first_of(tokens, from_at, _AFTER_FROM)
    if any(
        _contains((start, verb), call) or _contains((from_at, from_end), call) for call in calls
    ):
        return None
    asking = [span for span in clauses.conjuncts if any(_contains(span, call) for call in calls)]
    rest = (clauses.conjuncts[-1][1] if clauses.conjuncts else from_end, len(tokens))
    if any(_multiplies(tokens, span) for span in ((verb + 1, from_at), *asking, rest)):
        return None
    pieces: list[Piece] = [(start, verb), " SELECT count(*) ", (from_at, from_end), " WHERE TRUE"]
    for span in clauses.conjuncts:
        if span not in asking:
            pieces += [" AND (", span, ")"]
    return pieces


def _contains(span: Range, call: FoundCall) -> bool:
    return span[0] <= call.first < span[1]


def _multiplies(tokens: list[Token], span: Range) -> bool:
    """Return whether calls may outnumber rows: a subquery, or a function that makes rows."""
    return any(
        token.kind is TokenKind.WORD and token.upper in _MORE_ROWS
        for token in tokens[span[0] : span[1]]
    )


def _first_of(tokens: list[Token], first: int, words: Set[str]) -> int:
    """Return the index of the first of some words outside brackets, ``len(tokens)`` if none."""
    depth = 0
    for index in range(first, len(tokens)):
        depth += depth_change(tokens[index])
        if depth == 0 and tokens[index].kind is TokenKind.WORD and tokens[index].upper in words:
            return index
    return len(tokens)


_CLAUSES: Final = frozenset(
    {"with", "from", "joins", "laterals", "where", "expressions", "order", "limit", "offset"}
    | {"kind", "hint"}
)
_SOURCES: Final = frozenset({"with", "from", "joins", "laterals", "order", "limit", "offset"})
_NOT_OF_A_SUBQUERY: Final = VALUE_NAMES | {"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"}


_CALLED: Final = re.compile(r"tierkv\.ai_call\((\d+, )")
_NEVER: Final = "pg_catalog.current_setting('tierkv.round', true) OPERATOR(pg_catalog.=) 'never'"
"""Always false, but not known as a constant to PostgreSQL: a branch behind this condition is read,
and never computed."""


def stops_early(tree: exp.Expr | None, *, ordered: bool) -> bool:
    """Return whether a LIMIT may need fewer rows than pass WHERE, given rows in final order.

    Args:
        tree: the statement.
        ordered: the statement must have an ORDER BY (True), or must have none (False).
    """
    if not isinstance(tree, exp.Select) or tree.args.get("limit") is None:
        return False
    if bool(tree.args.get("order")) != ordered:
        return False
    where = tree.args.get("where")
    if where is None or not any(map(has_site, conjuncts_of(where.this))):
        return False
    for key, value in tree.args.items():
        name = key.strip("_")
        if value and name not in _CLAUSES:
            return False
        if name in _SOURCES and any(map(has_site, _nodes(value))):
            return False
    return all(map(plain_output, tree.expressions))


def early_rows(
    tokens: list[Token], placement: Placement, rewriter: SqlRewriter
) -> FilterPlan | None:
    """Write ``SELECT .. FROM t WHERE filters ORDER BY .. LIMIT n`` over a sorted subquery of t.

    None without a sort, or if the rewritten text may differ in meaning.
    """
    tree = placement.tree
    if not isinstance(tree, exp.Select) or not stops_early(tree, ordered=True):
        return None
    clauses = select_clauses(tokens, main_verb(tokens))
    parts = conjuncts_of(tree.args["where"].this)
    if clauses is None or clauses.order is None or len(parts) != len(clauses.conjuncts):
        return None
    name = _only_relation(tree)
    columns = None if name is None else _columns(tree, parts, name)
    keys = _keys(tokens, tree, clauses)
    if name is None or columns is None or keys is None:
        return None
    if any(token.upper == "TIES" for token in tokens[clauses.order[1] :]):
        return None
    spans = list(zip(parts, clauses.conjuncts, strict=True))
    items_end = clauses.items[-1][1]
    head: list[Piece] = [(0, items_end), f" FROM (SELECT {columns} "]
    head += [(items_end, clauses.conjuncts[0][0] - 1), " WHERE TRUE"]
    for part, span in spans:
        if not has_site(part):
            head += [" AND (", span, ")"]
    head += [*keys, f" OFFSET 0) AS {quoted_name(name)} WHERE "]
    filters = tuple(rewriter.rewrite(("(", span, ")")) for part, span in spans if has_site(part))
    tail = rewriter.rewrite((" ", (clauses.order[1], clauses.last)))
    return FilterPlan(rewriter.rewrite(head), filters, tail)


@dataclass(frozen=True, slots=True)
class CursorRows:
    """A query with AI calls answered while rows are fetched.

    Attributes:
        rows: the query; makes calls row by row.
        stages: queries; each gives one row per row before the filters, all in the same order. Each
            stage makes calls that need the answers of earlier stages. The first column of the last
            stage says if the row passes.
    """

    rows: RewrittenSql
    stages: tuple[RewrittenSql, ...]


def cursor_rows(
    tokens: list[Token], placement: Placement, rewriter: SqlRewriter, kind: StatementKind
) -> CursorRows | None:
    """Write a SELECT of one table for a cursor; None if the text may differ in meaning."""
    tree = placement.tree
    if kind is not StatementKind.QUERY or rewriter.dialect is not Dialect.POSTGRES:
        return None
    clauses = select_clauses(tokens, main_verb(tokens))
    if not isinstance(tree, exp.Select) or clauses is None or not _only_plain(tree):
        return None
    where = tree.args.get("where")
    parts = conjuncts_of(where.this) if where is not None else []
    name = _only_relation(tree)
    columns = None if name is None else _columns(tree, parts, name)
    keys: list[Piece] | None = [] if clauses.order is None else _keys(tokens, tree, clauses)
    wrong = len(parts) != len(clauses.conjuncts) or len(tree.expressions) != len(clauses.items)
    if name is None or columns is None or keys is None or wrong:
        return None
    spans = list(zip(parts, clauses.conjuncts, strict=True))
    plain: list[Piece] = [" WHERE TRUE"]
    for part, span in spans:
        plain += [] if has_site(part) else [" AND (", span, ")"]
    filters: list[Range] = [span for part, span in spans if has_site(part)]
    ends = [span[0] for span in clauses.conjuncts[:1]] or [(clauses.order or (0, 0))[0] + 1]
    source_end = ends[0] - 1 if where is not None or clauses.order else clauses.last
    source: list[Piece] = [(clauses.items[-1][1], source_end)]
    base: list[Piece] = [" ", *source, *plain]
    passes = _nested(filters)
    rows: list[Piece] = [(0, clauses.items[-1][1])]
    if keys:
        base = [f" FROM (SELECT {columns} ", *source, *plain, *keys]
        base.append(f" OFFSET 0) AS {quoted_name(name)}")
        rows += [*base, " WHERE " if filters else "", *passes]
    else:
        rows += [*base, *_beside(["FALSE"], passes)]
        base += _beside(passes, ["TRUE"])
    read = f"{quoted_name(name)}.*" if columns == "*" else columns
    base = [f", CASE WHEN {_NEVER} THEN pg_catalog.num_nulls({read}) END", *base]
    head: list[Piece] = [(0, clauses.items[0][0]), " "]
    stages: list[list[Piece]] = [
        [*head, "(", *_nested(filters[: at + 1]), ")", *base] for at in range(len(filters))
    ]
    asked: list[Piece] = []
    for item, span in zip(tree.expressions, clauses.items, strict=True):
        if has_site(item):
            asked += [", " if asked else "", _without_alias(tokens, item, span)]
    case: list[Piece] = ["CASE WHEN ", *(passes or ["TRUE"]), " THEN "]
    last = [*head, *case, "TRUE END"]
    if asked:
        last += [", ", *case, "pg_catalog.num_nulls(", *asked, ") END"]
    stages.append([*last, *base])
    return CursorRows(
        _for_later(rewriter.rewrite(rows)),
        tuple(_for_later(rewriter.rewrite(stage, named=False)) for stage in stages),
    )


def _for_later(text: RewrittenSql) -> RewrittenSql:
    """Let calls see new answers since the query began."""
    return replace(text, text=_CALLED.sub(r"tierkv.ai_next(\1", text.text))


def _beside(never: list[Piece], told: list[Piece]) -> list[Piece]:
    """Write a condition whose planner cost stays the same when both branches are swapped."""
    if not never or not told:
        return []
    return [f" AND CASE WHEN {_NEVER} THEN ", *never, " ELSE ", *told, " END"]


def _nested(filters: list[Range]) -> list[Piece]:
    pieces: list[Piece] = []
    for span in filters[:-1]:
        pieces += ["CASE WHEN (", span, ") THEN "]
    for span in filters[-1:]:
        pieces += ["(", span, ")"]
    return [*pieces, " END" * (len(filters) - 1)] if filters else []


def _only_plain(tree: exp.Select) -> bool:
    """Return whether a second run gives the same rows, and no NULL answer can cause an error."""
    if tree.args.get("limit") or tree.args.get("offset") or tree.args.get("with_"):
        return False
    if any(value and key.strip("_") not in _CLAUSES for key, value in tree.args.items()):
        return False
    source = tree.args.get("from_") or tree.args.get("from")
    table = source.this if source is not None else None
    named = {"this", "db", "catalog", "alias"}
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        return False
    if any(value and key not in named for key, value in table.args.items()):
        return False
    nodes = [node for node in tree.walk() if site_number(node) is not None]
    if any(has_site(child) for node in nodes for child in children_of(node)):
        return False
    ordered = tree.args.get("order")
    keys = [key.this for key in ordered.expressions] if ordered is not None else []
    where = tree.args.get("where")
    parts = conjuncts_of(where.this) if where is not None else []
    for part in (*tree.expressions, *parts, *keys):
        if not plain_output(part) or (has_site(part) and part.find(exp.Coalesce, exp.Concat)):
            return False
    return not any(map(has_site, keys))


def _nodes(value: object) -> Iterator[exp.Expr]:
    for node in value if isinstance(value, list) else [value]:
        if isinstance(node, exp.Expr):
            yield node


def _only_relation(tree: exp.Select) -> exp.Identifier | None:
    """Return the name of the only relation in FROM; None for several or an unnamed relation."""
    source = tree.args.get("from") or tree.args.get("from_")
    if source is None or tree.args.get("joins") or tree.args.get("laterals"):
        return None
    relation = source.this
    if not isinstance(relation, exp.Table | exp.Subquery) or relation.args.get("joins"):
        return None
    alias = relation.args.get("alias")
    if isinstance(alias, exp.TableAlias) and alias.args.get("columns"):
        return None
    named = alias.this if isinstance(alias, exp.TableAlias) else relation.this
    return named if isinstance(named, exp.Identifier) else None


def _columns(tree: exp.Select, parts: list[exp.Expr], name: exp.Identifier) -> str | None:
    """Write the columns read by items and filters; None if a name may not be a column.

    Only these columns: the user may lack permission to read others.
    """
    relation = quoted_name(name)
    found: dict[str, str] = {}
    for node in (*tree.expressions, *filter(has_site, parts)):
        if node.find(exp.Query, exp.Star) and not isinstance(node, exp.Star | exp.Column):
            return None
        if isinstance(node, exp.Star) or isinstance(node.args.get("this"), exp.Star):
            found["*"] = "*"
            continue
        for column in node.find_all(exp.Column):
            *qualifier, last = map(quoted_name, column.parts)
            if qualifier not in ([], [relation]) or (not qualifier and last == relation):
                return None
            if column.name.lower() in _NOT_OF_A_SUBQUERY:
                return None
            found.setdefault(last, ".".join((*qualifier, last)))
    return "*" if "*" in found else ", ".join(found.values()) or "1 AS tierkv_one"


def _keys(tokens: list[Token], tree: exp.Select, clauses: SelectClauses) -> list[Piece] | None:
    """Write ORDER BY without names or numbers of items; None if that is impossible."""
    assert clauses.order is not None
    first, last = clauses.order
    spans = split_at(tokens, first + 2, last, ",")
    keys = [
        key.this if isinstance(key, exp.Ordered) else key for key in tree.args["order"].expressions
    ]
    if len(spans) != len(keys) or len(clauses.items) != len(tree.expressions):
        return None
    pieces: list[Piece] = [" ORDER BY "]
    for number, (key, span) in enumerate(zip(keys, spans, strict=True)):
        item = _item_of(key, tree)
        pieces.append(", " if number else "")
        if item is None:
            pieces.append(span)
            continue
        if has_site(tree.expressions[item]) or tree.find(exp.Star) or item >= len(clauses.items):
            return None
        item_span = _without_alias(tokens, tree.expressions[item], clauses.items[item])
        pieces += ["(", item_span, ") ", (span[0] + 1, span[1])]
    return pieces


def _item_of(key: exp.Expr, tree: exp.Select) -> int | None:
    """Return the item named by a key of ORDER BY, by number from 0."""
    if isinstance(key, exp.Literal) and not key.is_string:
        return int(key.name) - 1 if key.name.isdigit() else None
    if isinstance(key, exp.Column) and len(key.parts) == 1:
        for number, item in enumerate(tree.expressions):
            alias = item.args.get("alias")
            if isinstance(alias, exp.Identifier) and quoted_name(alias) == quoted_name(key.this):
                return number
    return None


def _without_alias(tokens: list[Token], item: exp.Expr, span: Range) -> Range:
    if not isinstance(item, exp.Alias):
        return span
    return span[0], span[1] - (2 if tokens[span[1] - 2].upper == "AS" else 1)
