"""Lengths of texts: what is written in place of ``varchar(n)``, and what is left alone."""

from __future__ import annotations

import pytest

from tierkv.dbfront.postgres_dialect.rewriting.ddl import (
    lost_length,
    rewrite_create,
    text_length,
    without_only,
)
from tierkv.dbfront.postgres_values.sql_tokens import tokens
from tierkv.kvcore.errors import SqlError


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
        """CHECK (length("a") <= 3 OR 'varchar(3)' IS NULL) NOT NULL, """
        """"B c" VARCHAR CHECK (length("B c") <= 2 OR 'char(2)' IS NULL))"""
    )


@pytest.mark.parametrize(
    ("written", "column"),
    [
        ("ALTER TABLE t ADD COLUMN v varchar(3) DEFAULT 'x'", "v"),
        ('ALTER TABLE IF EXISTS a."b c" ADD IF NOT EXISTS "V w" char(2)', "V w"),
        ("ALTER TABLE a.b.c ALTER v SET DATA TYPE character varying(3)", "v"),
        ("ALTER TABLE t ALTER COLUMN v TYPE varchar(3) USING v::text", "v"),
    ],
)
def test_a_length_that_is_lost_is_told(written: str, column: str) -> None:
    notice = lost_length(written)
    assert notice is not None and f'length of column "{column}" is ignored' in notice.message


@pytest.mark.parametrize(
    "written",
    [
        "ALTER TABLE t ADD COLUMN v text",
        "ALTER TABLE t ALTER v TYPE int",
        "ALTER TABLE t RENAME v TO w",
        "ALTER TABLE t ALTER v SET DEFAULT 'varchar(3)'",
        "ALTER TABLE t ADD",
        "ALTER TABLE",
        "ALTER SEQUENCE s RESTART",
    ],
)
def test_other_changes_of_tables_lose_none(written: str) -> None:
    assert lost_length(written) is None


def test_only_is_left_out() -> None:
    assert without_only("ALTER TABLE ONLY t ADD a int") == "ALTER TABLE      t ADD a int"
    assert without_only('ALTER TABLE "ONLY" ADD a int') == 'ALTER TABLE "ONLY" ADD a int'
