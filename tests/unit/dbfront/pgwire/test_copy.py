from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.copying.binary_rows import BinaryReader, BinaryWriter
from tierkv.dbfront.copying.statement import CopyOptions, CopyStatement, parse_copy
from tierkv.dbfront.copying.text_rows import CopyReader, CopyWriter, text_converter
from tierkv.dbfront.postgres_values.types import pg_type
from tierkv.dbfront.statement_results import Column
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError, UserError


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("COPY t TO STDOUT", CopyStatement(True, '"t"')),
        ('copy s."T x" (a, "B") from stdin', CopyStatement(False, '"s"."T x"', ("a", "B"))),
        (
            "COPY (SELECT ai_generate('(' || b) FROM t) TO STDOUT WITH (FORMAT csv, HEADER)",
            CopyStatement(
                True,
                query="SELECT ai_generate('(' || b) FROM t",
                options=CopyOptions(csv=True, delimiter=",", null="", header=True),
            ),
        ),
        (
            "COPY t FROM STDIN CSV HEADER DELIMITER AS ';' NULL 'n/a' QUOTE '''' ESCAPE E'\\\\'",
            CopyStatement(
                False,
                '"t"',
                options=CopyOptions(True, ";", "n/a", True, "'", "\\"),
            ),
        ),
        (
            "/* hi */ COPY t TO STDOUT (FORMAT 'csv', FORCE_QUOTE *, HEADER false)",
            CopyStatement(True, '"t"', options=CopyOptions(True, ",", "", force_quote_all=True)),
        ),
        ("COPY t FROM '/tmp/file.csv'", None),
        ("COPY t TO 'STDOUT'", None),
        ("SELECT 'COPY t FROM STDIN'", None),
    ],
)
def test_parse(sql: str, expected: CopyStatement | None) -> None:
    assert parse_copy(sql) == expected


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("COPY t FROM STDIN (FORMAT binary, HEADER)", SqlSyntaxError),
        ("COPY t FROM STDIN (FORMAT xml)", SqlError),
        ("COPY t FROM STDIN (DELIMITER ',,')", SqlError),
        ("COPY t FROM STDIN (QUOTE '\"')", SqlError),
        ("COPY t FROM STDIN (FORMAT csv, FORMAT text)", UserError),
        ("COPY t FROM STDIN (ON_ERROR ignore)", FeatureNotSupportedError),
        ("COPY (SELECT 1) FROM STDIN", UserError),
        ("COPY t STDIN", UserError),
        ("COPY t (a FROM STDIN", UserError),
    ],
)
def test_impossible_statements(sql: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_copy(sql)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
AWKWARD = st.sampled_from(["", "\\N", "\\.", "NULL", '"', "a\nb", "a\r\nb", "\\", "\t", ",", "ü"])
ROWS = st.lists(st.lists(st.none() | TEXTS | AWKWARD, min_size=2, max_size=2), max_size=8)
OPTIONS = st.sampled_from(
    [
        CopyOptions(),
        CopyOptions(delimiter="|"),
        CopyOptions(header=True),
        CopyOptions(csv=True, delimiter=",", null=""),
        CopyOptions(csv=True, delimiter=";", null="\\N", header=True),
        CopyOptions(csv=True, delimiter=",", null="", quote="'", escape="\\"),
        CopyOptions(csv=True, delimiter=",", null="", force_quote_all=True),
    ]
)


@given(rows=ROWS, options=OPTIONS, step=st.integers(1, 9))
def test_what_is_copied_out_can_be_copied_in(
    rows: list[list[str | None]], options: CopyOptions, step: int
) -> None:
    writer = CopyWriter([Column("a", "VARCHAR"), Column("b", "VARCHAR")], options)
    data = writer.header() + b"".join(map(writer.line, rows))
    reader = CopyReader(2, options)
    back = [row for at in range(0, len(data), step) for row in reader.feed(data[at : at + step])]
    assert back + reader.finish() == rows


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (b"1\n", CopyOptions()),
        (b"1\t2\t3\n", CopyOptions()),
        (b"\xff\t2\n", CopyOptions()),
        (b'"a,b\n', CopyOptions(csv=True, delimiter=",", null="")),
    ],
)
def test_bad_data_names_the_line(data: bytes, options: CopyOptions) -> None:
    reader = CopyReader(2, options)
    with pytest.raises(SqlError) as caught:
        reader.feed(b"x\ty\n" if not options.csv else b"x,y\n")
        reader.feed(data)
        reader.finish()
    assert "line" in caught.value.detail


def test_end_marker_escapes_and_crlf() -> None:
    reader = CopyReader(2, CopyOptions())
    assert reader.feed(b"a\\x41\\102\tb\\\tc\r\n\\.\nignored\tline\n") == [["aAB", "b\tc"]]
    assert reader.finish() == []


HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
KINDS = ("INTEGER", "VARCHAR", "BLOB", "VARCHAR[]", "DECIMAL(18,3)", "TIMESTAMP", "UUID", "BOOLEAN")


def test_binary_rows_in_any_pieces() -> None:
    columns = [Column(f"c{at}", kind) for at, kind in enumerate(KINDS)]
    rows = [
        (1, 'a"b', b"\0\xff", ["x", None, 'q"\\'], Decimal("-1.250"), dt.datetime(2024, 1, 2), None,
         True),
        (None,) * len(KINDS),
    ]  # fmt: skip
    writer = BinaryWriter(columns)
    data = writer.header() + b"".join(map(writer.line, rows)) + writer.trailer()
    for step in (1, 7, len(data)):
        reader = BinaryReader([pg_type(kind) for kind in KINDS])
        found = [
            row for at in range(0, len(data), step) for row in reader.feed(data[at : at + step])
        ]
        assert reader.finish() == []
        assert found == [
            ["1", 'a"b', "\\x00\\xFF", '["x", NULL, "q\\"\\\\"]', "-1.250", "2024-01-02 00:00:00",
             None, "true"],
            [None] * len(KINDS),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "state"),
    [
        (b"PGCOPX", "22P04"),
        (HEADER[:11] + b"\0\1\0\0" + bytes(4), "22P04"),
        (HEADER + b"\0\2", "22P04"),
        (HEADER + b"\0\1\0\0\0\2\0\0", "22P03"),
        (HEADER + b"\0\1\xff\xff\xff\xf0", "22P04"),
        (HEADER + b"\xff\xff\0", "22P04"),
        (HEADER + b"\0\1\0\0", "22P04"),
        (HEADER[:5], "22P04"),
    ],
)
def test_broken_binary_data_is_refused(data: bytes, state: str) -> None:
    reader = BinaryReader([pg_type("INTEGER")])
    with pytest.raises(SqlError) as caught:
        reader.feed(data)
        reader.finish()
    assert caught.value.sqlstate == state


@pytest.mark.parametrize(
    ("kind", "cell", "text"),
    [
        ("BLOB", "\\x00ff", "\\x00\\xFF"),
        ("BOOLEAN", "on", "true"),
        ("INTEGER[]", "{{1,2},{3,NULL}}", "[[1, 2], [3, NULL]]"),
        ("VARCHAR[]", '{a,"b ""\\"",NULL}', None),
        ("INTERVAL", "-1 mons +2 days", "-1 mons 2 days"),
        ("TIMESTAMP", "2024-01-02 03:04:05+09", "2024-01-02 03:04:05"),
        ("DATE", "2024-01-02 +09", "2024-01-02"),
    ],
)
def test_cells_are_written_anew(kind: str, cell: str, text: str | None) -> None:
    convert = text_converter(pg_type(kind))
    assert convert is not None
    if text is None:
        with pytest.raises(SqlError):
            convert(cell)
    else:
        assert convert(cell) == text


def test_what_reads_the_same_stays() -> None:
    assert text_converter(pg_type("VARCHAR")) is None
    assert text_converter(pg_type("BIGINT")) is None
