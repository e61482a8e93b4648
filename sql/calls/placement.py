"""Placement of AI calls in their statement: clause, stage, and consequences for execution.

sqlglot's tree is only read here, to place the calls, and never converted back to text. When the
parser can't read a statement, every call is placed as unknown. Unknown places cost extra calls, but
never change answers.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import DUCKDB_INNER_PRODUCT, VECTOR_OPERATORS, Dialect
from tierkv.sql.text.lexer import Token, TokenKind

# sqlglot logs warnings about partly parsed statements; here a partial parse only costs a stage.
logging.getLogger("sqlglot").setLevel(logging.ERROR)

_SITE: Final = re.compile(r"tierkv_site_(\d+)", re.IGNORECASE)
_DISTANCES: Final = VECTOR_OPERATORS | {DUCKDB_INNER_PRODUCT}
"""sqlglot reads ``<->`` as a distance, ``<=>`` as a comparison, and no other of them."""
_MAX_PARSED_CHARS: Final = 200_000
"""Longer statements are placed as unknown: sqlglot would take seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one call.

    Attributes:
        clause: ``SELECT``, ``WHERE``, ``JOIN`` ...; ``?`` when unknown.
        stage: calls of lower stages guard this call: their answers may make the call unnecessary.
        kept_in_place: the engine should not push the call below joins and semi-joins.
        in_membership: inside the subquery of an IN, ANY or ALL. DuckDB 2.0 returns wrong rows for a
            correlated subquery with a volatile function anywhere, so no call inside is kept in
            place.
        filters: a top-level WHERE conjunct that is not true while the call is unanswered.
    """

    clause: str = "?"
    stage: int = 0
    kept_in_place: bool = False
    filters: bool = False
    in_membership: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Places by call number, and the number of rows after which an unordered LIMIT may stop.

    Attributes:
        tree: the parsed text, in which call number n is ``tierkv_site_n(...)``; None if unparsable.
        marks: (offset in the parsed text, offset in the statement), ascending.
    """

    places: dict[int, Place]
    stop_after_rows: int | None = None
    tree: exp.Expr | None = None
    marks: tuple[tuple[int, int], ...] = ()

    def place(self, number: int) -> Place:
        """Return the place of a call."""
        return self.places.get(number, Place())

    def source_offset(self, parsed: int) -> int:
        """Translate an offset in the parsed text to an offset in the statement."""
        at = bisect_right(self.marks, (parsed, 1 << 62)) - 1
        if at < 0:
            return parsed
        offset, source = self.marks[at]
        return source + parsed - offset


def place_calls(
    text: str, tokens: list[Token], calls: list[FoundCall], dialect: Dialect = Dialect.DUCKDB
) -> Placement:
    """Place the calls of one statement; call numbers are indexes into ``calls``."""
    if len(text) > _MAX_PARSED_CHARS:
        return Placement({})
    marked, marks = _marked(text, tokens, calls)
    try:
        tree = sqlglot.parse_one(marked, read=dialect.value)
        walk = _Walk()
        walk.visit(tree, 0, "?")
    except (SqlglotError, RecursionError, TypeError, AttributeError, IndexError):
        # sqlglot's parser fails on some odd text (CREATE TABLE x AS DEFAULT NO raises TypeError).
        # Places are only advice, and the engine has the last word on syntax.
        return Placement({})
    stop_after = _stop_after_rows(tree)
    if stop_after is not None:
        makes_rows = {_unnested_call(item) for item in tree.expressions}
        for number, place in walk.places.items():
            if place.clause == "WHERE" or number in makes_rows:
                walk.places[number] = replace(place, filters=True)
    return Placement(walk.places, stop_after, tree, marks)


def _marked(
    text: str, tokens: list[Token], calls: list[FoundCall]
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Give every call a unique function name; return the text and the offset marks."""
    names = {call.first: f"tierkv_site_{number}" for number, call in enumerate(calls)}
    out: list[str] = []
    marks: list[tuple[int, int]] = []
    copied = length = 0
    for index, token in enumerate(tokens):
        if index in names:
            piece = text[copied : token.start] + names[index]
        elif token.text in _DISTANCES:
            piece = f"{text[copied : token.start]}<->"
        elif token.kind is TokenKind.PARAMETER:
            piece = f"{text[copied : token.end]} "  # sqlglot takes ``$1,$`` for a quote.
        else:
            continue
        out.append(piece)
        length += len(piece)
        copied = token.end
        marks.append((length, copied))
    return "".join([*out, text[copied:]]), tuple(marks)


_PHASES: Final = {
    "with": (0, "WITH"),
    "from": (1, "FROM"),
    "joins": (2, "JOIN"),
    "laterals": (2, "JOIN"),
    "using": (2, "USING"),
    "where": (3, "WHERE"),
    "group": (4, "GROUP BY"),
    "having": (5, "HAVING"),
    "qualify": (6, "QUALIFY"),
    "order": (8, "ORDER BY"),
    "expressions": (8, "SELECT"),
    "returning": (9, "RETURNING"),
}


class _Walk:
    """One pass over the tree; fills ``places``."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}

    def visit(self, node: exp.Expr, stage: int, clause: str, kept: bool = False) -> int:
        """Place the calls below ``node``; return the stage of an expression that needs all."""
        if isinstance(node, exp.Select | exp.Update | exp.Delete):
            return self._statement(node, stage)
        number = site_number(node)
        if number is not None:
            stage = self._all(children_of(node), stage, clause, kept)
            member = _in_membership(node)
            self.places[number] = Place(clause, stage, kept and not member, in_membership=member)
            return stage + 1
        if isinstance(node, exp.Values):
            clause = "VALUES"
        if isinstance(node, exp.Returning):
            clause = "RETURNING"
        if isinstance(node, exp.Case):
            return self._case(node, stage, clause, kept)
        if isinstance(node, exp.If):
            stage = self.visit(node.this, stage, clause, kept)
            return self._all(list(children_of(node))[1:], stage, clause, kept)
        if isinstance(node, exp.Coalesce | exp.And | exp.Or):
            for child in children_of(node):
                stage = self.visit(child, stage, clause, kept)
            return stage
        return self._all(children_of(node), stage, clause, kept)

    def _all(self, nodes: Iterable[exp.Expr], stage: int, clause: str, kept: bool) -> int:
        return max((self.visit(node, stage, clause, kept) for node in nodes), default=stage)

    def _case(self, node: exp.Case, stage: int, clause: str, kept: bool) -> int:
        if node.this is not None:
            stage = self.visit(node.this, stage, clause, kept)
        ends = [stage]
        for branch in node.args.get("ifs") or ():
            stage = self.visit(branch.this, stage, clause, kept)
            ends.append(self.visit(branch.args["true"], stage, clause, kept))
        if node.args.get("default") is not None:
            ends.append(self.visit(node.args["default"], stage, clause, kept))
        return max([stage, *ends])

    def _statement(self, node: exp.Expr, stage: int) -> int:
        """Visit the clauses in the engine's order of evaluation."""
        phases: dict[int, list[tuple[str, list[exp.Expr]]]] = {}
        for key, value in node.args.items():
            phase, clause = _PHASES.get(key.strip("_"), (7, key.strip("_").upper()))
            if key == "order" and node.args.get("limit") is not None:
                phase = 7
            if key == "expressions" and isinstance(node, exp.Update):
                clause = "SET"
            children = _expressions(value)
            if children:
                phases.setdefault(phase, []).append((clause, children))
        in_expression = _is_expression_subquery(node)
        for phase in sorted(phases):
            stage = max(
                self._all(children, stage, clause, clause in ("WHERE", "JOIN") or in_expression)
                for clause, children in phases[phase]
            )
        return stage


_SOURCES_OF_ROWS: Final = (
    exp.From,
    exp.Join,
    exp.Lateral,
    exp.Insert,
    exp.Create,
    exp.Copy,
    exp.SetOperation,
    type(None),
)


def _is_expression_subquery(node: exp.Expr) -> bool:
    """Return whether a SELECT is a plain scalar, EXISTS or IN subquery.

    In these subqueries the engine would turn a correlation into a join and push a pure function
    below the join. An ORDER BY, LIMIT, GROUP BY or window above a volatile function would cost
    calls or be refused.
    """
    if not isinstance(node, exp.Select) or node.parent is None:
        return False
    if any(node.args.get(key) for key in ("order", "limit", "group", "windows", "distinct")):
        return False
    if any(node.find_all(exp.Window)):
        return False
    holder = node.parent.parent if isinstance(node.parent, exp.Subquery) else node.parent
    if isinstance(node.parent, exp.Subquery) and node.parent.arg_key in ("this", "joins"):
        return not isinstance(holder, _SOURCES_OF_ROWS)
    return isinstance(node.parent, exp.Subquery | exp.Exists | exp.In)


def _in_membership(node: exp.Expr) -> bool:
    """Return whether a node is inside the subquery of an IN, ANY or ALL, at any depth."""
    below, above = node, node.parent
    while above is not None:
        if isinstance(above, exp.Any | exp.All):
            return True
        if isinstance(above, exp.In) and below.arg_key != "this" and below.find(exp.Query):
            return True
        below, above = above, above.parent
    return False


def site_number(node: exp.Expr) -> int | None:
    """Return the call number of a node of the marked text."""
    if not isinstance(node, exp.Anonymous) or not isinstance(node.this, str):
        return None
    match = _SITE.fullmatch(node.this)
    return int(match[1]) if match else None


def children_of(node: exp.Expr) -> list[exp.Expr]:
    """Return a node's direct children."""
    return [child for value in node.args.values() for child in _expressions(value)]


def _expressions(value: object) -> list[exp.Expr]:
    if isinstance(value, exp.Expr):
        return [value]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, exp.Expr)]
    return []


_PLAIN_CLAUSES: Final = frozenset(
    {"with", "from", "joins", "where", "expressions", "limit", "offset", "kind", "hint", "laterals"}
)
_SOURCES: Final = ("with", "from", "joins", "laterals")
_PLAIN_OUTPUTS: Final = (
    exp.Column,
    exp.Identifier,
    exp.Star,
    exp.Literal,
    exp.Alias,
    exp.Paren,
    exp.Cast,
    exp.DataType,
    exp.DPipe,
    exp.Lower,
    exp.Upper,
    exp.Trim,
    exp.Anonymous,
    exp.PropertyEQ,
    exp.Var,
    exp.Null,
    exp.Boolean,
    exp.Placeholder,
    exp.Parameter,
    exp.Coalesce,
    exp.Concat,
    exp.Binary,
    exp.Substring,
    exp.Kwarg,
    exp.Array,
)
_STRICT: Final = (exp.Lower, exp.Upper, exp.Trim, exp.Cast, exp.Length, exp.Paren)
_COMPARISONS: Final = (
    exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.ILike, exp.Between, exp.In,
)  # fmt: skip


def _stop_after_rows(tree: exp.Expr) -> int | None:
    """Return LIMIT's number if its first rows are final although calls are unanswered.

    True if only conjuncts that need an answer to be true, or one UNNEST of an answer, lie between
    the calls and the rows: no order, no groups, no aggregates, and no call outside WHERE and the
    select list.
    """
    if not isinstance(tree, exp.Select) or not isinstance(tree.args.get("limit"), exp.Limit):
        return None
    count = tree.args["limit"].expression
    if not isinstance(count, exp.Literal) or count.is_string or not count.name.isdigit():
        return None
    for key, value in tree.args.items():
        name = key.strip("_")
        if value and name not in _PLAIN_CLAUSES:
            return None
        if name in _SOURCES and any(map(has_site, _expressions(value))):
            return None
    unnested = [item for item in tree.expressions if _unnested_call(item) is not None]
    rest = [item for item in tree.expressions if item not in unnested]
    if not all(map(plain_output, rest)) or (unnested and any(map(has_site, rest))):
        return None
    where = tree.args.get("where")
    conjuncts = (
        list(where.this.flatten())
        if where and isinstance(where.this, exp.And)
        else ([where.this] if where else [])
    )
    filters = [conjunct for conjunct in conjuncts if has_site(conjunct)]
    if len(unnested) > 1 or not (filters or unnested) or not all(map(_needs_answer, filters)):
        return None
    return int(count.name)


def _unnested_call(item: exp.Expr) -> int | None:
    """Return the number of the call that an output unnests; an unanswered call makes no rows."""
    node = item.this if isinstance(item, exp.Alias) else item
    if not isinstance(node, exp.Unnest | exp.Explode):
        return None
    arguments = children_of(node)
    return site_number(arguments[0]) if len(arguments) == 1 else None


def has_site(node: exp.Expr) -> bool:
    """Return whether a call is at or below a node."""
    return any(site_number(found) is not None for found in node.find_all(exp.Anonymous))


def plain_output(node: exp.Expr) -> bool:
    """Return whether an output is free of aggregates, windows, subqueries and unnest."""
    return all(
        isinstance(part, _PLAIN_OUTPUTS)
        and (not isinstance(part, exp.Anonymous) or site_number(part) is not None)
        for part in node.walk()
    )


def _needs_answer(conjunct: exp.Expr) -> bool:
    """Return whether a conjunct can only be true once its calls are answered."""
    node = conjunct.unnest()
    negated = isinstance(node, exp.Not)
    if negated:
        node = node.this.unnest()
    if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
        # IS NOT is NOT around IS in one dialect, and a separate form of IS in the other.
        return negated != bool(node.args.get("negate")) and _strict(node.this)
    if _strict(node):  # A boolean function, or its opposite.
        return True
    if not isinstance(node, _COMPARISONS) or node.args.get("query") is not None:
        return False
    return all(not has_site(child) or _strict(child) for child in children_of(node))


def _strict(node: exp.Expr) -> bool:
    if site_number(node) is not None:
        return not any(has_site(child) for child in children_of(node))
    return isinstance(node, _STRICT) and all(
        not has_site(child) or _strict(child) for child in children_of(node)
    )
