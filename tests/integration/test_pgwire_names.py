"""One name for the database and ``public`` for its schema, whatever the engine calls them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest

from tests.fix_pgwire import RunningServer, running_pgwire
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A database whose file is called what no client says."""
    file = tmp_path_factory.mktemp("names") / "tables.duckdb"
    config = DuckDbConfig(path=str(file), threads=1)
    with running_pgwire(lambda: DuckDbSqlServer(config, None)) as running:  # type: ignore[arg-type]
        yield running


def connected(server: RunningServer, database: str) -> psycopg.Connection:
    dsn = server.dsn.replace("dbname=main", f"dbname={database}")
    return psycopg.connect(dsn, autocommit=True)


def rows(db: psycopg.Connection, sql: str, *params: Any) -> list[tuple]:
    return db.execute(sql, params).fetchall()


@pytest.mark.parametrize("database", ["shop", "main", "public", "tables", "Da ta"])
def test_three_part_names_in_queries_and_ddl(server: RunningServer, database: str) -> None:
    quoted = database.replace(" ", "\\ ")
    with connected(server, quoted) as db:
        name = f'"{database}"."public"."made"'
        assert rows(db, "SELECT current_database(), current_catalog") == [(database, database)]
        db.execute(f'CREATE SCHEMA IF NOT EXISTS "{database}"."Side"')
        db.execute(f'DROP VIEW IF EXISTS "{database}"."Side"."seen"')
        db.execute(f"DROP TABLE IF EXISTS {name}")
        db.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, a TEXT)")
        db.execute(f"INSERT INTO {name} (id, a) VALUES (1, 'x'), (2, 'y')")
        db.execute(f"UPDATE {name} SET a = 'z' WHERE {name}.id = 2")
        db.execute(f"COMMENT ON COLUMN {name}.\"a\" IS 'text'")
        db.execute(f'CREATE VIEW "{database}"."Side"."seen" AS SELECT {name}.* FROM {name}')
        assert rows(db, f'SELECT {name}."a" FROM {name} ORDER BY id') == [("x",), ("z",)]
        assert rows(db, f'SELECT s.a FROM "{database}"."Side"."seen" s ORDER BY 1')[0] == ("x",)
        assert rows(db, f"SELECT count(*) FROM (SELECT 1 FROM {name}) q, {name}") == [(4,)]
        with db.cursor().copy(f"COPY {name} (id, a) FROM STDIN") as copy:
            copy.write("3\tq\n")
        found = "SELECT table_catalog, table_schema FROM information_schema.tables"
        assert rows(db, f"{found} WHERE table_name = 'made'") == [(database, "public")]
        assert rows(db, "SELECT datname FROM pg_database") == [(database,)]
        assert rows(db, f"SELECT count(*) FROM main.made WHERE '{name}'::regclass::oid > 0") == [
            (3,)
        ]


def test_public_and_main_are_one_schema(server: RunningServer) -> None:
    with connected(server, "shop") as db:
        db.execute("CREATE OR REPLACE TABLE public.one (id SERIAL, a JSONB)")
        db.execute("INSERT INTO main.one (a) VALUES ('{}')")
        assert rows(db, "SELECT public.one.id FROM public.one") == [(1,)]
        assert rows(db, "SELECT current_schema(), current_schemas(true)") == [
            ("public", ["pg_catalog", "public"])
        ]
        assert rows(db, "SELECT * FROM current_schema()") == [("public",)]
        assert rows(db, "SELECT * FROM current_database() AS d, current_user") == [
            ("shop", "alice")
        ]
        for schema in ("main", "public"):
            asked = "SELECT count(*) FROM pg_tables WHERE tablename = 'one' AND schemaname = "
            assert rows(db, f"{asked}'{schema}'") == [(1,)]
            assert rows(db, f"{asked}%s", schema) == [(1,)]
            assert rows(db, "SELECT to_regclass(%s) IS NOT NULL", f"{schema}.one") == [(True,)]
            spaced = f'"{schema}" . "one"'
            assert rows(db, "SELECT %s::regclass::oid > 0", spaced) == [(True,)]
        db.execute("CREATE SCHEMA IF NOT EXISTS public")
        with pytest.raises(psycopg.errors.DuplicateSchema, match='"public" already exists'):
            db.execute("CREATE SCHEMA public")
        db.execute("CREATE OR REPLACE MACRO public.more(x) AS x + 1")
        db.execute("CREATE SEQUENCE IF NOT EXISTS public.numbers")
        assert rows(db, "SELECT public.more(1), nextval('public.numbers') > 0") == [(2, True)]
        # An alias of that name is no schema.
        assert rows(db, "SELECT public.x FROM (SELECT 7 AS x) AS public") == [(7,)]
        assert rows(db, "SELECT shop.x FROM (SELECT {'x': 8} AS shop)") == [(8,)]


def test_the_search_path_says_public(server: RunningServer) -> None:
    with connected(server, "shop") as db:
        assert rows(db, "SHOW search_path") == [('"$user", public',)]
        db.execute("CREATE SCHEMA IF NOT EXISTS paths")
        db.execute("SET search_path TO paths, public")
        assert rows(db, "SHOW search_path") == [("paths, public",)]
        assert rows(db, "SELECT current_schema, current_schemas(false)") == [
            ("paths", ["paths", "public"])
        ]
        db.execute("SELECT set_config('search_path', '\"$user\", public', false)")
        assert rows(db, "SELECT current_schema") == [("public",)]


def test_plans_and_errors_say_what_the_client_says(server: RunningServer) -> None:
    with connected(server, "shop") as db:
        db.execute("CREATE OR REPLACE TABLE public.told (id INTEGER)")
        plan = "\n".join(str(row) for row in rows(db, "EXPLAIN SELECT * FROM told"))
        assert "public.told" in plan
        assert "tables" not in plan
        db.execute("BEGIN READ ONLY")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match='database "shop"'):
            db.execute("INSERT INTO told VALUES (1)")
        db.execute("ROLLBACK")


def test_a_schema_public_of_the_file_is_left_alone(tmp_path: Path) -> None:
    file = str(tmp_path / "own.duckdb")
    with duckdb.connect(file) as made:
        made.execute("CREATE SCHEMA public; CREATE TABLE public.t (i INTEGER)")
        made.execute("CREATE TABLE main.t (i INTEGER, j INTEGER)")
    config = DuckDbConfig(path=file, threads=1)
    with (
        running_pgwire(lambda: DuckDbSqlServer(config, None)) as running,  # type: ignore[arg-type]
        connected(running, "shop") as db,
    ):
        assert rows(db, "SELECT current_schema()") == [("main",)]
        assert [d.name for d in db.execute("SELECT * FROM shop.public.t").description or ()] == [
            "i"
        ]
        listed = "SELECT table_schema FROM information_schema.tables WHERE table_name = 't'"
        assert sorted(rows(db, listed)) == [("main",), ("public",)]
