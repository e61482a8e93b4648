"""Views over other users' tables: what they read, and which are closed when a right ends."""

from __future__ import annotations

import pytest

from tierkv.sql.text.lexer import tokenize
from tierkv.sql.view_rights import (
    ViewReads,
    closed_temporary,
    closed_views,
    made_temporary,
    made_view,
    named_view,
    view_reads,
)

SCHEMAS = frozenset({"ann", "bob"})
DEFINITIONS = [
    ("v", "bob", "CREATE VIEW bob.v AS SELECT * FROM ann.t;"),
    ("w", "bob", "CREATE VIEW bob.w AS SELECT * FROM v;"),
    ("m", "main", "SELECT max(a) FROM query_table('bob.w')"),
    ("own", "ann", "CREATE VIEW ann.own AS SELECT 'bob.w' FROM ann.t;"),
    ("plain", "bob", "CREATE VIEW bob.plain AS SELECT 1 AS a;"),
]
CLOSED = frozenset({("bob", "v"), ("bob", "w"), ("main", "m")})


def test_views_read_tables_of_others_also_through_each_other() -> None:
    assert view_reads(DEFINITIONS, SCHEMAS) == {
        ("bob", "v"): ViewReads(frozenset({("ann", "t")}), frozenset()),
        ("bob", "w"): ViewReads(frozenset(), frozenset({("bob", "v")})),
        ("main", "m"): ViewReads(frozenset(), frozenset({("bob", "w")})),
    }


def test_a_view_is_closed_with_what_it_reads() -> None:
    reads = view_reads(DEFINITIONS, SCHEMAS)
    assert closed_views(reads, lambda schema, table: True) == frozenset()
    assert closed_views(reads, lambda schema, table: schema != "bob") == CLOSED


@pytest.mark.parametrize(
    ("sql", "foreign", "name"),
    [
        ("SELECT * FROM v", {"ann"}, "v"),
        ("SELECT * FROM v", {"bob"}, None),
        ('SELECT * FROM memory.Bob."V"', {"bob"}, "v"),
        ("SELECT v FROM (SELECT 1 AS v)", {"ann"}, None),
        ("SELECT m(1)", {"bob"}, "m"),
        ("SELECT * FROM query('FROM w')", {"ann"}, "w"),
        ("SELECT 'FROM w'", {"ann"}, None),
        ("SUMMARIZE v", {"ann"}, "v"),
        ("EXPLAIN ANALYZE SELECT 1 FROM t, w", {"ann"}, "w"),
        ("DROP VIEW bob.v", {"ann"}, None),
        ("CREATE OR REPLACE VIEW bob.v AS SELECT 1", {"ann"}, None),
    ],
)
def test_a_statement_names_a_closed_view(sql: str, foreign: set[str], name: str | None) -> None:
    found = named_view(sql, tokenize(sql), CLOSED, foreign)
    assert (None if found is None else found[1][1]) == name


@pytest.mark.parametrize(
    ("sql", "made"),
    [
        ("CREATE VIEW a AS SELECT 1", ("", False)),
        ("CREATE OR REPLACE VIEW IF NOT EXISTS db.main.a AS SELECT 1", ("main", False)),
        ("CREATE OR REPLACE TEMPORARY VIEW a AS SELECT 1", ("", True)),
        ("CREATE TABLE a AS SELECT 1", None),
    ],
)
def test_the_schema_of_a_new_view(sql: str, made: tuple[str, bool] | None) -> None:
    assert made_view(tokenize(sql)) == made


def test_what_only_a_session_has_is_closed_by_its_words() -> None:
    texts = (
        "CREATE TEMP VIEW a AS SELECT * FROM v",
        "CREATE OR REPLACE TEMP MACRO temp.main.b(x) AS (SELECT x FROM a)",
        "PREPARE c AS SELECT b(1)",
        "CREATE TEMP VIEW d AS SELECT 1",
    )
    made = dict(found for text in texts if (found := made_temporary(tokenize(text))))
    assert sorted(made) == ["a", "b", "c", "d"]
    assert made_temporary(tokenize("CREATE VIEW e AS SELECT * FROM v")) is None
    closed = {name for _, name in closed_temporary(made, CLOSED)}
    assert closed == {"a", "b", "c"}
