"""Streamed execution of a statement: a base query, then filters and outputs over windows of rows.

The *base* is the user's own query without AI calls. The base gives the columns without answers, the
text sent by each call, and the columns read by expressions around calls. Filters (AI conjuncts of
WHERE) and outputs (items with AI calls) are again the user's own expressions, over a window of the
base's rows, ``tierkv_rows``. A statement is streamed only if the result is certainly the same;
otherwise the plan gives the reason for not streaming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sqlglot import exp

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.dialect import Dialect
from tierkv.sql.calls.functions import Returns
from tierkv.sql.calls.placement import Placement, children_of, has_site, site_number
from tierkv.sql.plan.rewrite import CallText, Computed, Piece, RewrittenSql, SqlRewriter
from tierkv.sql.plan.stream_shape import (
    AROUND_CALLS,
    CAST_TO,
    ItemNames,
    NotStreamableError,
    call_arguments,
    check_aliases,
    check_moved,
    check_never_fails,
    check_shape,
    compares,
    conjuncts_of,
    guards,
    item_nodes,
    items_ordered_by,
    reads_plain_column,
    shown,
)
from tierkv.sql.text.clauses import (
    Range,
    RowLimits,
    SelectClauses,
    number_of_rows,
    row_limits,
    select_clauses,
)
from tierkv.sql.text.lexer import Token
from tierkv.sql.text.statement import main_verb

WINDOW_ROWS: Final = "tierkv_rows"
"""The relation read by a window's statements; the executor puts its definition in front."""

ROW_NUMBER: Final = "tierkv_n"
"""The first column of the relation: the row's number in the window."""

WINDOW_FUNCTION: Final = "tierkv_window"
"""The engine function that returns a cell: column (counted from the session's key base), row."""

_NO_TEXT: Final = frozenset({Returns.BOOLEAN, Returns.DOUBLE, Returns.INTEGER, Returns.VECTOR})
"""Answers without a collation."""

_SAME_AS_TEXT: Final = re.compile(
    r"BOOLEAN|U?(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT)|FLOAT|DOUBLE|DECIMAL\(\d+,\d+\)"
    r"|DATE|TIME|TIMESTAMP|UUID|VARCHAR|JSON"
)
"""Types whose values survive a cast to text and back unchanged."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A column of the base query for window statements.

    Attributes:
        name: name of the column, in the base and in the window.
        is_call_text: the text sent by a call, or NULL; False: a column named by the user's query.
        compared: the column, or the answer to its text, is compared; collations matter then.
    """

    name: str
    is_call_text: bool
    compared: bool = False


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The texts of a streamed statement.

    Attributes:
        base_sql: its last columns are ``bound``, as text; items with calls are ``placeholders``,
            NULL.
        types_sql: like ``base_sql``, with ``bound`` in original types, to find these types.
        bound: columns of the base for filters and outputs.
        placeholders: names of the base's columns to be replaced by outputs.
        filters: each returns the numbers of the window's rows that pass.
        outputs_sql: the columns in place of ``placeholders``, for every row of a window; None
            without placeholders.
        limit: largest number of rows; None is no limit. ``limit`` and ``offset`` count rows that
            passed the filters; without filters the base applies both.
        offset: rows to skip.
        limit_name: the parameter for the limit; empty if the limit is not a parameter.
        offset_name: the parameter for the offset; empty if the offset is not a parameter.
    """

    base_sql: RewrittenSql
    types_sql: RewrittenSql
    bound: tuple[Bound, ...]
    placeholders: tuple[str, ...]
    filters: tuple[RewrittenSql, ...]
    outputs_sql: RewrittenSql | None
    limit: int | None = None
    offset: int = 0
    limit_name: str = ""
    offset_name: str = ""

    def with_limits(self, params: Mapping[str, object]) -> StreamPlan | None:
        """Take LIMIT and OFFSET from parameters; None if a value is not a number of rows."""
        if not (self.limit_name or self.offset_name):
            return self
        limit, offset = self.limit, self.offset
        if self.limit_name and params.get(self.limit_name) is not None:
            limit = number_of_rows(params[self.limit_name])
            if limit is None:
                return None
        if self.offset_name:
            skipped = number_of_rows(params.get(self.offset_name) or 0)
            if skipped is None:
                return None
            offset = skipped
        return replace(self, limit=limit, offset=offset)


def why_not_bound(bound: Bound, type_name: str) -> str:
    """Return why window statements can't read a column of a type; empty if they can."""
    if bound.is_call_text:
        return ""
    if not _SAME_AS_TEXT.fullmatch(type_name):
        return f"a column of type {type_name} stands beside an AI call"
    if bound.compared and type_name in ("VARCHAR", "JSON"):
        return "a comparison beside an AI call has a column of text"
    return ""


def window_statement(
    sql: RewrittenSql, bound: Sequence[Bound], types: Sequence[str], *, key_base: int, rows: int
) -> RewrittenSql:
    """Put the definition of the window's rows in front of a filter or of the outputs.

    Args:
        sql: a text of a StreamPlan.
        bound: bound columns of the StreamPlan.
        types: types of ``bound``.
        key_base: key base of the session, see ``plan_statement``.
        rows: number of rows in the window.
    """
    cells = (
        f", {_cell(column, type_name, key_base + number)} AS {column.name}"
        for number, (column, type_name) in enumerate(zip(bound, types, strict=True))
    )
    head = (
        f"WITH {WINDOW_ROWS} AS (SELECT range AS {ROW_NUMBER}{''.join(cells)} "
        f"FROM range({int(rows)})) "
    )
    marks = tuple((offset + len(head), source) for offset, source in sql.marks)
    return RewrittenSql(head + sql.text, marks, sql.parameters)


def _cell(column: Bound, type_name: str, key: int) -> str:
    text = f"{WINDOW_FUNCTION}({key}, range)"
    return text if column.is_call_text else f"CAST({text} AS {type_name})"


def stream_plan(
    tokens: list[Token],
    calls: Sequence[FoundCall],
    placement: Placement,
    rewriter: SqlRewriter,
) -> StreamPlan:
    """Plan a statement as a stream.

    Args:
        tokens: tokens of the statement.
        calls: calls by number.
        placement: places of the calls, from ``place_calls``.
        rewriter: rewriter of the statement.

    Raises:
        NotStreamableError: the reason, worded to follow "not streamed:".
    """
    return _builder(tokens, calls, placement, rewriter).build()


def top_plan(
    tokens: list[Token],
    calls: Sequence[FoundCall],
    placement: Placement,
    rewriter: SqlRewriter,
) -> StreamPlan | None:
    """Plan a SELECT ordered by answers with a LIMIT: make other calls only for the result rows.

    The base is the statement with the calls of its ORDER BY and WHERE, without filters. None for
    any other statement, or when no calls remain.
    """
    tree = placement.tree
    if not isinstance(tree, exp.Select) or tree.args.get("limit") is None:
        return None
    if rewriter.dialect is not Dialect.DUCKDB:
        return None
    kept = items_ordered_by(tree)
    if kept is None:
        return None
    try:
        plan = _builder(tokens, calls, placement, rewriter, kept).build()
    except NotStreamableError:
        return None
    return plan if plan.placeholders else None


def _builder(
    tokens: list[Token],
    calls: Sequence[FoundCall],
    placement: Placement,
    rewriter: SqlRewriter,
    kept: frozenset[int] | None = None,
) -> _StreamBuilder:
    tree = placement.tree
    if not isinstance(tree, exp.Select):
        raise NotStreamableError("it is not one plain SELECT")
    clauses = select_clauses(tokens, main_verb(tokens))
    if clauses is None or len(clauses.items) != len(tree.expressions):
        raise NotStreamableError("its select list is not understood")
    check_shape(tree, ordered_by_answers=kept is not None)
    check_aliases(tokens, tree, kept or frozenset())
    where = tree.args.get("where")
    parts = conjuncts_of(where.this) if where is not None else []
    if len(parts) != len(clauses.conjuncts):
        raise NotStreamableError("its WHERE is not understood")
    return _StreamBuilder(tokens, calls, placement, rewriter, tree, clauses, parts, kept)


_Cut = tuple[Range, str]
"""Tokens and their replacement text."""


@dataclass(slots=True)
class _StreamBuilder:
    """Builds the texts of one statement's stream."""

    tokens: list[Token]
    calls: Sequence[FoundCall]
    placement: Placement
    rewriter: SqlRewriter
    tree: exp.Select
    clauses: SelectClauses
    parts: list[exp.Expr]
    kept: frozenset[int] | None = None
    bound: list[Bound] = field(default_factory=list)
    bound_pieces: list[Piece] = field(default_factory=list)
    call_texts: dict[int, str] = field(default_factory=dict)
    columns: dict[int, tuple[int, str]] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)

    def build(self) -> StreamPlan:
        filters = [
            (part, span)
            for part, span in zip(self.parts, self.clauses.conjuncts, strict=True)
            if has_site(part) and self.kept is None
        ]
        items = zip(self.tree.expressions, self.clauses.items, strict=True)
        outputs = [
            (item, span)
            for number, (item, span) in enumerate(items)
            if has_site(item) and number not in (self.kept or ())
        ]
        for part, _ in (*filters, *outputs):
            self._bind(part, compared=False)
        names = ItemNames(self.tree)
        for number, part in enumerate((*self.tree.expressions, *self.parts)):
            if has_site(part):
                check_moved(names, part, number)
        for item in self.tree.expressions:
            if has_site(item):
                if filters or guards(item):
                    check_never_fails(call_arguments(item))
            elif filters:
                check_never_fails([item])
        for part, _ in filters:
            if guards(part):
                check_never_fails(call_arguments(part))
        if any(
            isinstance(node, exp.Anonymous) and site_number(node) is None
            for node in item_nodes(self.tree)
        ):
            self._check_binder_sees_aggregates()
        self._check_no_collation()
        computed = Computed(self.call_texts, self.columns)
        cuts = self._cuts([span for _, span in filters], [span for _, span in outputs])
        limits = self._limits() if filters else RowLimits()
        return StreamPlan(
            base_sql=self.rewriter.rewrite(self._base(cuts, as_text=True), named=False),
            types_sql=self.rewriter.rewrite(self._base(cuts, as_text=False), named=False),
            bound=tuple(self.bound),
            placeholders=tuple(_placeholder(index) for index in range(len(outputs))),
            filters=tuple(
                self.rewriter.rewrite(
                    (f"SELECT {ROW_NUMBER} FROM {WINDOW_ROWS} WHERE (", span, ")"), computed
                )
                for _, span in filters
            ),
            outputs_sql=self._outputs([span for _, span in outputs], computed),
            limit=_number(limits.limit),
            offset=_number(limits.offset) or 0,
            limit_name=_name(limits.limit),
            offset_name=_name(limits.offset),
        )

    def _outputs(self, spans: list[Range], computed: Computed) -> RewrittenSql | None:
        if not spans:
            return None
        pieces: list[Piece] = ["SELECT "]
        for index, span in enumerate(spans):
            pieces += [", " if index else "", span]
        return self.rewriter.rewrite(
            (*pieces, f" FROM {WINDOW_ROWS} ORDER BY {ROW_NUMBER}"), computed
        )

    def _cuts(self, filters: list[Range], outputs: list[Range]) -> list[_Cut]:
        """Return the parts replaced in the base: filters become TRUE, and outputs NULL."""
        cuts: list[_Cut] = [(span, "TRUE") for span in filters]
        cuts += [(span, f"NULL AS {_placeholder(index)}") for index, span in enumerate(outputs)]
        if filters and self.clauses.limits is not None:
            cuts.append((self.clauses.limits, ""))
        return sorted(cuts)

    def _base(self, cuts: list[_Cut], *, as_text: bool) -> list[Piece]:
        """Copy the statement without the cuts, and add the bound columns to its select list."""
        end_of_items = self.clauses.items[-1][1]
        bound: list[Piece] = []
        for column, piece in zip(self.bound, self.bound_pieces, strict=True):
            cast = as_text and not column.is_call_text
            opening, closing = ("CAST(", " AS VARCHAR)") if cast else ("", "")
            bound += [f", {opening}", piece, f"{closing} AS {column.name}"]
        pieces: list[Piece] = []
        at = 0
        for (first, last), instead in cuts:
            if at <= end_of_items <= first and bound:
                pieces += [(at, end_of_items), *bound, " "]
                at, bound = end_of_items, []
            pieces += [(at, first), f" {instead} "]
            at = last
        if bound:
            pieces += [(at, end_of_items), *bound, " "]
            at = end_of_items
        return [*pieces, (at, self.clauses.last)]

    def _bind(self, node: exp.Expr, *, compared: bool) -> None:
        """Name the columns and call texts taken from the base by an expression around calls."""
        number = site_number(node)
        if number is not None:
            call = self.calls[number]
            if any(map(has_site, children_of(node))):
                raise NotStreamableError("an AI call is an argument of another")
            collated = compared and call.function.returns not in _NO_TEXT
            name = self._new_bound(is_call_text=True, compared=collated)
            self.call_texts[call.first] = name
            self.bound_pieces.append(CallText(call.first))
            return
        if isinstance(node, exp.Column):
            self._bind_column(node, compared=compared)
            return
        if not isinstance(node, AROUND_CALLS):
            raise NotStreamableError(f"an AI call is inside {shown(node)}")
        if isinstance(node, exp.DataType) and node.this.value not in CAST_TO:
            raise NotStreamableError(f"an answer is cast to {node.sql(dialect='duckdb')}")
        for child in children_of(node):
            self._bind(child, compared=compared or compares(node))

    def _bind_column(self, node: exp.Column, *, compared: bool) -> None:
        first, last = self._tokens_of(node)
        key = " ".join(token.text for token in self.tokens[first:last])
        at = self._names.get(key)
        if at is None:
            at = self._names[key] = len(self.bound)
            self._new_bound(is_call_text=False, compared=compared)
            self.bound_pieces.append((first, last))
        seen = self.bound[at]
        self.bound[at] = Bound(seen.name, False, seen.compared or compared)
        self.columns[first] = (last, seen.name)

    def _new_bound(self, *, is_call_text: bool, compared: bool) -> str:
        name = f"tierkv_bound_{len(self.bound)}"
        self.bound.append(Bound(name, is_call_text, compared))
        return name

    def _tokens_of(self, node: exp.Column) -> Range:
        starts = [part.meta.get("start") for part in node.parts]
        by_offset = {token.start: index for index, token in enumerate(self.tokens)}
        origin = self.tokens[0].start
        found = [
            None if at is None else by_offset.get(self.placement.source_offset(at) + origin)
            for at in starts
        ]
        if None in found or isinstance(node.this, exp.Star):
            raise NotStreamableError(f"{shown(node)} is used with an AI call")
        indexes = [index for index in found if index is not None]
        return min(indexes), max(indexes) + 1

    def _check_binder_sees_aggregates(self) -> None:
        """Require a plain column if a function is unknown: the engine then refuses aggregates."""
        plain = any(not bound.is_call_text for bound in self.bound) or any(
            reads_plain_column(argument)
            for part in (*self.tree.expressions, *self.parts)
            for argument in call_arguments(part)
        )
        if not plain:
            raise NotStreamableError("a function in its select list may be an aggregate")

    def _check_no_collation(self) -> None:
        """Answers are compared by the argument's collation, which a window's text has lost."""
        compared = any(bound.is_call_text and bound.compared for bound in self.bound)
        if compared and any(token.upper == "COLLATE" for token in self.tokens):
            raise NotStreamableError("COLLATE may affect how an AI answer is compared")

    def _limits(self) -> RowLimits:
        if self.clauses.limits is None:
            limits = None if self.tree.args.get("limit") is not None else RowLimits()
        else:
            limits = row_limits(self.tokens, *self.clauses.limits, self.rewriter.parameter_name)
        if limits is None:
            raise NotStreamableError("its LIMIT is not a plain number")
        return limits


def _number(value: int | str | None) -> int | None:
    return value if isinstance(value, int) else None


def _name(value: int | str | None) -> str:
    return value if isinstance(value, str) else ""


def _placeholder(index: int) -> str:
    return f"tierkv_item_{index}"
