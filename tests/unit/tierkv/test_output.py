"""Rows as table, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from datetime import date
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.statement_results import Column
from tierkv.output import OutputFormat, RowWriter, render_rows

COLUMNS = (Column("id", "INTEGER"), Column("text", "VARCHAR"))


def test_table_aligns_and_counts() -> None:
    text = render_rows(COLUMNS, [(1, "ab"), (10, None)], OutputFormat.TABLE)
    assert text == "id | text\n---+-----\n 1 | ab\n10 |\n(2 rows)\n"


def test_table_of_one_row_with_wide_characters_and_newline() -> None:
    text = render_rows(COLUMNS, [(1, "日本\nx")], OutputFormat.TABLE)
    assert text == "id | text\n---+-----\n 1 | 日本\n   | x\n(1 row)\n"


def test_json_keeps_null_and_dates() -> None:
    columns = (Column("d", "DATE"), Column("n", "DECIMAL(4,1)"), Column("b", "BLOB"))
    rows: list[tuple[Any, ...]] = [(date(2026, 1, 2), Decimal("1.5"), b"\x01"), (None, None, None)]
    assert json.loads(render_rows(columns, rows, OutputFormat.JSON)) == [
        {"d": "2026-01-02", "n": 1.5, "b": "01"},
        {"d": None, "n": None, "b": None},
    ]


def test_json_keeps_columns_of_one_name() -> None:
    columns = tuple(Column(name, "INTEGER") for name in ("a", "a_1", "a", "a"))
    text = render_rows(columns, [(1, 2, 3, 4)], OutputFormat.JSON)
    assert json.loads(text) == [{"a": 1, "a_1": 2, "a_2": 3, "a_3": 4}]


@given(st.lists(st.tuples(st.integers(), st.text(st.characters(exclude_characters="\r\0")))))
def test_csv_reads_back(rows: list[tuple[int, str]]) -> None:
    text = render_rows(COLUMNS, rows, OutputFormat.CSV)
    read = list(csv.reader(io.StringIO(text)))
    assert read[0] == ["id", "text"]
    assert [(int(a), b) for a, b in read[1:]] == rows


def test_json_stays_json_for_numbers_it_does_not_know() -> None:
    columns = (Column("a", "DOUBLE"), Column("b", "DOUBLE[]"), Column("c", "DECIMAL"))
    rows = [(float("inf"), [float("nan"), 1.5], Decimal("NaN"))]
    text = render_rows(columns, rows, OutputFormat.JSON)
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == [
        {"a": "Infinity", "b": ["NaN", 1.5], "c": "NaN"}
    ]


@given(
    st.lists(st.tuples(st.integers(), st.text(st.characters(exclude_characters="\r\0")))),
    st.integers(1, 5),
    st.sampled_from((OutputFormat.JSON, OutputFormat.CSV)),
)
def test_rows_in_pieces_are_the_same_text(
    rows: list[tuple[int, str]], size: int, output: OutputFormat
) -> None:
    writer = RowWriter(COLUMNS, output)
    pieces = [writer.rows(rows[at : at + size]) for at in range(0, len(rows), size)]
    assert "".join(pieces) + writer.end() == render_rows(COLUMNS, rows, output)


def test_a_table_in_pieces_widens_where_it_must() -> None:
    writer = RowWriter(COLUMNS, OutputFormat.TABLE)
    assert writer.rows([(1, "ab")]) == "id | text\n---+-----\n 1 | ab\n"
    assert writer.rows([(1000, "c"), (7, None)]) == "1000 | c\n   7 |\n"
    assert writer.end() == "(3 rows)\n"
    assert RowWriter(COLUMNS, OutputFormat.TABLE).end() == "id | text\n---+-----\n(0 rows)\n"
