"""Statements of odd shapes, each played through every door beside the same over plain functions.

``shapes.sql`` holds them under headings that say who understands them: ``both``, ``duckdb``,
``postgres``; under ``writes`` stand those that change tables. Two AI calls joined by AND may both
be asked about a row, which has a heading of its own. A statement begins at the start of a line and
goes on in lines that begin with a space.
"""

from __future__ import annotations

from pathlib import Path

from tests.differential.grammar import Dialect, Step

_FILE = Path(__file__).with_name("shapes.sql")
_MORE = "both, and may ask more"

TABLES = (
    "DROP TABLE IF EXISTS t",
    "DROP TABLE IF EXISTS u",
    "DROP TABLE IF EXISTS w",
    "DROP TABLE IF EXISTS docs",
    "DROP TABLE IF EXISTS topics",
    "CREATE TABLE t (i int, g int, p text, f float8, d decimal(9,2), ts timestamp, b boolean)",
    "INSERT INTO t SELECT x, x % 5, "
    "CASE WHEN x % 7 = 3 THEN NULL WHEN x % 11 = 5 THEN '' ELSE 'p ' || (x % 13) END, "
    "CASE WHEN x % 6 <> 1 THEN x / 4.0 END, x * 1.25, "
    "timestamp '2024-01-01' + x * interval '1 hour', CASE WHEN x % 3 <> 2 THEN x % 3 = 0 END "
    "FROM generate_series(1, 60) s(x)",
    "CREATE TABLE u (k int, name text)",
    "INSERT INTO u VALUES (0, 'sport'), (1, 'music'), (2, NULL), (7, 'food'), (3, 'p 3'), "
    "(3, 'p 4')",
    "CREATE TABLE w (id int PRIMARY KEY, v text, n int DEFAULT 5)",
    "INSERT INTO w SELECT x, 'v ' || (x % 4), x FROM generate_series(1, 12) s(x)",
    "CREATE TABLE docs (id int PRIMARY KEY, topic int, body text)",
    "INSERT INTO docs SELECT x, x % 4, CASE WHEN x % 10 <> 7 THEN 'body ' || (x % 30) END "
    "FROM generate_series(0, 59) s(x)",
    "CREATE TABLE topics (id int PRIMARY KEY, name text)",
    "INSERT INTO topics VALUES (0, 'sport'), (1, 'music'), (2, NULL), (5, 'food')",
)
"""Makes and fills the tables."""

AUDIT = (
    "DROP TABLE IF EXISTS audit",
    "CREATE TABLE audit (n serial, what text)",
    "CREATE OR REPLACE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "INSERT INTO audit (what) VALUES (TG_OP || coalesce(new.id, old.id)); RETURN NULL; END $$",
    "CREATE TRIGGER noting AFTER INSERT OR UPDATE OR DELETE ON w "
    "FOR EACH ROW EXECUTE FUNCTION note()",
)
"""PostgreSQL also tells how often a row was written."""


def queries(dialect: Dialect) -> list[Step]:
    """Return the queries that a dialect understands."""
    found = _statements()
    return [
        Step(sql, ordered=_is_ordered(sql), frugal=heading != _MORE)
        for heading in ("both", _MORE, dialect.value)
        for sql in found.get(heading, ())
    ]


def writes(dialect: Dialect) -> list[Step]:
    """Return the statements that write."""
    headings = ("writes", f"writes {dialect.value}")
    found = _statements()
    return [Step(sql) for heading in headings for sql in found.get(heading, ())]


def _is_ordered(sql: str) -> bool:
    """Say whether the last ORDER BY is the statement's own, not of something in parentheses."""
    _, found, behind = sql.rpartition(" ORDER BY ")
    return bool(found) and behind.count("(") == behind.count(")")


def _statements() -> dict[str, list[str]]:
    """Read the file: statements by heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in _FILE.read_text().splitlines():
        if line.startswith("-- "):
            heading = line.removeprefix("-- ")
        elif line.startswith(" "):
            found[heading][-1] += line
        elif line:
            found.setdefault(heading, []).append(line)
    return found
