from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbfront.contracts import Column
from dbfront.pgwire.copy_format import CopyReader, CopyWriter
from dbfront.pgwire.copy_statement import CopyOptions, CopyStatement, parse_copy
from kvcore.errors import FeatureNotSupportedError, SqlError, UserError


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
        ("COPY t FROM STDIN (FORMAT binary)", FeatureNotSupportedError),
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
