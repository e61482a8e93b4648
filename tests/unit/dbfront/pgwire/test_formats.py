from __future__ import annotations

import contextlib
import datetime as dt
import math
import struct
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.postgres_values.binary_format import binary_encoder
from tierkv.dbfront.postgres_values.parameters import decode_parameter
from tierkv.dbfront.postgres_values.scalar_formats import numeric_binary, numeric_from_binary
from tierkv.dbfront.postgres_values.text_format import text_encoder
from tierkv.dbfront.postgres_values.types import pg_type
from tierkv.kvcore.errors import SqlError

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BOOLEAN": st.booleans(),
    "SMALLINT": st.integers(-(2**15), 2**15 - 1),
    "INTEGER": st.integers(-(2**31), 2**31 - 1),
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "DOUBLE": st.floats(allow_nan=False),
    "FLOAT": st.floats(width=32, allow_nan=False),
    "DECIMAL(38,6)": st.decimals(places=6, allow_nan=False, allow_infinity=False),
    "BLOB": st.binary(),
    "VARCHAR": st.text(st.characters(codec="utf-8", exclude_characters="\0")),
}
BINARY_ONLY: dict[str, st.SearchStrategy[Any]] = {
    "DATE": st.dates(),
    "TIME": st.times(),
    "TIMESTAMP": st.datetimes(),
    "UUID": st.uuids(),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("binary", [False, True])
@given(data=st.data())
def test_encode_then_decode_gives_the_value(name: str, binary: bool, data: st.DataObject) -> None:
    value = data.draw(VALUES[name])
    check_round_trip(name, value, binary)
    check_round_trip(f"{name}[]", data.draw(st.lists(st.none() | VALUES[name], max_size=4)), binary)


@pytest.mark.parametrize("name", BINARY_ONLY)
@given(data=st.data())
def test_binary_times_and_uuids_survive(name: str, data: st.DataObject) -> None:
    check_round_trip(name, data.draw(BINARY_ONLY[name]), binary=True)


def check_round_trip(name: str, value: Any, binary: bool) -> None:
    kind = pg_type(name)
    encoded = (binary_encoder if binary else text_encoder)(kind, name)(value)
    assert narrow(name, decode_parameter(encoded, kind, int(binary))) == value


def narrow(name: str, value: Any) -> Any:
    """A FLOAT's text is the shortest that gives the same four bytes, not the same double."""
    if isinstance(value, list):
        return [narrow(name, item) for item in value]
    if name.startswith("FLOAT") and value is not None:
        return struct.unpack("!f", struct.pack("!f", value))[0]
    return value


@given(st.decimals())
def test_numeric_binary_is_exact(value: Decimal) -> None:
    if value.is_snan():
        return
    back = numeric_from_binary(numeric_binary(value)) if abs_exponent(value) < 10_000 else value
    assert back == value or (back.is_nan() and value.is_nan())


def abs_exponent(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return abs(exponent) if isinstance(exponent, int) else 0


# Left: what PostgreSQL 15 prints for the same value.
@pytest.mark.parametrize(
    ("expected", "type_name", "value"),
    [
        ("t", "BOOLEAN", True),
        ("1", "DOUBLE", 1.0),
        ("-0", "DOUBLE", -0.0),
        ("1e+20", "DOUBLE", 1e20),
        ("100000000000000", "DOUBLE", 1e14),
        ("1e+15", "DOUBLE", 1e15),
        ("0.0001", "DOUBLE", 0.0001),
        ("1e-05", "DOUBLE", 0.00001),
        ("0.1", "FLOAT", struct.unpack("!f", struct.pack("!f", 0.1))[0]),
        ("NaN", "DOUBLE", math.nan),
        ("-Infinity", "DOUBLE", -math.inf),
        ("\\x00ff", "BLOB", b"\x00\xff"),
        ("2024-01-02", "DATE", dt.date(2024, 1, 2)),
        ("5000-01-01 BC", "DATE", "5000-01-01 (BC)"),
        ("01:02:03.5", "TIME", dt.time(1, 2, 3, 500_000)),
        ("2024-01-02 03:04:05.1", "TIMESTAMP", dt.datetime(2024, 1, 2, 3, 4, 5, 100_000)),
        (
            "2024-01-02 03:04:05+05:30",
            "TIMESTAMP WITH TIME ZONE",
            dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.timezone(dt.timedelta(hours=5.5))),
        ),
        ("1 day 02:03:04.5", "INTERVAL", dt.timedelta(days=1, seconds=7384, milliseconds=500)),
        ("-00:00:01", "INTERVAL", dt.timedelta(seconds=-1)),
        ("00:00:00", "INTERVAL", dt.timedelta(0)),
        ("1.500", "DECIMAL(18,3)", Decimal("1.500")),
        ("170141183460469231731687303715884105727", "HUGEINT", 2**127 - 1),
        (
            '{1,NULL,"NULL","a b","","q\\"\\\\"}',
            "VARCHAR[]",
            ["1", None, "NULL", "a b", "", 'q"\\'],
        ),
        ('{"a":1,"b":null}', "STRUCT(a INTEGER, b VARCHAR)", {"a": 1, "b": None}),
        ('{"k":1}', "MAP(VARCHAR, INTEGER)", {"k": 1}),
        ('{"2024-01-02":[1]}', "MAP(DATE, INTEGER[])", {dt.date(2024, 1, 2): [1]}),
        ('{"[1,2]":3}', "MAP(INTEGER[], INTEGER)", {"key": [[1, 2]], "value": [3]}),
        ("[[1],[2,null]]", "INTEGER[][]", [[1], [2, None]]),
        ("[[1,2],[3,4]]", "INTEGER[2][2]", ((1, 2), (3, 4))),
        ('[{"a":true}]', "STRUCT(a BOOLEAN)[]", [{"a": True}]),
        ('{"f1":1,"f2":{"a":"x"}}', "TUPLE(INTEGER, STRUCT(a VARCHAR))", (1, {"a": "x"})),
        (
            '{"f1":1,"f2":"2024-01-01T00:00:00+00"}',
            "STRUCT(INTEGER, TIMESTAMP WITH TIME ZONE)",
            (1, dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ),
        (
            '{"we\\"ird":1,"b b":[[1]]}',
            'STRUCT("we""ird" INTEGER, "b b" INTEGER[][])',
            {'we"ird': 1, "b b": [[1]]},
        ),
        (
            '{"j":{"x":1},"b":"\\\\xaa","n":"NaN","i":"-Infinity","d":1.10,'
            '"e":"it\'s \\"q\\"","z":null}',
            "STRUCT(j JSON, b BLOB, n FLOAT, i DOUBLE, d DECIMAL(10,2), e ENUM('a, b', ')'), "
            'z "NULL")',
            {
                "j": '{"x":1}',
                "b": b"\xaa",
                "n": float("nan"),
                "i": float("-inf"),
                "d": Decimal("1.10"),
                "e": 'it\'s "q"',
                "z": None,
            },
        ),
        ('"a"', "UNION(k VARCHAR, n DOUBLE)", "a"),
        ('"NaN"', "UNION(k VARCHAR, n DOUBLE)", float("nan")),
        ("1.5", "UNION(k VARCHAR, n DECIMAL(2,1))", Decimal("1.5")),
        ("{a,b}", "ENUM('a', 'b')[]", ["a", "b"]),
    ],
)
def test_text_format(expected: str, type_name: str, value: Any) -> None:
    assert text_encoder(pg_type(type_name), type_name)(value).decode() == expected


def test_dates_beyond_python_in_binary() -> None:
    encode = binary_encoder(pg_type("DATE"))
    assert struct.unpack("!i", encode("20000-01-01")) == (
        6_574_365,
    )  # date '20000-01-01' - date '2000-01-01'
    assert struct.unpack("!i", encode("0001-12-31 (BC)")) == (-730_120,)
    assert encode("infinity") == b"\x7f\xff\xff\xff"


@pytest.mark.parametrize(
    ("name", "oid", "typmod"),
    [
        ("INTEGER", 23, -1),
        ("HUGEINT", 1700, -1),
        ("DECIMAL(10,2)", 1700, (10 << 16 | 2) + 4),
        ("INTEGER[3]", 1007, -1),
        ("DECIMAL(4,1)[]", 1231, -1),
        ("INTEGER[][]", 114, -1),
        ("STRUCT(a INTEGER[])", 114, -1),
        ("STRUCT(a INTEGER)[]", 114, -1),
        ("MAP(VARCHAR, INTEGER)", 114, -1),
        ("ENUM('a', 'b')[]", 1009, -1),
        ("ENUM('a', 'INTEGER[]')", 25, -1),
        ("TIMESTAMP WITH TIME ZONE", 1184, -1),
        ("whatever", 25, -1),
    ],
)
def test_type_mapping(name: str, oid: int, typmod: int) -> None:
    assert (pg_type(name).oid, pg_type(name).typmod) == (oid, typmod)


@pytest.mark.parametrize(
    ("data", "type_name", "code"),
    [
        (b"x", "INTEGER", 0),
        (b"1_0", "INTEGER", 0),
        (b"maybe", "BOOLEAN", 0),
        (b"\\xzz", "BLOB", 0),
        (b"{1,2", "INTEGER[]", 0),
        (b"{1}x", "INTEGER[]", 0),
        (b"\xff", "VARCHAR", 0),
        (b"\0", "INTEGER", 1),
        (b"\0" * 15, "UUID", 1),
        (b"\0" * 7, "DECIMAL(1,0)", 1),
        (b"\x7f" * 12, "INTEGER[]", 1),
        (struct.pack("!q", -1), "TIME", 1),
    ],
)
def test_values_that_do_not_fit_are_the_users_error(data: bytes, type_name: str, code: int) -> None:
    with pytest.raises(SqlError) as caught:
        decode_parameter(data, pg_type(type_name), code)
    assert caught.value.sqlstate in ("22P02", "22P03", "22021")


@given(data=st.binary(max_size=80), name=st.sampled_from([*VALUES, *BINARY_ONLY, "INTERVAL"]))
def test_hostile_parameters_only_raise_sql_errors(data: bytes, name: str) -> None:
    for type_name in (name, f"{name}[]"):
        for code in (0, 1):
            with contextlib.suppress(SqlError):
                decode_parameter(data, pg_type(type_name), code)


def test_uuid_text() -> None:
    value = uuid.UUID(int=1)
    assert text_encoder(pg_type("UUID"))(value) == str(value).encode()


@pytest.mark.parametrize(
    ("value", "text", "parts"),
    [  # DuckDB's text, and what PostgreSQL 15 writes
        ("1 year 2 months 3 days 04:05:06.007", "1 year 2 mons 3 days 04:05:06.007",
         (14, 3, 14_706_007_000)),
        ("-1 year -2 months 3 days -04:05:06.007", "-1 years -2 mons +3 days -04:05:06.007",
         (-14, 3, -14_706_007_000)),
        ("1 month -1 days", "1 mon -1 days", (1, -1, 0)),
        ("25:00:00", "25:00:00", (0, 0, 90_000_000_000)),
        ("1 month -00:00:01", "1 mon -00:00:01", (1, 0, -1_000_000)),
        ("-1 month 00:00:01.5", "-1 mons +00:00:01.5", (-1, 0, 1_500_000)),
        ("00:00:00", "00:00:00", (0, 0, 0)),
        ("-1 days 00:00:01", "-1 days +00:00:01", (0, -1, 1_000_000)),
        (dt.timedelta(days=1, seconds=3), "1 day 00:00:03", (0, 1, 3_000_000)),
        (dt.timedelta(days=-1, seconds=86_399), "-00:00:01", (0, 0, -1_000_000)),
    ],
)  # fmt: skip
def test_intervals_keep_months_days_and_microseconds(
    value: Any, text: str, parts: tuple[int, int, int]
) -> None:
    kind = pg_type("INTERVAL")
    assert text_encoder(kind)(value) == text.encode()
    assert struct.unpack("!qii", binary_encoder(kind)(value)) == (parts[2], parts[1], parts[0])


def test_what_is_no_interval_is_refused() -> None:
    with pytest.raises(SqlError):
        text_encoder(pg_type("INTERVAL"))("1 fortnight")


def test_text_with_a_nul_is_refused() -> None:
    with pytest.raises(SqlError) as caught:
        decode_parameter(b"a\0b", pg_type("VARCHAR"), 0)
    assert caught.value.sqlstate == "22021"
    assert decode_parameter(b"a\0b", pg_type("BLOB"), 1) == b"a\0b"
