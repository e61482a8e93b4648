"""What holds for any rows: no field is lost, more is shared, and the order of rows is no matter."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from tierkv.dbfront.calls.field_order import FieldOrders, FieldTable, order_fields
from tierkv.sql.settings import FieldReorder

OFF, STATS = FieldReorder
Row = dict[str, str]
NAMES = ("name", "kind", "a longer name", "x", "note")

values = st.sampled_from(("", "a", "bb", "ccc", "a longer value", "another longer value"))
loose_rows = st.lists(st.dictionaries(st.sampled_from(NAMES), values), max_size=14)
methods = st.sampled_from(list(FieldReorder))


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Draw rows with the same fields in the same order, as one call site writes them."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, len(NAMES)))]
    row = st.tuples(*(values for _ in names))
    return [dict(zip(names, drawn, strict=True)) for drawn in draw(st.lists(row, max_size=14))]


@st.composite
def heads_of(draw: st.DrawFn, rows: int) -> list[str]:
    return draw(st.lists(st.sampled_from(("", "p")), min_size=rows, max_size=rows))


def computed(
    rows: Sequence[Row], orders: Sequence[tuple[str, ...]], heads: Sequence[str] = ()
) -> int:
    """Count the characters of lines that no other row has behind the same lines."""
    beginnings: dict[tuple[str, ...], int] = {}
    for number, (row, order) in enumerate(zip(rows, orders, strict=True)):
        lines = [f"{name}: {row[name]}\n" for name in order]
        head = heads[number] if heads else ""
        for stop in range(1, len(lines) + 1):
            beginnings[head, *lines[:stop]] = len(lines[stop - 1])
    return sum(beginnings.values())


@given(loose_rows, methods)
def test_every_row_keeps_its_own_fields(rows: list[Row], method: FieldReorder) -> None:
    before = [dict(row) for row in rows]
    orders = order_fields(rows, method=method)
    assert [sorted(order) for order in orders] == [sorted(row) for row in rows]
    assert rows == before


@given(loose_rows, methods, st.integers(0, 9))
def test_the_order_of_rows_is_no_matter(rows: list[Row], method: FieldReorder, seed: int) -> None:
    places = list(range(len(rows)))
    random.Random(seed).shuffle(places)
    orders = order_fields(rows, method=method)
    again = order_fields([rows[place] for place in places], method=method)
    assert again == [orders[place] for place in places]


@given(tables(), methods)
def test_equal_rows_get_equal_orders(rows: list[Row], method: FieldReorder) -> None:
    orders = order_fields(rows, method=method)
    found: dict[tuple[tuple[str, str], ...], tuple[str, ...]] = {}
    for row, order in zip(rows, orders, strict=True):
        assert found.setdefault(tuple(row.items()), order) == order


@given(tables(), st.data())
def test_statistics_compute_no_more_than_the_order_as_written(
    rows: list[Row], data: st.DataObject
) -> None:
    heads = data.draw(heads_of(len(rows)))
    written, by_statistics = (
        computed(rows, order_fields(rows, method=method, heads=heads), heads)
        for method in FieldReorder
    )
    assert by_statistics <= written


@given(tables())
def test_statistics_compute_no_more_than_the_order_of_scores(rows: list[Row]) -> None:
    """Average length x (1 - distinct values / rows), once for the whole table."""

    def score(name: str) -> float:
        found = [row[name] for row in rows]
        average = sum(len(name) + len(value) + 3 for value in found) / len(rows)
        return average * (1 - len(set(found)) / len(rows))

    by_score = tuple(sorted(rows[0], key=score, reverse=True)) if rows else ()
    orders = order_fields(rows, method=STATS)
    assert computed(rows, orders) <= computed(rows, [by_score] * len(rows))


@given(tables(), st.data())
def test_what_a_field_determines_costs_nothing_right_before_it(
    rows: list[Row], data: st.DataObject
) -> None:
    """The claim that the order by statistics rests on, for any place of the field."""
    if not rows:
        return
    table = FieldTable(rows)
    order = data.draw(st.permutations(range(len(table.names))))
    for column in order:
        for other in order[order.index(column) + 1 :]:
            if table.determines(column, other):
                rest = [one for one in order if one != other]
                at = rest.index(column)
                moved = [*rest[:at], other, *rest[at:]]
                roots = table.beginnings(())
                assert table.tree_characters(moved, roots) <= table.tree_characters(order, roots)


@given(loose_rows, loose_rows, methods)
@example(
    [
        {"name": "", "kind": "", "a longer name": "", "x": ""},
        {"a longer name": "a", "name": "", "kind": "", "x": ""},
        {"a longer name": "", "name": "a"},
    ],
    [],
    STATS,
)
def test_a_batch_asked_again_gets_the_same_orders(
    rows: list[Row], others: list[Row], method: FieldReorder
) -> None:
    orders = FieldOrders(method)
    first = orders.arrange(0, rows)
    assert orders.arrange(0, rows) == first
    later = orders.arrange(0, others)
    assert [sorted(order) for order in later] == [sorted(row) for row in others]
