"""AI calls of a select list with a LIMIT, computed above the LIMIT: only for the remaining rows.

An engine computes the select list below ORDER BY and LIMIT, for every row. So ::

    SELECT id, ai_generate(body) FROM t ORDER BY id LIMIT 60

is written as ::

    SELECT #1, ai_generate(tierkv_bound_0) FROM (
      SELECT id, NULL AS tierkv_item_1, body AS tierkv_bound_0 FROM t ORDER BY id LIMIT 60)

wherever this gives the same rows: in queries, in the queries of writing statements, and in
subqueries of FROM and WITH. Omitting the rewriting only costs calls and never changes answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlglot import exp

from tierkv.sql.calls.calls import FoundCall
from tierkv.sql.calls.functions import PROMPT_TEMPLATE
from tierkv.sql.calls.placement import Placement, children_of, has_site, place_calls, site_number
from tierkv.sql.plan.rewrite import NO_LATE_ITEMS, LateItems, Piece
from tierkv.sql.plan.stream_shape import (
    NotStreamableError,
    check_aliases,
    check_shape,
    item_nodes,
    reads_plain_column,
)
from tierkv.sql.text.clauses import Range, SelectClauses, select_clauses
from tierkv.sql.text.lexer import Token, TokenKind, depth_change

_SETS: Final = frozenset({"UNION", "INTERSECT", "EXCEPT"})
_SET_WORDS: Final = frozenset({"ALL", "DISTINCT", "BY", "NAME"})
_OPENS_ROWS: Final = frozenset({"FROM", "JOIN", "AS", "MATERIALIZED", "COPY", *_SETS})
"""After one of these words a query in brackets is a source of rows, not a value."""

_LIMITS: Final = frozenset({"LIMIT", "OFFSET", "FETCH"})
_SOURCES: Final = ("from", "from_", "joins", "laterals", "with", "with_")
_NOT_LATE: Final = (exp.Query, exp.Subquery, exp.Lambda, exp.Star, exp.Columns)


def late_items(tokens: list[Token], text: str, calls: Sequence[FoundCall]) -> LateItems:
    """Find the items of every SELECT of a statement that can be computed above its LIMIT."""
    late = NO_LATE_ITEMS
    for first, last in _limited_selects(tokens):
        inside = [call for call in calls if first <= call.first < last]
        if inside:
            found = _of_select(tokens, text, (first, last), inside)
            late = late if found is None else late.joined(found)
    return late


def _limited_selects(tokens: list[Token]) -> Iterator[Range]:
    """Yield the row-producing SELECTs with a LIMIT or OFFSET."""
    for index, token in enumerate(tokens):
        if token.kind is not TokenKind.WORD or token.upper != "SELECT":
            continue
        if not _gives_rows(tokens, index) or _follows_from(tokens, index):
            continue
        last, limited = _end_of_query(tokens, index)
        if limited:
            yield index, last


def _gives_rows(tokens: list[Token], index: int) -> bool:
    before = index - 1
    if before >= 0 and tokens[before].text == "(":
        return before == 0 or tokens[before - 1].upper in _OPENS_ROWS
    while before >= 0 and tokens[before].upper in _SET_WORDS:
        before -= 1
    return before < 0 or tokens[before].upper not in _SETS


def _follows_from(tokens: list[Token], index: int) -> bool:
    """Return True for a SELECT behind its FROM, as DuckDB allows: ``FROM notes SELECT body``."""
    depth = 0
    for token in reversed(tokens[:index]):
        depth -= depth_change(token)
        if depth < 0 or token.text == ";" or (not depth and token.upper in _SETS):
            return False
        if not depth and token.upper == "FROM":
            return True
    return False


def _end_of_query(tokens: list[Token], first: int) -> tuple[int, bool]:
    """Return the end of the query at a token, and whether the query has a LIMIT."""
    depth, limited = 0, False
    for index in range(first, len(tokens)):
        token = tokens[index]
        depth += depth_change(token)
        following = tokens[index + 1].upper if index + 1 < len(tokens) else ""
        if depth < 0 or token.text == ";":
            return index, limited
        if depth or token.kind is not TokenKind.WORD:
            continue
        limited = limited or token.upper in _LIMITS
        if token.upper == "RETURNING" or (token.upper, following) in (
            ("ON", "CONFLICT"),
            ("WITH", "NO"),
            ("WITH", "DATA"),
        ):
            return index, limited
    return len(tokens), limited


def _of_select(
    tokens: list[Token], text: str, span: Range, calls: list[FoundCall]
) -> LateItems | None:
    first, last = span
    clauses = select_clauses(tokens[:last], first)
    origin = tokens[first].start
    moved = [t._replace(start=t.start - origin, end=t.end - origin) for t in tokens[:last]]
    placement = place_calls(text[origin : tokens[last - 1].end], moved, calls)
    tree = placement.tree
    if clauses is None or not isinstance(tree, exp.Select):
        return None
    if len(clauses.items) != len(tree.expressions) or not any(map(has_site, tree.expressions)):
        return None
    try:
        _check(tokens[first:last], tree, calls)
        return _SelectBuilder(tokens, origin, placement, tree, clauses).build()
    except NotStreamableError:
        return None


def _check(tokens: list[Token], tree: exp.Select, calls: Sequence[FoundCall]) -> None:
    """Refuse constructs with a different meaning above the LIMIT."""
    alone = tree.copy()
    for key in _SOURCES:
        if alone.args.get(key):
            alone.set(key, None)  # The contents of these clauses stay in place.
    check_shape(alone)
    check_aliases(tokens, tree)
    if any(call.function.aggregate for call in calls):
        raise NotStreamableError("an aggregate needs all rows")
    unknown = any(
        isinstance(node, exp.Anonymous)
        and site_number(node) is None
        and node.name.lower() != PROMPT_TEMPLATE
        for node in item_nodes(tree)
    )
    if unknown and not any(map(reads_plain_column, tree.expressions)):
        raise NotStreamableError("a function in its select list may be an aggregate")


@dataclass(slots=True)
class _SelectBuilder:
    """Builds the changes to one SELECT."""

    tokens: list[Token]
    origin: int
    placement: Placement
    tree: exp.Select
    clauses: SelectClauses
    columns: dict[int, tuple[int, str]] = field(default_factory=dict)
    bound: dict[str, Range] = field(default_factory=dict)

    def build(self) -> LateItems:
        items = list(zip(self.tree.expressions, self.clauses.items, strict=True))
        late = [has_site(item) for item, _ in items]
        for item, is_late in zip(self.tree.expressions, late, strict=True):
            if is_late:
                self._bind(item)
        last = self.clauses.items[-1]
        cuts: dict[int, tuple[int, tuple[Piece, ...]]] = {
            span[0]: (span[1], (f"NULL AS tierkv_item_{number}",))
            for number, (_, span) in enumerate(items)
            if late[number]
        }
        bound: list[Piece] = []
        for number, span in enumerate(self.bound.values()):
            bound += [", ", span, f" AS tierkv_bound_{number}"]
        if late[-1]:
            cuts[last[0]] = (last[1], (*cuts[last[0]][1], *bound))
            behind: dict[int, tuple[Piece, ...]] = {}
        else:
            behind = {last[1]: tuple(bound)}
        outer = self._outer(late)
        opening = ("SELECT ", *outer, " FROM (")
        return LateItems(
            {self.clauses.verb: opening},
            cuts,
            frozenset({self.clauses.last}),
            self.columns,
            behind,
        )

    def _outer(self, late: list[bool]) -> list[Piece]:
        spans = self.clauses.items
        stars = any(
            not is_late and list(item.find_all(exp.Star, exp.Columns))
            for item, is_late in zip(self.tree.expressions, late, strict=True)
        )
        if stars:
            return self._outer_star(late)
        pieces: list[Piece] = []
        seen: set[str] = set()
        for number, item in enumerate(self.tree.expressions):
            pieces.append(", " if number else "")
            if late[number]:
                pieces.append(spans[number])
                continue
            name = item.alias_or_name
            again = name.lower() in seen
            seen.add(name.lower())
            quoted = name.replace('"', '""')
            pieces.append(f"#{number + 1}" + (f' AS "{quoted}"' if again and name else ""))
        return pieces

    def _outer_star(self, late: list[bool]) -> list[Piece]:
        """Write a star in place of the statement's only star, before or after all other items."""
        sources = self.tree.args.get("joins") or self.tree.args.get("laterals")
        if late.count(False) != 1 or sources or (late[0] and late[-1]):
            raise NotStreamableError("its select list has items before and after a star")
        hidden = [f"tierkv_item_{number}" for number, is_late in enumerate(late) if is_late]
        hidden += [f"tierkv_bound_{number}" for number in range(len(self.bound))]
        star = f"* EXCLUDE ({', '.join(hidden)})"
        pieces: list[Piece] = []
        for number, span in enumerate(self.clauses.items):
            pieces += [", " if number else "", span if late[number] else star]
        return pieces

    def _bind(self, node: exp.Expr) -> None:
        """Name the columns that an item reads."""
        if isinstance(node, _NOT_LATE):
            raise NotStreamableError("its select list contains a subquery")
        if isinstance(node, exp.Column):
            first, last = self._tokens_of(node)
            key = " ".join(token.text for token in self.tokens[first:last])
            self.bound.setdefault(key, (first, last))
            self.columns[first] = (last, f"tierkv_bound_{list(self.bound).index(key)}")
            return
        named = isinstance(node, exp.Kwarg | exp.PropertyEQ)
        for child in [node.expression] if named else children_of(node):
            self._bind(child)

    def _tokens_of(self, node: exp.Column) -> Range:
        by_offset = {token.start - self.origin: index for index, token in enumerate(self.tokens)}
        found = [
            by_offset.get(self.placement.source_offset(at))
            for part in node.parts
            if (at := part.meta.get("start")) is not None
        ]
        indexes = [index for index in found if index is not None]
        if len(indexes) != len(node.parts):
            raise NotStreamableError("a column is not found in the text")
        return min(indexes), max(indexes) + 1
