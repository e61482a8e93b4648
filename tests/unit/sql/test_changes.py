"""What a changing statement's text says about running it again."""

from __future__ import annotations

import pytest

from tierkv.sql.plan.changes import ChangeText, change_text, may_change
from tierkv.sql.text.lexer import tokenize
from tierkv.sql.text.statement import classify


def read(text: str) -> ChangeText:
    tokens = tokenize(text)
    return change_text(text, tokens, classify(tokens))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'INSERT INTO s."T 1" (a) VALUES (now(), 1) RETURNING a',
            ChangeText(frozenset({"now"}), ('s."T 1"',), 's."T 1"', True, False),
        ),
        (
            "INSERT INTO t SELECT lower(a), current_date FROM (SELECT 1 AS returning) x",
            ChangeText(frozenset({"lower", "current_date"}), ("t",), "t", False, True),
        ),
        (
            "INSERT INTO t VALUES (1) ON CONFLICT (id) DO UPDATE SET a = random()",
            ChangeText(frozenset({"conflict", "random"}), ("t",), "", False, False),
        ),
        ("INSERT OR REPLACE INTO t VALUES (1)", ChangeText(frozenset(), ("t",), "", False, False)),
        ("DELETE FROM t", ChangeText(frozenset(), (), "", False, True)),
        ("UPDATE t SET a = 1", ChangeText(frozenset(), (), "", False, True)),
        (
            "WITH x AS (INSERT INTO u VALUES (1) RETURNING *) INSERT INTO t SELECT * FROM x",
            ChangeText(frozenset(), ("u", "t"), "", False, True),
        ),
        ("CREATE TABLE t (a INT)", ChangeText(frozenset({"t"}), (), "", False, False)),
    ],
)
def test_change_text(text: str, expected: ChangeText) -> None:
    got = read(text)
    assert (got.tables, got.insert_into, got.returns, got.reads) == (
        expected.tables,
        expected.insert_into,
        expected.returns,
        expected.reads,
    )
    assert expected.functions <= got.functions


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("SELECT 1", False),
        ("TABLE t", False),
        ("(SELECT 1)", False),
        ("WITH x AS (SELECT 1) SELECT * FROM x", False),
        ("WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x", True),
        ("SELECT 1 INTO t", True),
        ("EXPLAIN DELETE FROM t", False),
        ("EXPLAIN ANALYZE DELETE FROM t", True),
        ("EXPLAIN (ANALYZE) SELECT 1", False),
        ("EXPLAIN ANALYZE WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x", True),
        ("CREATE TABLE t (a INT)", True),
        ("COPY t TO 'x'", True),
        ("VACUUM", True),
        ("SHOW ALL", False),
        ("DESCRIBE t", False),
        ("SET a = 1", False),
    ],
)
def test_may_change(text: str, changes: bool) -> None:
    assert may_change(tokenize(text)) is changes
