"""In which order the context fields of a call's rows stand, so that rows share long beginnings.

Pure. A statement keeps one FieldOrders; each batch of calls asks it before prompts are written. The
order never changes which call an answer belongs to, and no field is added, dropped or changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierkv.dbfront.calls.field_table import FieldTable
from tierkv.sql.calls.field_reorder import FieldReorder

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
