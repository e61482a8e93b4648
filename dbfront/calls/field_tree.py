"""Greedy Group Recursion: an order of fields for each row, as the tree that it makes.

Pure; used by dbfront/calls/field_order.py. The tree stays for the batches to come: their rows
follow the branches that are there as far as they fit, and only what is left makes new ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tierkv.dbfront.calls.field_table import ABSENT, FieldTable

MOST_STEPS: Final = 8_000_000
"""Cells of the table looked at for one batch, about 10 s; what is left is ordered by statistics."""

MOST_LEVELS: Final = 32
"""Groups within groups; what is left is ordered by statistics."""

Branch = tuple[str, str]
"""A field and its value."""


@dataclass(slots=True, eq=False)
class _Node:
    """Rows that have the same fields before them.

    Attributes:
        fields: those added by the branch to this node; rows without one of them leave it out.
        branches: nodes below, best first.
    """

    fields: tuple[str, ...] = ()
    branches: dict[Branch, _Node] = field(default_factory=dict)


class _Group(NamedTuple):
    """Rows with one value; the smallest saves most characters, and ties are by what it is."""

    minus_saved: int
    rank: int
    text: str
    column: int
    number: int


class FieldTree:
    """The tree of one call site; ``add`` only ever adds to it.

    Ref: Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads" (MLSys '25,
    arXiv 2403.05821), Greedy Group Recursion. Two differences: what a group saves is counted in
    characters; and a field that the group's determines stands before it, where other groups may
    share it.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}

    def add(
        self, rows: Sequence[Mapping[str, str]], rest: Sequence[str], heads: Sequence[Hashable] = ()
    ) -> list[tuple[str, ...]]:
        """Order a batch of rows.

        Args:
            rows: fields by key.
            rest: the order of fields that no group decides.
            heads: per row what stands before its fields; empty: the same for all.
        """
        by_head: dict[Hashable, list[int]] = {}
        for row in range(len(rows)):
            by_head.setdefault(heads[row] if heads else None, []).append(row)
        growth = _Growth(FieldTable(rows), rest)
        for head, group in by_head.items():
            root = self._roots.setdefault(head, _Node())
            growth.steps_left = MOST_STEPS * len(group) // len(rows)
            growth.place(_Place(root, growth.columns), group)
        return growth.orders


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rows have come to: a node, the columns left, the fields before it, levels below."""

    node: _Node
    columns: Sequence[int]
    before: tuple[str, ...] = ()
    levels: int = MOST_LEVELS

    def below(self, node: _Node, names: Sequence[str]) -> _Place:
        """Go down a branch."""
        left = [column for column in self.columns if names[column] not in node.fields]
        return _Place(node, left, self.before + node.fields, self.levels - 1)


class _Growth:
    """One batch being placed.

    Attributes:
        table: its rows.
        columns: all of the table's, in the order of ``rest``.
        rank: per column its place there.
        orders: per row, as far as placed.
        steps_left: cells that may still be looked at; below 0 no more groups are made.
    """

    def __init__(self, table: FieldTable, rest: Sequence[str]) -> None:
        place = {name: at for at, name in enumerate(rest)}
        self.columns = sorted(
            range(len(table.names)),
            key=lambda column: (place.get(table.names[column], len(place)), table.names[column]),
        )
        self.orders: list[tuple[str, ...]] = [()] * table.rows
        self.table = table
        self._number = {name: column for column, name in enumerate(table.names)}
        self.rank = {column: rank for rank, column in enumerate(self.columns)}
        self._determined = {
            column: sorted(
                (c for c in self.columns if c != column and table.determines(column, c)),
                key=lambda c: (table.distinct[c], self.rank[c]),
            )
            for column in self.columns
        }
        self.steps_left = 0

    def place(self, at: _Place, rows: Sequence[int]) -> None:
        """Give rows an order of the columns that are left at ``at``."""
        self.steps_left -= len(rows) * len(at.columns)
        known, rows = self._known(at, rows)
        for node, group in known:
            self.place(at.below(node, self.table.names), group)
        if at.levels and self.steps_left > 0:
            rows = self._grow(at, rows)
        names = [self.table.names[column] for column in at.columns]
        for row in rows:
            self.orders[row] = self._present(row, (*at.before, *names))

    def _known(
        self, at: _Place, rows: Sequence[int]
    ) -> tuple[list[tuple[_Node, list[int]]], Sequence[int]]:
        """Let rows follow the branches that are there; also answer those that fit none."""
        if not at.node.branches:
            return [], rows
        rank = {branch: number for number, branch in enumerate(at.node.branches)}
        nodes = list(at.node.branches.values())
        groups: dict[int, list[int]] = {}
        none = len(nodes)
        for row in rows:
            fits = (
                rank.get(self._branch(column, row), none)
                for column in at.columns
                if self.table.values[column][row] != ABSENT
            )
            groups.setdefault(min(fits, default=none), []).append(row)
        left = groups.pop(none, [])
        return [(nodes[number], group) for number, group in sorted(groups.items())], left

    def _grow(self, at: _Place, rows: Sequence[int]) -> Sequence[int]:
        """Take groups out of ``rows``, best first, and place each; answer what is left."""
        groups = _Groups(self, at.columns, rows)
        left = set(at.columns)
        while (found := groups.take()) is not None:
            column, group = found
            node = _Node(self._fields(column, left))
            at.node.branches[self._branch(column, group[0])] = node
            self.place(at.below(node, self.table.names), group)
        return sorted(groups.alive)

    def _fields(self, column: int, columns: Set[int]) -> tuple[str, ...]:
        return tuple(self.table.names[one] for one in (*self.determined(column, columns), column))

    def determined(self, column: int, columns: Set[int]) -> list[int]:
        """Return those of ``columns`` that ``column`` determines, coarse ones first."""
        return [one for one in self._determined[column] if one in columns]

    def _branch(self, column: int, row: int) -> Branch:
        table = self.table
        return table.names[column], table.texts[column][table.values[column][row]]

    def _present(self, row: int, names: Sequence[str]) -> tuple[str, ...]:
        number, values = self._number, self.table.values
        return tuple(name for name in names if name in number and values[number[name]][row])


class _Groups:
    """Rows of one node that no branch has taken yet.

    Attributes:
        alive: those rows.
    """

    def __init__(self, growth: _Growth, columns: Sequence[int], rows: Sequence[int]) -> None:
        self.alive = set(rows)
        self._growth = growth
        self._members: dict[int, dict[int, list[int]]] = {}
        self._left: dict[int, dict[int, int]] = {}
        self._worth: dict[tuple[int, int], int] = {}
        self._heap: list[_Group] = []
        left = set(columns)
        for column in columns:
            self._gather(column, rows)
            self._weigh(column, growth.determined(column, left))
        heapq.heapify(self._heap)

    def take(self) -> tuple[int, list[int]] | None:
        """Remove the group that saves most, and return its column and rows."""
        while self._heap:
            group = heapq.heappop(self._heap)
            saved = self._saved(group.column, group.number)
            if saved == -group.minus_saved:
                members = self._members[group.column][group.number]
                rows = [row for row in members if row in self.alive]
                self._remove(rows)
                return group.column, rows
            if saved:
                heapq.heappush(self._heap, group._replace(minus_saved=-saved))
        return None

    def _gather(self, column: int, rows: Sequence[int]) -> None:
        members: dict[int, list[int]] = {}
        values = self._growth.table.values[column]
        for row in rows:
            members.setdefault(values[row], []).append(row)
        members.pop(ABSENT, None)
        self._members[column] = {n: group for n, group in members.items() if len(group) > 1}
        self._left[column] = {n: len(group) for n, group in self._members[column].items()}

    def _weigh(self, column: int, determined: Sequence[int]) -> None:
        """Find what each group saves: its value and those that follow from it."""
        table, rank = self._growth.table, self._growth.rank[column]
        for number, group in self._members[column].items():
            worth = table.lengths[column][number]
            for other in determined:
                worth += table.lengths[other][table.values[other][group[0]]]
            self._worth[column, number] = worth
            saved = (len(group) - 1) * worth
            self._heap.append(_Group(-saved, rank, table.texts[column][number], column, number))

    def _saved(self, column: int, number: int) -> int:
        """Return what a group saves with the rows it still has; it only ever gets less."""
        return max(0, self._left[column][number] - 1) * self._worth[column, number]

    def _remove(self, rows: Sequence[int]) -> None:
        self.alive.difference_update(rows)
        for column, left in self._left.items():
            values = self._growth.table.values[column]
            for row in rows:
                number = values[row]
                if number in left:
                    left[number] -= 1
