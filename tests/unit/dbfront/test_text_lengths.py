"""Lengths of texts: what is written in place of ``varchar(n)``, and what is left alone."""

from __future__ import annotations

import pytest

from dbfront.pgwire.catalog.ddl import rewrite_create
from dbfront.pgwire.catalog.install import client_names
from dbfront.pgwire.catalog.rewrite import rewrite
from dbfront.pgwire.catalog.text_lengths import text_length
from dbfront.pgwire.sql_tokens import tokens
from kvcore.errors import SqlError


@pytest.mark.parametrize(
    ("written", "kind", "characters"),
    [
        ("varchar(20)", "varchar", 20),
        ("CHARACTER VARYING (3)", "varchar", 3),
        ("char varying(3)", "varchar", 3),
        ("national character varying(4)", "varchar", 4),
        ("char(7)", "char", 7),
        ("character(7)", "char", 7),
    ],
)
def test_types_with_a_length(written: str, kind: str, characters: int) -> None:
    length = text_length(list(tokens(f"{written} NOT NULL")), 0)
    assert length is not None
    assert (length.kind, length.characters) == (kind, characters)
    assert length.words == len(list(tokens(written)))


@pytest.mark.parametrize(
    "written", ["varchar", "text", "char", "varchar(5)[]", "numeric(3)", "varchar(n)", "bit(3)"]
)
def test_types_without(written: str) -> None:
    assert text_length(list(tokens(written)), 0) is None


@pytest.mark.parametrize("written", ["varchar(0)", "varchar(10485761)"])
def test_lengths_that_no_text_can_have(written: str) -> None:
    with pytest.raises(SqlError, match="length for type varchar must be") as refused:
        text_length(list(tokens(written)), 0)
    assert refused.value.sqlstate == "22023"


def test_a_check_keeps_the_length_of_a_column() -> None:
    made = rewrite_create('CREATE TABLE t (a varchar(3) COLLATE nocase NOT NULL, "B c" char(2))')
    assert made is not None
    assert made.sql == (
        "CREATE TABLE t (a VARCHAR COLLATE nocase "
        """CHECK (character_length(rtrim("a", ' ')) <= 3) NOT NULL, """
        """"B c" VARCHAR CHECK (char_length(rtrim("B c", ' ')) <= 2))"""
    )


@pytest.mark.parametrize(
    ("written", "run"),
    [
        ("SELECT 'abc'::varchar(2)", "SELECT left(CAST('abc' AS VARCHAR), 2)"),
        ("SELECT CAST(a AS varchar(2)) FROM t", "SELECT left(CAST(a AS VARCHAR), 2) FROM t"),
        ("SELECT t.a::text::varchar(2)", "SELECT left(CAST(t.a::text AS VARCHAR), 2)"),
        ("SELECT f(a, (b))::varchar(2)", "SELECT left(CAST(f(a, (b)) AS VARCHAR), 2)"),
        ("SELECT (a || b)::varchar(2), c", "SELECT left(CAST((a || b) AS VARCHAR), 2), c"),
        ("SELECT a[1]::character varying(9)", "SELECT left(CAST(a[1] AS VARCHAR), 9)"),
        (
            "SELECT CAST('a'::varchar(3) AS varchar(2))",
            "SELECT left(CAST(left(CAST('a' AS VARCHAR), 3) AS VARCHAR), 2)",
        ),
        ("SELECT $1::varchar(2)", "SELECT left(CAST($1 AS VARCHAR), 2)"),
        ("SELECT a::numeric(3,1)::varchar(2)", "SELECT left(CAST(a::numeric(3,1) AS VARCHAR), 2)"),
    ],
)
def test_a_cast_cuts_a_text_off(written: str, run: str) -> None:
    assert rewrite(written, client_names(), {}).text == run


@pytest.mark.parametrize(
    "written",
    [
        "SELECT a::varchar(3)[]",
        "SELECT 'x::varchar(3)'",
        "SELECT CASE WHEN a THEN b END::varchar(3)",
        "SELECT a::varchar",
    ],
)
def test_other_casts_stay(written: str) -> None:
    assert rewrite(written, client_names(), {}).text == written
