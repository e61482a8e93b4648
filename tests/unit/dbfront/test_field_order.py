"""Which order the fields of a call's rows get, on tables small enough to see it."""

from __future__ import annotations

import pytest

from tierkv.dbfront.calls.field_order import FieldOrders, FieldTable, order_fields, statistics_order
from tierkv.sql.settings import FieldReorder

OFF, STATS = FieldReorder


def reviews(products: int, each: int) -> list[dict[str, str]]:
    """Reviews of products; a product's name says what its category is."""
    return [
        {
            "review": f"review {number} of {product}, long enough to matter",
            "product": f"product {product} with a name",
            "category": f"category {product % 2}",
        }
        for number in range(each)
        for product in range(products)
    ]


def test_off_leaves_every_row_as_it_is_written() -> None:
    rows = [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {}]
    assert order_fields(rows, method=OFF) == [("a", "b"), ("b", "a"), ()]


@pytest.mark.parametrize("method", FieldReorder)
def test_no_rows_have_no_orders(method: FieldReorder) -> None:
    assert order_fields([], method=method) == []


def test_what_many_rows_repeat_comes_first_and_what_it_determines_before_it() -> None:
    """The product scores more than the category, but says which one it is."""
    orders = order_fields(reviews(4, 5), method=STATS)
    assert set(orders) == {("category", "product", "review")}


def test_statistics_that_say_nothing_leave_the_order_as_written() -> None:
    rows = [{"zeta": f"{n}", "alpha": f"value {n}"} for n in range(5)]
    assert set(order_fields(rows, method=STATS)) == {("zeta", "alpha")}


def test_the_written_order_stays_where_statistics_would_be_worse() -> None:
    """Three equal values of ``b`` save most at first, but each pair of ``a`` is torn apart then."""
    rows = [
        {"a": "x", "b": "rrrrrr"},
        {"a": "long value", "b": "rrrrrr"},
        {"a": "x", "b": "rrrrrr"},
        {"a": "long value", "b": "another value"},
    ]
    table = FieldTable(rows)
    assert statistics_order(table, table.beginnings(())) == [1, 0]
    assert set(order_fields(rows, method=STATS)) == {("a", "b")}


def test_the_order_of_scores_stays_where_counting_behind_others_would_be_worse() -> None:
    """``a`` saves most at first; the score, which takes repeats as a share, says ``b``."""
    rows = [
        {"a": "yyyyyyyy", "b": "q"},
        {"a": "yyyyyyyy", "b": "q"},
        {"a": "x", "b": "another value"},
        {"a": "yyyyyyyy", "b": "another value"},
    ]
    table = FieldTable(rows)
    assert statistics_order(table, table.beginnings(())) == [0, 1]
    assert table.scores[0] < table.scores[1]
    assert set(order_fields(rows, method=STATS)) == {("b", "a")}


def test_a_field_counts_behind_those_before_it() -> None:
    """``b`` repeats more than ``c``, but not behind ``a``; ``c`` follows from ``a`` half-way."""
    rows = [
        {"c": f"c {n // 2 % 6}", "b": f"b longer {n % 5}", "a": f"a much longer value {n // 2 % 6}"}
        for n in range(24)
    ]
    rows[0]["c"] = "c other"
    assert set(order_fields(rows, method=STATS)) == {("a", "c", "b")}


def test_columns_that_say_the_same_stand_together_as_written() -> None:
    rows = [
        {"id": f"{n}", **{f"same {c}": f"{c} of group {n % 3}" for c in range(40)}, "all": "equal"}
        for n in range(30)
    ]
    order = ("all", *(f"same {column}" for column in range(40)), "id")
    assert set(order_fields(rows, method=STATS)) == {order}


def test_a_row_leaves_out_what_it_does_not_have() -> None:
    rows = [
        {"id": "1", "product": "a lamp for the desk", "city": "Ulm"},
        {"id": "2", "product": "a lamp for the desk"},
        {"product": "a lamp for the desk", "extra": "x"},
    ]
    first, second, third = order_fields(rows, method=STATS)
    assert first[0] == second[0] == third[0] == "product"
    assert [sorted(order) for order in (first, second, third)] == [sorted(row) for row in rows]


def test_rows_behind_different_texts_share_no_field() -> None:
    """Each long value of ``a`` stands behind both heads, each short one of ``b`` behind one."""
    rows = [{"a": f"a long text {n % 2}", "b": f"b {n // 2}"} for n in range(4)]
    assert set(order_fields(rows, method=STATS)) == {("a", "b")}
    heads = ["one", "one", "two", "two"]
    assert set(order_fields(rows, method=STATS, heads=heads)) == {("b", "a")}


def test_later_batches_of_a_site_keep_the_order() -> None:
    orders = FieldOrders(STATS)
    first = orders.arrange("site", reviews(4, 5))
    later = [{"category": f"other {n}", "product": "p", "review": "same"} for n in range(20)]
    assert set(orders.arrange("site", later)) == {orders.order("site")}
    assert orders.arrange("site", reviews(4, 5)) == first
    assert orders.order("site") == ("category", "product", "review")
    assert orders.order("another site") is None


def test_a_much_larger_batch_decides_again() -> None:
    orders = FieldOrders(STATS)
    assert orders.arrange(0, reviews(1, 1)) == [("review", "product", "category")]
    assert set(orders.arrange(0, reviews(4, 5))) == {("category", "product", "review")}


def test_a_field_that_the_deciding_batch_had_not_comes_last() -> None:
    orders = FieldOrders(STATS)
    orders.arrange(0, reviews(4, 5))
    row = {"zip": "1", "review": "r", "area": "2", "product": "p"}
    assert orders.arrange(0, [row]) == [("product", "review", "area", "zip")]


def test_a_call_with_many_fields_needs_no_deep_recursion() -> None:
    rows = [{f"f{column}": f"v{row >> column & 1}" for column in range(64)} for row in range(40)]
    for row, order in zip(rows, order_fields(rows, method=STATS), strict=True):
        assert sorted(order) == sorted(row)
