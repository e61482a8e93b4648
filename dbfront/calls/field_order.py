"""Orders and writes context fields so that the rows of a call share long prefixes.

Pure. dbfront/statement/ai_statement.py keeps one ``ContextFields`` per statement and calls
``written`` for each batch. The written text can be parsed in only one way, so no value can pass for
a field. The order of fields changes the prompt, not the call.

``FieldOrders`` chooses the orders, for each batch before prompts are written. ``FieldTable`` stores
the fields of a batch as columns of small numbers; its statistics do not depend on the order of
rows. Fields are never added, dropped or changed.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import add
from typing import Final

from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.functions import CONTEXT
from tierkv.sql.settings import FieldReorder

ABSENT = 0
"""Number for a missing value; no text has this number."""

_GLANCE_ROWS = 64
"""A sample of this size is usually enough to see that neither column of a pair determines the
other.
"""


class FieldTable:
    """Rows as columns of numbers.

    Attributes:
        names: the fields, ordered by their earliest position in any row.
        values: per column the number of each row's value; ABSENT for a missing value.
        lengths: per column the characters of each number's line, including key and line break.
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
        """Per column the total characters of its lines over all rows."""
        return [
            sum(map(lengths.__getitem__, values))
            for values, lengths in zip(self.values, self.lengths, strict=True)
        ]

    @cached_property
    def scores(self) -> list[float]:
        """Per column its average characters per row, times the share of its rows that repeat.

        Ref: Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads" (MLSys '25,
        arXiv 2403.05821): average length x (1 - distinct values / rows).
        """
        scores: list[float] = []
        for column, values in enumerate(self.values):
            present = self.rows - values.count(ABSENT)
            repeats = present - (len(self.lengths[column]) - 1)
            scores.append(self.characters[column] * repeats / (self.rows * present))
        return scores

    @cached_property
    def distinct(self) -> list[int]:
        """Per column the number of distinct values; a missing value counts as a value."""
        return [len(set(values)) for values in self.values]

    def determines(self, column: int, other: int) -> bool:
        """Return True if rows equal in ``column`` are always equal in ``other``, within this table.

        A column without repeated values determines no column.
        """
        pair = (self._alike[column], self._alike[other])
        if pair not in self._determines:
            self._determines[pair] = self._found_to_determine(*pair)
        return self._determines[pair]

    @cached_property
    def _alike(self) -> list[int]:
        """Per column the first column with the same partition of rows into equal values.

        Values are numbered in order of appearance, so columns with the same partition have the same
        numbers.
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
        """Number the text before the first field of each row; empty ``heads`` means equal text.

        Each number is a multiple of the widest column's width, so a value's number can be added.
        """
        if not heads:
            return [0] * self.rows
        return self._numbered(heads, dict.fromkeys(heads))

    def tree_characters(self, order: Sequence[int], beginnings: Sequence[int]) -> int:
        """Count the characters to compute if every row uses the same order.

        The count is the size of the prefix tree of the rows' lines; all remaining characters are
        shared.

        Args:
            order: columns.
            beginnings: numbers of the text before each row's fields.
        """
        total = sum(self.characters)
        for column in order:
            if self.distinct[column] == self.rows:
                break  # If all rows differ, later columns share nothing.
            branches = self._branches(column, beginnings)
            distinct = dict.fromkeys(branches)
            total -= self._shared(column, distinct)
            if len(distinct) == self.rows:
                break
            beginnings = self._numbered(branches, distinct)
        return total

    def saved(self, column: int, beginnings: Sequence[int]) -> int:
        """Count the characters of a column that are shared by rows with equal beginnings."""
        return self._shared(column, set(self._branches(column, beginnings)))

    def behind(self, column: int, beginnings: Sequence[int]) -> Sequence[int]:
        """Number the beginnings extended by this column."""
        branches = self._branches(column, beginnings)
        return self._numbered(branches, dict.fromkeys(branches))

    def all_differ(self, beginnings: Sequence[int]) -> bool:
        """Return True if no two rows have equal beginnings, so that nothing more can be shared."""
        return len(set(beginnings)) == self.rows

    @cached_property
    def _width(self) -> int:
        return max(map(len, self.lengths), default=1)

    def _branches(self, column: int, beginnings: Sequence[int]) -> list[int]:
        return list(map(add, beginnings, self.values[column]))

    def _shared(self, column: int, branches: Collection[int]) -> int:
        """Subtract one line per distinct branch from a column's characters."""
        numbers = map(self._width.__rmod__, branches)
        return self.characters[column] - sum(map(self.lengths[column].__getitem__, numbers))

    def _numbered(self, keys: Sequence[Hashable], distinct: Iterable[Hashable]) -> list[int]:
        numbers = dict(zip(distinct, count(0, self._width), strict=False))
        return list(map(numbers.__getitem__, keys))


def _names(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Order the fields by their earliest position in any row, then by name."""
    places: dict[str, int] = {}
    for keys in {tuple(row): None for row in rows}:
        for place, name in enumerate(keys):
            places[name] = min(place, places.get(name, place))
    return tuple(sorted(places, key=lambda name: (places[name], name)))


Order = tuple[str, ...]
Fields = Mapping[str, str]

_DECIDE_AGAIN = 4
"""A batch this many times as large as the batch behind the last decision triggers a new decision.
"""


def order_fields(
    rows: Sequence[Fields], *, method: FieldReorder, heads: Sequence[Hashable] = ()
) -> list[Order]:
    """Return for each row the order of its fields.

    Equal rows get equal orders, and a row's order does not depend on the order of rows. If no row
    leaves fields out and all rows write their fields in the same order, STATS is never worse than
    the order as written, measured in characters of shared leading lines.

    Args:
        rows: fields by key, as written.
        method: method of deciding.
        heads: per row an identifier of the text before its fields; rows with different heads share
            no field. Empty means equal text for all rows.

    Cost: one pass over rows x fields for each pair of fields in which one may determine the other.
    """
    return FieldOrders(method).arrange(0, rows, heads=heads)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The field order of a call site.

    Attributes:
        rows: number of rows behind the decision.
        order: order for all rows.
    """

    rows: int
    order: Order


class FieldOrders:
    """The field orders of one statement's call sites.

    A site keeps the order decided by its first batch, so later batches reuse the KV of earlier
    batches. Only a batch several times as large triggers a new decision.
    """

    def __init__(self, method: FieldReorder) -> None:
        self._method = method
        self._decisions: dict[Hashable, _Decision] = {}

    def arrange(
        self, site: Hashable, rows: Sequence[Fields], *, heads: Sequence[Hashable] = ()
    ) -> list[Order]:
        """Return the field orders of one call site's batch; see ``order_fields``."""
        if self._method is FieldReorder.OFF or not rows:
            return [tuple(row) for row in rows]
        before = self._decisions.get(site)
        if before is not None and len(rows) < _DECIDE_AGAIN * before.rows:
            return _restricted(before.order, rows)
        order = _best_for_all(FieldTable(rows), heads)
        self._decisions[site] = _Decision(len(rows), order)
        return _restricted(order, rows)

    def order(self, site: Hashable) -> Order | None:
        """Return the common order of a site's rows, for EXPLAIN; None if undecided."""
        decision = self._decisions.get(site)
        return None if decision is None else decision.order


def _restricted(order: Order, rows: Sequence[Fields]) -> list[Order]:
    """Restrict an order to each row's own fields; unknown fields come last, by name."""
    found: dict[Order, Order] = {}
    for written in {tuple(row): None for row in rows}:
        known = tuple(name for name in order if name in written)
        found[written] = (*known, *sorted(set(written).difference(known)))
    return [found[tuple(row)] for row in rows]


def _best_for_all(table: FieldTable, heads: Sequence[Hashable]) -> Order:
    """Return the best candidate order for all rows; ties go to the earlier candidate."""
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
    """Order columns greedily by saved characters, each right after the columns determined by it.

    A column determined by another column costs nothing right before it: rows equal in the
    determining column are equal in the determined column. In any later position the determined
    column would be computed at least as often.
    """
    return _arranged(table, range(len(table.names)), roots)


def _arranged(table: FieldTable, columns: Iterable[int], beginnings: Sequence[int]) -> list[int]:
    # The savings of a column only shrink when more columns precede it (lazy greedy). So an entry
    # that is still the best after recounting is the best of all.
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


_INDENT: Final = "  "


def render_context(fields: Mapping[str, str], order: Iterable[str]) -> str:
    """Write fields as lines in the given order; without fields the text is empty.

    The second and later lines of a value are indented by two spaces. An ambiguous key is written as
    a JSON string. Equal fields in equal order give equal text; different fields or orders never do.

    Args:
        fields: values by key.
        order: keys of ``fields``, each key once.
    """
    return "\n".join(f"{_key(name)}: {_value(fields[name])}" for name in order)


def _key(name: str) -> str:
    plain = name == name.strip() and ":" not in name and len(name.splitlines()) == 1
    return name if plain and name[0] != '"' else json.dumps(name)


def _value(value: str) -> str:
    lines = value.splitlines(keepends=True)
    if lines and lines[-1].splitlines()[0] != lines[-1]:
        lines.append("")  # A line break at the end starts another line.
    return _INDENT.join(lines)


_WRITTEN_AT_ONCE: Final = 256
"""Contexts written in the event loop, a few milliseconds of work; larger batches use a thread."""

_NOT_BEFORE: Final = frozenset({CONTEXT, "options"})
"""Arguments without influence on the text before the fields."""

_BEHIND: Final = frozenset({"input", "predicate", "criteria", "instruction", "categories"})
"""Arguments placed after the fields, if a call has an input: the input and the question about it.
"""


class ContextFields:
    """Writes contexts so that the calls of a statement share long prefixes."""

    def __init__(self, method: FieldReorder = FieldReorder.STATS) -> None:
        self._orders = FieldOrders(method)

    async def written(self, calls: Sequence[AiCall]) -> dict[AiCall, AiCall]:
        """Return the calls of a batch that have a context, with the context written as text."""
        given = [call for call in calls if call.get(CONTEXT) is not None]
        if len(given) <= _WRITTEN_AT_ONCE:
            return self._write(given)
        return await asyncio.to_thread(self._write, given)

    def _write(self, calls: Sequence[AiCall]) -> dict[AiCall, AiCall]:
        by_function: dict[str, list[AiCall]] = {}
        for call in calls:
            by_function.setdefault(call.function, []).append(call)
        written: dict[AiCall, AiCall] = {}
        for function, group in by_function.items():
            rows = [json.loads(call.text(CONTEXT)) for call in group]
            orders = self._orders.arrange(function, rows, heads=[_head(call) for call in group])
            texts = map(render_context, rows, orders)
            for call, text in zip(group, texts, strict=True):
                written[call] = call.with_context(text)
        return written


def _head(call: AiCall) -> Hashable:
    """Identify the text before a call's context; calls with different heads share no field."""
    after = _NOT_BEFORE if call.get("input") is None else _NOT_BEFORE | _BEHIND
    return tuple(argument for argument in call.arguments if argument[0] not in after)
