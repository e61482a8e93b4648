"""Statements that would drop, replace, change or hide what is TierKV's or the engine's."""

from __future__ import annotations

import pytest

from tierkv.kvcore.errors import SqlError
from tierkv.sql.plan.kept_names import KeptNames, refuse_kept
from tierkv.sql.text.lexer import tokenize

KEPT = KeptNames(frozenset({"lower", "range", "json"}), frozenset({"main", "public", "memory"}))

REFUSED = [
    "DROP SCHEMA tierkv CASCADE",
    'drop schema if exists "TierKV" cascade',
    "DROP SCHEMA memory.tierkv",
    "DROP VIEW mine, tierkv.nodes",
    "DROP /* a */ VIEW tierkv /* b */ . nodes",
    "DROP MACRO tierkv.stat_reset",
    "DROP MACRO TABLE tierkv.simulate",
    "DROP VIEW tierkv_pg.main.pg_class",
    "DETACH tierkv_pg",
    "DETACH DATABASE IF EXISTS tierkv_pg",
    "ATTACH ':memory:' AS tierkv",
    "ATTACH '/tmp/tierkv.duckdb'",
    "ATTACH DATABASE IF NOT EXISTS ':memory:' AS \"tierkv\" (TYPE duckdb)",
    "ATTACH ':memory:' AS other",
    "ATTACH ':memory:'",
    "SELECT 1; attach or replace database ':memory:' AS shop",
    "COPY FROM DATABASE memory TO tierkv_pg",
    "CREATE SCHEMA tierkv",
    "CREATE SCHEMA IF NOT EXISTS other.tierkv",
    "CREATE OR REPLACE VIEW tierkv.nodes AS SELECT 1",
    "CREATE TABLE tierkv.mine (a INT)",
    "CREATE TABLE tierkv.mine AS SELECT 1",
    "CREATE OR REPLACE MACRO tierkv.stat_reset() AS 1",
    "CREATE SEQUENCE tierkv.s",
    "CREATE INDEX i ON tierkv.t(a)",
    "ALTER VIEW tierkv.nodes RENAME TO other",
    "ALTER SCHEMA mine RENAME TO tierkv",
    "ALTER TABLE mine SET SCHEMA tierkv",
    "COMMENT ON VIEW tierkv.nodes IS 'x'",
    "EXPLAIN ANALYZE DROP SCHEMA tierkv CASCADE",
    "EXPLAIN (ANALYZE, FORMAT json) CREATE TABLE tierkv.r AS SELECT 1",
    "SELECT 1; DROP SCHEMA tierkv CASCADE",
    "SELECT 1 -- \r; DROP SCHEMA tierkv CASCADE",
    "\ufeffDROP\u200bSCHEMA\u2060tierkv",
    "USE tierkv",
    "USE memory.tierkv",
    "SET schema = 'tierkv'",
    "SET SESSION search_path TO 'main,tierkv'",
    "SET search_path = '\"tierkv\"'",
    "SET search_path = main, tierkv",
    'SET search_path = "tier""kv"',
    "SET search_path = 'tier\"\"kv'",
    "SET schema = 'tier' || 'kv'",
    r"SET schema = E'\x74ierkv'",
    "PRAGMA search_path='tierkv'",
    "SET VARIABLE tierkv_session = 7",
    "SET VARIABLE tierkv_nodes = '[]'",
    "RESET VARIABLE tierkv_session",
    "CREATE MACRO ai_generate(x) AS 'mine'",
    "CREATE TEMP FUNCTION ai_prompt(x) AS 'mine'",
    "CREATE MACRO tierkv_window(a, b) AS 'mine'",
    "CREATE OR REPLACE TEMP MACRO tierkv_ai_call(a, b) AS 'mine'",
    "CREATE MACRO lower(x) AS 'mine'",
    "CREATE OR REPLACE FUNCTION main.\"Lower\"(x) AS 'mine'",
    "CREATE MACRO memory.lower(x) AS 'mine'",
    "CREATE MACRO memory.main.lower(x) AS 'mine'",
    "CREATE MACRO range(x) AS TABLE SELECT 1",
    "CREATE TYPE json AS INTEGER",
    "SELECT tierkv_window(1, 2)",
    'SELECT "tierkv_stat_reset"(NULL)',
    "SELECT main.tierkv_simulate(1, 'a', '{}')",
    "CREATE VIEW v AS FROM query('SELECT 1')",
    "CREATE MACRO m(x) AS TABLE FROM query(x)",
    'CREATE MACRO m(x) AS (SELECT * FROM system.main."query"(x))',
    "CREATE TABLE t (a INT DEFAULT (SELECT 1 FROM query('SELECT 1')))",
    "CREATE VIEW v AS FROM json_execute_serialized_sql('{}')",
    "ALTER TABLE t ALTER a SET DEFAULT (FROM query('SELECT 1'))",
]
ALLOWED = [
    "SELECT * FROM tierkv.nodes",
    "CREATE VIEW mine AS SELECT * FROM tierkv.nodes",
    "CREATE TABLE mine AS SELECT * FROM tierkv.stat_functions",
    "CREATE TABLE t (a INT, b VARCHAR DEFAULT 'tierkv.nodes')",
    "SELECT tierkv.stat_reset('functions')",
    "DROP TABLE tierkv",
    "CREATE TABLE tierkv_notes (a INT)",
    "INSERT INTO tierkv_notes (a) VALUES (1)",
    "SELECT 'DROP SCHEMA tierkv' AS tierkv, /* DROP SCHEMA tierkv */ 1 -- ; DROP SCHEMA tierkv",
    "CREATE MACRO mine(x) AS lower(x)",
    "CREATE TEMP MACRO lower(x) AS 'mine'",
    "CREATE MACRO temp.lower(x) AS 'mine'",
    "CREATE MACRO mine.lower(x) AS 'mine'",
    "CREATE TABLE lower (a INT)",
    "CREATE TABLE date (date DATE, json JSON, lower INT)",
    "CREATE TABLE count AS SELECT 1 AS count",
    "CREATE TABLE public.json (a INT)",
    "CREATE SCHEMA range",
    "CREATE VIEW json AS SELECT 1",
    "CREATE TEMP TABLE lower (a INT)",
    "SET VARIABLE x = 1",
    "CREATE TYPE mood AS ENUM ('sad')",
    "FROM query('SELECT 1')",
    "CREATE TABLE query (query INT)",
    "CREATE VIEW v AS WITH query(a) AS (SELECT 1) SELECT a FROM query",
    "CREATE MACRO m(x) AS TABLE FROM query_table(x)",
    "CREATE TABLE t AS FROM query('SELECT 1')",
    "SET search_path = 'main,tierkv_notes'",
    "SET VARIABLE mine = 'tierkv'",
    "USE memory.main",
    "DETACH other",
    "COMMENT ON TABLE t IS 'tierkv.nodes'",
    "",
    ";",
    "EXPLAIN (",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_kept_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(SqlError) as refused:
        refuse_kept(tokenize(text), KEPT)
    assert refused.value.sqlstate == "42501"
    assert refused.value.position


@pytest.mark.parametrize("text", ALLOWED)
def test_what_is_ones_own_is_not(text: str) -> None:
    refuse_kept(tokenize(text), KEPT)


@pytest.mark.parametrize(
    "text",
    ["CREATE MACRO m(x) AS TABLE FROM query(x)", "CREATE OR REPLACE MACRO lower(x) AS 'mine'"],
)
def test_in_a_process_of_ones_own_definitions_are_free(text: str) -> None:
    alone = KeptNames(KEPT.engine_names, KEPT.everybodys, others=False)
    refuse_kept(tokenize(text), alone)


def test_in_a_process_of_ones_own_the_views_are_kept_too() -> None:
    alone = KeptNames(KEPT.engine_names, KEPT.everybodys, others=False)
    with pytest.raises(SqlError, match="schema tierkv and its contents are reserved for TierKV"):
        refuse_kept(tokenize("DROP SCHEMA tierkv CASCADE"), alone)
