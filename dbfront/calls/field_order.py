"""The order of the context fields of a call's rows, chosen so that rows share long beginnings.

Pure. A statement keeps one ``FieldOrders``; each batch of calls asks it before prompts are written.
``FieldTable`` holds the fields of a batch as columns of small numbers, and its statistics do not
depend on the order of rows. Fields are never added, dropped or changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import add

from tierkv.sql.calls.field_reorder import FieldReorder

ABSENT = 0
"""The number of a value that a row does not have; it is no text."""

_GLANCE_ROWS = 64
"""So many rows are enough to see of most pairs of columns that none determines the other."""


class FieldTable:
    """Rows by column.

    Attributes:
        names: the fields, in the order of the rows that name them earliest.
        values: per column the number of each row's value; ABSENT where it has none.
        lengths: per column the characters of each number's line, key and line break included.
    """

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.rows = len(rows)
        self.names = _names(rows)
        self.values: list[list[int]] = []
        self.lengths: list[list[int]] = []
        self._determines: dict[tuple[int, int], bool] = {}
        for name in self.names:
            numbers: dict[str | None, int] = {None: ABSENT}
            found = [row.get(name) for row in rows]
            for text in dict.fromkeys(found):
                numbers.setdefault(text, len(numbers))
            self.values.append(list(map(numbers.__getitem__, found)))
            around = len(name) + len(": \n")
            self.lengths.append([0, *(around + len(text) for text in numbers if text is not None)])

    @cached_property
    def characters(self) -> list[int]:
        """Per column the characters that all rows have of it."""
        return [
            sum(map(lengths.__getitem__, values))
            for values, lengths in zip(self.values, self.lengths, strict=True)
        ]

    @cached_property
    def scores(self) -> list[float]:
        """Per column the characters a row has of it, times the share of its rows that repeat.

        Ref: Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads"
        (MLSys '25, arXiv 2403.05821): average length x (1 - distinct values / rows).
        """
        scores: list[float] = []
        for column, values in enumerate(self.values):
            present = self.rows - values.count(ABSENT)
            repeats = present - (len(self.lengths[column]) - 1)
            scores.append(self.characters[column] * repeats / (self.rows * present))
        return scores

    @cached_property
    def distinct(self) -> list[int]:
        """Per column how many values it has; having none counts as one."""
        return [len(set(values)) for values in self.values]

    def determines(self, column: int, other: int) -> bool:
        """Say whether rows that are equal in ``column`` are equal in ``other``, in these rows.

        A column without equal values determines none: nothing follows from it.
        """
        pair = (self._alike[column], self._alike[other])
        if pair not in self._determines:
            self._determines[pair] = self._found_to_determine(*pair)
        return self._determines[pair]

    @cached_property
    def _alike(self) -> list[int]:
        """Per column the first one whose rows are equal and different where its own are.

        Values are numbered as they appear, so such columns have the same numbers.
        """
        first: dict[tuple[int, ...], int] = {}
        return [first.setdefault(tuple(values), at) for at, values in enumerate(self.values)]

    def _found_to_determine(self, column: int, other: int) -> bool:
        if not self.distinct[other] <= self.distinct[column] < self.rows:
            return False
        left, right = self.values[column], self.values[other]
        glance = slice(_GLANCE_ROWS)
        if len(set(zip(left[glance], right[glance], strict=True))) > len(set(left[glance])):
            return False
        return len(set(zip(left, right, strict=True))) == self.distinct[column]

    def beginnings(self, heads: Sequence[Hashable]) -> Sequence[int]:
        """Number what stands before the first field of each row; no heads are equal heads.

        A number is a multiple of the widest column's width, so that a value's can be added to it.
        """
        if not heads:
            return [0] * self.rows
        return self._numbered(heads, dict.fromkeys(heads))

    def tree_characters(self, order: Sequence[int], beginnings: Sequence[int]) -> int:
        """Count the characters that have to be computed with every row in the same order.

        That is the size of the prefix tree of the rows' lines; all others are shared.

        Args:
            order: columns.
            beginnings: of the rows, before their fields.
        """
        total = sum(self.characters)
        for column in order:
            if self.distinct[column] == self.rows:
                break  # Rows that all differ share nothing that comes later.
            branches = self._branches(column, beginnings)
            distinct = dict.fromkeys(branches)
            total -= self._shared(column, distinct)
            if len(distinct) == self.rows:
                break
            beginnings = self._numbered(branches, distinct)
        return total

    def saved(self, column: int, beginnings: Sequence[int]) -> int:
        """Count the characters of a column that rows with equal beginnings share."""
        return self._shared(column, set(self._branches(column, beginnings)))

    def behind(self, column: int, beginnings: Sequence[int]) -> Sequence[int]:
        """Number the beginnings that end with this column."""
        branches = self._branches(column, beginnings)
        return self._numbered(branches, dict.fromkeys(branches))

    def all_differ(self, beginnings: Sequence[int]) -> bool:
        """Say whether no two rows begin alike, so that nothing more is shared."""
        return len(set(beginnings)) == self.rows

    @cached_property
    def _width(self) -> int:
        return max(map(len, self.lengths), default=1)

    def _branches(self, column: int, beginnings: Sequence[int]) -> list[int]:
        return list(map(add, beginnings, self.values[column]))

    def _shared(self, column: int, branches: Collection[int]) -> int:
        """Subtract from a column's characters those of distinct branches, one each."""
        numbers = map(self._width.__rmod__, branches)
        return self.characters[column] - sum(map(self.lengths[column].__getitem__, numbers))

    def _numbered(self, keys: Sequence[Hashable], distinct: Iterable[Hashable]) -> list[int]:
        numbers = dict(zip(distinct, count(0, self._width), strict=False))
        return list(map(numbers.__getitem__, keys))


def _names(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Order the fields by the earliest place a row gives them, then by name."""
    places: dict[str, int] = {}
    for keys in {tuple(row): None for row in rows}:
        for place, name in enumerate(keys):
            places[name] = min(place, places.get(name, place))
    return tuple(sorted(places, key=lambda name: (places[name], name)))


Order = tuple[str, ...]
Fields = Mapping[str, str]

_DECIDE_AGAIN = 4
"""A batch so many times as large as the one that decided an order decides it anew."""


def order_fields(
    rows: Sequence[Fields], *, method: FieldReorder, heads: Sequence[Hashable] = ()
) -> list[Order]:
    """Say for each row in which order its fields should stand.

    Equal rows get equal orders, and a row's order is the same in whatever order the rows come.
    STATS is never worse than the order as written, counted in characters of lines that rows have
    in common from their beginning; where no row leaves fields out and all write theirs in the same
    order.

    Args:
        rows: fields by key, as written.
        method: how to decide.
        heads: per row what names the text before its fields: rows with different ones share no
            field. Empty: the same for all.

    Cost: one pass over rows x fields for each pair of fields where one may determine the other.
    """
    return FieldOrders(method).arrange(0, rows, heads=heads)


@dataclass(frozen=True, slots=True)
class _Decision:
    """How the rows of a call site are ordered.

    Attributes:
        rows: how many rows decided.
        order: of all rows.
    """

    rows: int
    order: Order


class FieldOrders:
    """The orders of one statement's call sites.

    A site keeps the order that its first batch decided, so that later batches find what earlier
    ones computed; only a batch that is several times as large decides again.
    """

    def __init__(self, method: FieldReorder) -> None:
        self._method = method
        self._decisions: dict[Hashable, _Decision] = {}

    def arrange(
        self, site: Hashable, rows: Sequence[Fields], *, heads: Sequence[Hashable] = ()
    ) -> list[Order]:
        """Order a batch of one call site's rows; see ``order_fields``."""
        if self._method is FieldReorder.OFF or not rows:
            return [tuple(row) for row in rows]
        before = self._decisions.get(site)
        if before is not None and len(rows) < _DECIDE_AGAIN * before.rows:
            return _restricted(before.order, rows)
        order = _best_for_all(FieldTable(rows), heads)
        self._decisions[site] = _Decision(len(rows), order)
        return _restricted(order, rows)

    def order(self, site: Hashable) -> Order | None:
        """Return the order that a site's rows have in common, for EXPLAIN; None if not decided."""
        decision = self._decisions.get(site)
        return None if decision is None else decision.order


def _restricted(order: Order, rows: Sequence[Fields]) -> list[Order]:
    """Take each row's own fields out of an order; those it does not know come last, by name."""
    found: dict[Order, Order] = {}
    for written in {tuple(row): None for row in rows}:
        known = tuple(name for name in order if name in written)
        found[written] = (*known, *sorted(set(written).difference(known)))
    return [found[tuple(row)] for row in rows]


def _best_for_all(table: FieldTable, heads: Sequence[Hashable]) -> Order:
    """Return the best of some orders for all rows, the first of equals."""
    roots = table.beginnings(heads)
    columns = range(len(table.names))
    candidates = (
        statistics_order(table, roots),
        sorted(columns, key=lambda column: (-table.scores[column], column)),
        list(columns),
    )
    best = min(candidates, key=lambda order: table.tree_characters(order, roots))
    return tuple(table.names[column] for column in best)


def statistics_order(table: FieldTable, roots: Sequence[int]) -> list[int]:
    """Put the column next that saves most behind those before it, each behind what it determines.

    A column that another one determines costs nothing right before it: rows that are equal in the
    one are equal in the other. Behind it, or further back, it would be computed at least as often.
    """
    return _arranged(table, range(len(table.names)), roots)


def _arranged(table: FieldTable, columns: Iterable[int], beginnings: Sequence[int]) -> list[int]:
    # What a column saves only gets less behind more columns. So the best of the old numbers is the
    # best of all once it has been counted again.
    waiting = [(-table.saved(column, beginnings), column, 0) for column in columns]
    heapq.heapify(waiting)
    order: list[int] = []
    while waiting:
        minus_saved, column, counted_at = heapq.heappop(waiting)
        if minus_saved and counted_at != len(order):
            again = (-table.saved(column, beginnings), column, len(order))
            heapq.heappush(waiting, again)
            continue
        determined = {one for _, one, _ in waiting if table.determines(column, one)}
        waiting = [entry for entry in waiting if entry[1] not in determined]
        heapq.heapify(waiting)
        coarser = [one for one in determined if table.distinct[one] < table.distinct[column]]
        alike = sorted({column, *determined}.difference(coarser))
        order += [*_arranged(table, coarser, beginnings), *alike]
        if minus_saved:
            beginnings = table.behind(column, beginnings)
            if table.all_differ(beginnings):
                waiting = [(0, one, 0) for _, one, _ in waiting]
    return order
