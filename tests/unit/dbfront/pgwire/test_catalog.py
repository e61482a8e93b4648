from __future__ import annotations

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.postgres_dialect.catalog.install import (
    catalog_names,
    catalog_statements,
    client_names,
    shapes,
)
from tierkv.dbfront.postgres_dialect.rewriting.ddl import rewrite_create
from tierkv.dbfront.postgres_dialect.rewriting.rewrite import TELLING, may_tell, rewrite
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.postgres_dialect.session.cursors import Cursors, parse_declare
from tierkv.dbfront.postgres_dialect.session.setting_commands import (
    PgSettingCommand,
    parse_setting_command,
)
from tierkv.dbfront.postgres_dialect.session.settings import PgSettings, milliseconds
from tierkv.dbfront.statement_results import Column, StatementResult
from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError, SqlSyntaxError

FACTS = {"current_user": "'al'", "pg_backend_pid()": "7", "current_setting datestyle": "'ISO'"}


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1 FROM t", "SELECT 1 FROM t"),
        ("SELECT 'pg_class' FROM pg_class", "SELECT 'pg_class' FROM tierkv_pg.main.pg_class"),
        (
            "SELECT pg_catalog.format_type(a, b), pg_catalog.lower(c)",
            "SELECT tierkv_pg.main.format_type(a, b), lower(c)",
        ),
        ("SELECT x.pg_class, pg_class.oid", "SELECT x.pg_class, pg_class.oid"),
        (
            "WHERE a OPERATOR(pg_catalog.!~*) 'x' COLLATE pg_catalog.default",
            "WHERE a !~* 'x' ",
        ),
        ("SELECT 't'::regclass::oid", "SELECT tierkv_pg.main.to_regclass('t'):: BIGINT"),
        (
            "SELECT c.oid::pg_catalog.regclass::pg_catalog.text",
            "SELECT tierkv_pg.main.own_regclass_name(c.oid):: text",
        ),
        ('SELECT CAST(x AS name), x::"char"', "SELECT CAST(x as VARCHAR), x:: VARCHAR"),
        ("SELECT pg_backend_pid()", 'SELECT 7 AS "pg_backend_pid"'),
        ("SELECT f(1, current_user, 2)", "SELECT f(1, 'al', 2)"),
        ("SELECT t.current_user, current_user", "SELECT t.current_user, 'al' AS \"current_user\""),
        ("SELECT current_setting('DateStyle', true) x", "SELECT 'ISO' x"),
        ("SELECT current_setting('threads')", "SELECT current_setting('threads')"),
        (
            "SELECT tables.table_name FROM information_schema.tables",
            'SELECT tables.table_name FROM tierkv_pg.information."tables"',
        ),
        ("SELECT information_schema.tables.x", 'SELECT "tables".x'),
        ("SELECT CAST($1 AS regclass)", "SELECT tierkv_pg.main.to_regclass(CAST($1 AS VARCHAR))"),
        (
            "SELECT (a || '.' || b)::regclass::oid",
            "SELECT tierkv_pg.main.to_regclass(CAST((a || '.' || b) AS VARCHAR)):: BIGINT",
        ),
        ("SELECT '{r,\"a b\",NULL}'::text[]", "SELECT ['r', 'a b', NULL]::text[]"),
        ("SELECT x = ANY('{1,2}'), y <> ALL('{a}')", "SELECT x IN ('1', '2'), y NOT IN ('a')"),
        ("SELECT x = ANY('{}')", "SELECT x IN (SELECT NULL WHERE false)"),
        ("SELECT x > ANY('{1}'), x = ANY('a')", "SELECT x > ANY('{1}'), x = ANY('a')"),
        (r"SELECT '\x01ff'::bytea, bytea '\x'", r"SELECT '\x01\xFF'::bytea, bytea ''"),
        (r"SELECT CAST('\x0a' AS bytea)", r"SELECT CAST('\x0A' AS bytea)"),
        (r"SELECT '\x01\xff'::bytea, '\x01ff'::blob", r"SELECT '\x01\xff'::bytea, '\x01ff'::blob"),
        (
            "SELECT generate_subscripts(pg_catalog.pg_index.indkey, 1) FROM pg_catalog.pg_index",
            "SELECT generate_subscripts(pg_index.indkey, 1) - 1 FROM tierkv_pg.main.pg_index",
        ),
        ("SELECT '{\"a\": 1}'::json", "SELECT '{\"a\": 1}'::json"),
        ("SELECT x ~ '^a' FROM t", "SELECT x ~ '^a' FROM t"),
        (
            "SELECT nspname !~ '^pg_' FROM pg_namespace",
            "SELECT nspname !~ ('(?s).*(?:' || '^pg_' || ').*') FROM tierkv_pg.main.pg_namespace",
        ),
        (
            r"SELECT 1 FROM pg_class WHERE relname LIKE 'a\_b' OR x NOT LIKE $1",
            r"SELECT 1 FROM tierkv_pg.main.pg_class WHERE relname like 'a\_b' ESCAPE '\' "
            r"OR x NOT like $1 ESCAPE '\'",
        ),
        ("SELECT json_build_object('a', 1)", "SELECT json_object('a', 1)"),
        (
            "SELECT s[i] FROM pg_class, generate_series(1, 2) AS i",
            "SELECT s[i] FROM tierkv_pg.main.pg_class, generate_series(1, 2) AS i(i)",
        ),
        (
            "SELECT 'array_in'::regproc FROM pg_type",
            "SELECT 750::UINTEGER FROM tierkv_pg.main.pg_type",
        ),
        (
            "SELECT 1 FROM pg_type t WHERE t.typreceive::text <> 'x' AND typinput = 'array_in'",
            "SELECT 1 FROM tierkv_pg.main.pg_type t WHERE "
            "tierkv_pg.main.own_type_function(t.typreceive) <> 'x' AND typinput = 750",
        ),
        ("GRANT r TO CURRENT_USER", 'GRANT r TO "al"'),
        ("drop owned by current_user", 'drop owned by "al"'),
        (
            "ALTER TABLE t ALTER a SET DEFAULT current_user",
            "ALTER TABLE t ALTER a SET DEFAULT 'al'",
        ),
    ],
)
def test_rewrite(sql: str, expected: str) -> None:
    assert rewrite(sql, catalog_names(), FACTS).text == expected


def test_ddl_names_are_qualified() -> None:
    assert all("tierkv_pg." in statement for statement in catalog_statements())
    assert "pg_class" in catalog_names().views
    assert "to_regclass" in catalog_names().functions
    assert "columns" in catalog_names().information


def test_clients_may_not_name_what_our_ddl_keeps_for_itself() -> None:
    ours = {n for n in catalog_names().views | catalog_names().functions if n.startswith("own_")}
    assert "own_relations" in ours
    assert not ours & (client_names().views | client_names().functions)
    for name in ("relations", "keys", "client", "own_keys"):
        sql = f"SELECT * FROM {name} WHERE pg_typeof(1) = 'integer'"
        assert rewrite(sql, client_names(), FACTS).text == sql


def test_positions_are_those_of_the_clients_text() -> None:
    sql = "SELECT 'ü', current_user, a FROM pg_class WHERE b::name = c"
    rewritten = rewrite(sql, client_names(), FACTS)
    for name in ("a FROM", "WHERE", "b::", "c"):
        at = sql.rindex(name)
        place = rewritten.text.rindex({"b::": "b:: VARCHAR"}.get(name, name)) + 1
        with pytest.raises(SqlError) as caught, rewritten.placing_errors():
            raise SqlError("x", sqlstate="42703", position=place)
        assert caught.value.position == at + 1
    inside = rewritten.text.index("main.pg_class") + 1
    with pytest.raises(SqlError) as caught, rewritten.placing_errors():
        raise SqlError("x", sqlstate="42P01", position=inside)
    assert caught.value.position == sql.index("pg_class") + 1


def test_catalogs_without_rows_are_queries() -> None:
    asked = "SELECT * FROM pg_catalog.pg_cast, pg_trigger t"
    rewritten = rewrite(asked, client_names(), FACTS).text
    assert "pg_cast" not in catalog_names().views
    assert 'WHERE false) AS "pg_cast", (SELECT ' in rewritten
    assert rewritten.endswith("WHERE false) t")


def test_every_catalog_with_rows_has_postgresqls_columns() -> None:
    engine = duckdb.connect()
    engine.execute(f"ATTACH ':memory:' AS {DATABASE}")
    for statement in catalog_statements():
        engine.execute(statement)
    for shape in shapes():
        if shape.name in client_names().empty:
            continue
        schema, _, name = shape.name.rpartition(".")
        place = "information" if schema else "main"
        described = engine.execute(f'DESCRIBE {DATABASE}.{place}."{name}"').fetchall()
        missing = {column for column, _ in shape.columns} - {row[0] for row in described}
        assert (shape.name, missing) == (shape.name, set())


@pytest.mark.parametrize(
    ("sql", "expected", "sequences"),
    [
        ("CREATE TABLE t (a INTEGER)", None, ()),
        ("CREATE TABLE t AS SELECT (1) AS serial", None, ()),
        (
            "CREATE TABLE s.t (id SERIAL PRIMARY KEY, b JSONB NOT NULL)",
            """CREATE TABLE s.t (id INTEGER DEFAULT nextval('"s"."t_id_seq"') PRIMARY KEY, """
            "b JSON NOT NULL)",
            (('"s"."t_id_seq"', ""),),
        ),
        (
            "CREATE TABLE t (id BIGINT GENERATED BY DEFAULT AS IDENTITY (START WITH 5), x INT)",
            """CREATE TABLE t (id BIGINT DEFAULT nextval('"t_id_seq"'), x INT)""",
            (('"t_id_seq"', "START WITH 5"),),
        ),
        (
            "CREATE TABLE IF NOT EXISTS t (serial INT, a TIMESTAMP(3) WITH TIME ZONE, n DEC(5,2))",
            "CREATE TABLE IF NOT EXISTS t (serial INT, a TIMESTAMP WITH TIME ZONE, n DEC(5,2))",
            (),
        ),
    ],
)
def test_create_table(sql: str, expected: str | None, sequences: tuple) -> None:
    definition = rewrite_create(sql)
    assert (definition.sql if definition else None) == expected
    assert (definition.sequences if definition else ()) == sequences


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SET a.b TO 'x'", PgSettingCommand("SET", "a.b", "x")),
        ("SET LOCAL DateStyle = ISO, MDY;", PgSettingCommand("SET", "datestyle", "ISO, MDY", True)),
        ("SET SESSION statement_timeout = DEFAULT", PgSettingCommand("SET", "statement_timeout")),
        ("SET TIME ZONE 'UTC'", PgSettingCommand("SET", "TimeZone", "UTC")),
        ("SET NAMES utf8", PgSettingCommand("SET", "client_encoding", "utf8")),
        ("SHOW TRANSACTION ISOLATION LEVEL", PgSettingCommand("SHOW", "transaction_isolation")),
        ("SHOW ALL", PgSettingCommand("SHOW", "all")),
        ("RESET ALL", PgSettingCommand("RESET", "all")),
        (
            "SELECT pg_catalog.set_config('search_path', '', false);",
            PgSettingCommand("SET_CONFIG", "search_path", ""),
        ),
        ("SET VARIABLE x = 1", None),
        ("SELECT 1", None),
    ],
)
def test_setting_commands(sql: str, expected: PgSettingCommand | None) -> None:
    assert parse_setting_command(sql) == expected


def test_settings_layers_and_reports() -> None:
    settings = PgSettings("al", "psql")
    settings.set("Application_Name", "x", local=True)
    assert settings.take_changes() == [("application_name", "x")]
    settings.end_transaction()
    assert settings.take_changes() == [("application_name", "psql")]
    settings.set("statement_timeout", "1.5s")
    assert settings.statement_timeout_s == 1.5
    for name, value in (("server_version", "9"), ("statement_timeout", "soon")):
        with pytest.raises(SqlError):
            settings.set(name, value)
    with pytest.raises(FeatureNotSupportedError):
        settings.set("client_encoding", "latin1")
    assert milliseconds("2min") == 120_000


async def test_cursor_directions() -> None:
    cursors = Cursors()
    rows = [(n,) for n in range(1, 6)]
    declared = parse_declare("DECLARE c SCROLL CURSOR WITH HOLD FOR SELECT 1;")
    assert (declared.name, declared.query, declared.hold) == ("c", "SELECT 1", True)
    cursors.declare(declared, StatementResult("SELECT 5", (Column("n", "INTEGER"),), rows))

    async def fetch(words: str) -> list[int]:
        return [row[0] for row in (await cursors.fetch(f"FETCH {words} c")).rows]

    assert await fetch("") == [1]
    assert await fetch("FORWARD 2 FROM") == [2, 3]
    assert await fetch("PRIOR FROM") == [2]
    assert await fetch("ALL IN") == [3, 4, 5]
    assert await fetch("BACKWARD ALL") == [5, 4, 3, 2, 1]
    assert await fetch("NEXT") == [1]
    assert await fetch("LAST") == [5]
    assert await fetch("ABSOLUTE -2") == [4]
    assert await fetch("RELATIVE -3") == [1]
    assert (await cursors.fetch("MOVE 3 IN c")).command_tag == "MOVE 3"
    assert await fetch("10") == [5]
    assert await fetch("1") == []
    assert await fetch("FORWARD 0") == []
    assert await fetch("ABSOLUTE 3") == [3]
    assert await fetch("0") == [3]
    assert await fetch("RELATIVE 0") == [3]
    assert await fetch("BACKWARD 0 FROM") == [3]
    assert await fetch("BACKWARD 5") == [2, 1]
    assert await fetch("PRIOR") == []
    assert await fetch("FIRST") == [1]
    cursors.end_transaction()
    await cursors.close("c")
    with pytest.raises(SqlError):
        await cursors.fetch("FETCH c")
    with pytest.raises(SqlSyntaxError):
        parse_declare("DECLARE c SELECT 1")


async def test_cursors_that_only_go_forward_and_what_a_transaction_leaves() -> None:
    cursors = Cursors()
    result = StatementResult("SELECT 3", (Column("n", "INTEGER"),), [(1,), (2,), (3,)])
    cursors.declare(parse_declare("DECLARE f NO SCROLL CURSOR FOR SELECT 1"), result)
    assert (await cursors.fetch("FETCH 2 FROM f")).rows == [(1,), (2,)]
    for back in ("PRIOR", "BACKWARD 1", "FIRST", "ABSOLUTE 1", "RELATIVE -1", "BACKWARD ALL"):
        with pytest.raises(SqlError, match="only scan forward"):
            await cursors.fetch(f"FETCH {back} FROM f")
    assert (await cursors.fetch("FETCH NEXT FROM f")).rows == [(3,)]
    held = parse_declare("DECLARE h CURSOR WITH HOLD FOR SELECT 1")
    cursors.declare(held, result)
    cursors.end_transaction(committed=False)  # neither was committed
    assert cursors.columns("f") is cursors.columns("h") is None
    cursors.declare(held, result)
    cursors.end_transaction()
    cursors.end_transaction(committed=False)
    assert (await cursors.fetch("FETCH h")).rows == [(1,)]
    with pytest.raises(FeatureNotSupportedError):
        parse_declare("DECLARE b BINARY CURSOR FOR SELECT 1")


_PIECES = (
    *("pg_x", "information_schema", "current_database", "json_build_x", "jsonb", "'{", "regclass"),
    *("select", "from", "::", "name", "oid", '"char"', "xid", "collate", "operator", "to_regx"),
    *("version", "current_role", "session_user", "current_setting", "format_type", "as", "x"),
    *("obj_description", "array_upper", "quote_ident", "set_config", "has_x_privilege"),
    *(" ", "\n", "(", ")", ","),
)


@given(st.lists(st.sampled_from(_PIECES), max_size=8), st.booleans())
def test_what_is_rewritten_was_looked_at(pieces: list[str], upper: bool) -> None:
    sql = "".join(pieces).upper() if upper else "".join(pieces)
    assert may_tell(sql) or not TELLING.search(sql)
