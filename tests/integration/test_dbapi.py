"""``tierkv.connect()`` as PEP 249 asks: names, errors, counts, closing; scripts that forget."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def connection() -> Iterator[tierkv.Connection]:
    with tierkv.connect(dmp__capacity="64MiB", compute__threads=1) as connection:
        yield connection


def test_the_module_exports_the_exceptions_of_pep_249() -> None:
    assert issubclass(tierkv.ProgrammingError, tierkv.DatabaseError)
    assert issubclass(tierkv.InterfaceError, tierkv.Error)
    assert all(getattr(tierkv, name) is not None for name in tierkv.__all__)


def test_executemany_counts_all_rows(connection: tierkv.Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE TABLE many (id INTEGER, t VARCHAR)")
        assert cursor.rowcount == -1
        cursor.executemany("INSERT INTO many VALUES (?, ?)", [(1, "a"), (2, None), (3, "c")])
        assert cursor.rowcount == 3
        assert cursor.execute("SELECT count(*) FROM many").fetchone() == (3,)
        assert cursor.rowcount == 1


def test_streamed_rows_are_those_of_a_replay(connection: tierkv.Connection) -> None:
    text = (
        "SELECT i, ai_generate('row ' || i % 9, options => {'max_tokens': 3}) AS a "
        "FROM range(?) r(i) WHERE i % 2 = 0"
    )
    with connection.cursor() as cursor:
        cursor.execute("SET tierkv.max_concurrency = 4")
        cursor.execute("SET tierkv.execution = replay")
        replayed = cursor.execute(text, [40]).fetchall()
        cursor.execute("SET tierkv.execution = stream")
        assert list(cursor.stream(text, [40])) == replayed
        assert len(replayed) == 20
        first = next(iter(cursor.stream(text, [1_000_000_000])))
        assert first == replayed[0]
        assert cursor.execute("SELECT 42").fetchone() == (42,)
        with pytest.raises(tierkv.NotSupportedError, match="an aggregate needs all rows"):
            list(cursor.stream("SELECT count(ai_generate('a' || i)) FROM range(3) r(i)"))
        assert list(cursor.stream("SELECT 1 UNION ALL SELECT 2")) == [(1,), (2,)]


def test_values_that_nothing_uses_are_refused(connection: tierkv.Connection) -> None:
    with pytest.raises(tierkv.ProgrammingError, match=r"2 values were given.*places for 1"):
        connection.execute("SELECT ?", (1, 2))
    assert connection.execute("SELECT $1 + $1", (2,)).fetchall() == [(4,)]


def test_a_closed_cursor_or_connection_says_so() -> None:
    connection = tierkv.connect(dmp__capacity="64MiB", compute__threads=1)
    cursor = connection.execute("SELECT 1")
    other = connection.cursor()
    other.close()
    with pytest.raises(tierkv.InterfaceError, match="the cursor is closed"):
        other.fetchall()
    connection.close()
    connection.close()
    for use in (connection.cursor, connection.commit, lambda: connection.execute("SELECT 1")):
        with pytest.raises(tierkv.InterfaceError, match="the connection is closed"):
            use()
    with pytest.raises(tierkv.InterfaceError, match="the cursor is closed"):
        cursor.fetchone()


def test_connect_errors_are_errors_of_the_module() -> None:
    with pytest.raises(tierkv.Error, match="no model folder"):
        tierkv.connect(model="/nowhere/model")
    with pytest.raises(tierkv.Error, match=r"Did you mean dmp\.capacity"):
        tierkv.connect(dmp__capacty="1GiB")


def test_a_file_that_this_process_has_open_is_said_to_be(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dmp__capacity": "64MiB", "compute__threads": 1}
    with tierkv.connect(str(tmp_path / "a.duckdb"), **sizes) as first:
        with pytest.raises(tierkv.Error, match=r"already open in this process(?s:.)*close\(\)"):
            tierkv.connect(str(tmp_path / "a.duckdb"), **sizes)
        assert first.execute("SELECT 1").fetchall() == [(1,)]
    with tierkv.connect(str(tmp_path / "a.duckdb"), **sizes) as again:
        assert again.execute("SELECT 1").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "change",
    [
        "ADD FOREIGN KEY (parent) REFERENCES late(id)",
        "ADD CONSTRAINT c FOREIGN KEY (parent) REFERENCES late(id)",
        "ADD CHECK (id > 0)",
        "ADD COLUMN p INTEGER REFERENCES late(id)",
    ],
)
def test_a_constraint_that_comes_late_is_refused_with_the_way_around(
    connection: tierkv.Connection, change: str
) -> None:
    connection.execute("CREATE OR REPLACE TABLE late (id INTEGER PRIMARY KEY, parent INTEGER)")
    with pytest.raises(tierkv.NotSupportedError, match=r"constraint in CREATE TABLE") as caught:
        connection.execute(f"ALTER TABLE late {change}")
    assert caught.value.sqlstate == "0A000"


def test_a_script_that_ends_with_a_traceback_stops_its_cluster() -> None:
    script = (
        "import tierkv\n"
        "c = tierkv.connect(dmp__capacity='64MiB', compute__threads=1)\n"
        "print(c.execute('SELECT 41 + 1').fetchall())\n"
        "c.execute('SELEC 1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[(42,)]\n"
    assert done.returncode == 1
    assert "ProgrammingError: syntax error" in done.stderr.splitlines()[-1]


def test_a_pipe_gets_rows_and_the_summary_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "sql", "--format", "csv", "--set", "dmp.capacity=64MiB",
         "-c", "SELECT 1 AS a -- the first", "-c", "SELECT ai_generate('x') IS NULL AS b"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "a\n1\nb\nfalse\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("1 calls (1 run)")


FRAME_SQL = """
SELECT i::INTEGER AS a, CASE WHEN i = 1 THEN NULL ELSE i END AS a, 'x' || i AS text,
       i / 4 AS share, (i::DECIMAL(6, 2)) AS price, i > 0 AS big,
       DATE '2024-01-01' + i::INTEGER AS day, [i, NULL] AS items, {'k': i} AS pair,
       ai_count_tokens('some words') > 0 AS counted
FROM range(?) r(i)
"""


@pytest.mark.parametrize("rows", [3, 0])
def test_results_become_data_frames_where_their_library_is_there(
    connection: tierkv.Connection, rows: int
) -> None:
    result = connection.sql(FRAME_SQL, [rows])
    connection.sql("SELECT 'another statement does not change it'")
    names = ["a", "a_1", "text", "share", "price", "big", "day", "items", "pair", "counted"]
    made = 0
    if importlib.util.find_spec("pandas"):
        frame = result.df()
        assert list(frame.columns) == names
        assert len(frame) == rows
        kinds = [str(kind) for kind in frame.dtypes]
        assert kinds[0] == "int32"
        assert (kinds[1], kinds[3]) == ("float64" if rows else "int64", "float64")
        assert kinds[6].startswith("datetime64")
        made += 1
    if importlib.util.find_spec("pyarrow"):
        table = result.arrow()
        assert (table.column_names, table.num_rows) == (names, rows)
        kinds = [str(kind) for kind in table.schema.types]
        assert kinds[:5] == ["int32", "int64", "string", "double", "decimal128(6, 2)"]
        assert kinds[7].startswith("list<")
        made += 1
    if importlib.util.find_spec("polars"):
        polars_frame = connection.execute(FRAME_SQL, [rows]).pl()
        assert (polars_frame.columns, polars_frame.height) == (names, rows)
        assert [str(kind) for kind in polars_frame.dtypes][:3] == ["Int32", "Int64", "String"]
        made += 1
    if not made:
        pytest.skip("needs pandas, pyarrow or polars")


def test_integers_of_39_digits_are_arrow_decimals(connection: tierkv.Connection) -> None:
    pytest.importorskip("pyarrow")
    largest, unsigned = (1 << 127) - 1, (1 << 128) - 1
    table = connection.sql(
        f"SELECT {largest}::HUGEINT AS h, {unsigned}::UHUGEINT AS u, "
        f"[{largest}::HUGEINT, NULL] AS l, sum(1) AS s"
    ).arrow()
    wide = "decimal256(39, 0)"
    assert [str(kind) for kind in table.schema.types] == [
        wide, wide, f"list<item: {wide}>", "decimal128(38, 0)",
    ]  # fmt: skip
    assert table.to_pylist() == [{"h": largest, "u": unsigned, "l": [largest, None], "s": 1}]


@pytest.mark.parametrize(
    ("method", "library"), [("df", "pandas"), ("arrow", "pyarrow"), ("pl", "polars")]
)
def test_a_value_that_a_library_cannot_hold_is_an_error_that_names_its_column(
    connection: tierkv.Connection, method: str, library: str
) -> None:
    pytest.importorskip(library)
    result = connection.sql("SELECT '10000-01-01'::DATE AS far")
    with pytest.raises(tierkv.DataError, match=r'value of column "far" \(DATE\)') as refused:
        getattr(result, method)()
    assert "VARCHAR" in str(refused.value)


@pytest.mark.parametrize(
    ("method", "library"), [("df", "pandas"), ("arrow", "pyarrow"), ("pl", "polars")]
)
def test_a_frame_without_its_library_says_what_to_install(
    connection: tierkv.Connection, monkeypatch: pytest.MonkeyPatch, method: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(tierkv.Error, match=f"needs {library}, which is not installed") as refused:
        getattr(connection.sql("SELECT 1"), method)()
    assert f"pip install {library}" in str(refused.value)


def test_a_result_shows_itself_and_is_rows(connection: tierkv.Connection) -> None:
    result = connection.sql("SELECT i AS n FROM range(30) r(i)")
    assert len(result) == 30
    assert result.fetchall()[:2] == list(result)[:2] == [(0,), (1,)]
    assert repr(result).splitlines()[-1] == "(30 rows, the first 20 shown)"
    assert repr(connection.sql("CREATE OR REPLACE TABLE shown (n INTEGER)")) == "CREATE TABLE"
