"""Files, programs, extensions, the engine's settings: refused without front.external_access."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.fix_pgwire import running_pgwire
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.postgres_dialect.catalog.install import catalog_statements
from tierkv.dbfront.postgres_dialect.rewriting.rewriter import DATABASE
from tierkv.dbfront.statement.server import DuckDbSqlServer

pytestmark = pytest.mark.integration


def open_server() -> DuckDbSqlServer:
    return DuckDbSqlServer(DuckDbConfig(sandbox=False, threads=1), None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def closed() -> Iterator[psycopg.Connection]:
    with running_pgwire() as server, psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE t (a INTEGER, b VARCHAR)")
        yield conn


@pytest.fixture(scope="module")
def opened() -> Iterator[psycopg.Connection]:
    with (
        running_pgwire(open_server) as server,
        psycopg.connect(server.dsn, autocommit=True) as conn,
    ):
        yield conn


REFUSED = (
    "SELECT * FROM '{f}.csv'",
    "SELECT * FROM '{f}.parquet'",
    "SELECT * FROM read_csv('{f}.csv')",
    "SELECT * FROM read_parquet('{f}.parquet')",
    "SELECT * FROM read_json('{f}.json')",
    "SELECT * FROM read_text('{f}.csv')",
    "SELECT * FROM read_blob('{f}.csv')",
    "SELECT * FROM glob('{f}*')",
    "SELECT * FROM sniff_csv('{f}.csv')",
    "SELECT * FROM parquet_metadata('{f}.parquet')",
    "SELECT * FROM query('SELECT * FROM read_text(''{f}.csv'')')",
    "SELECT * FROM 'https://127.0.0.1/{f}.parquet'",
    "COPY t FROM '{f}.csv'",
    "COPY t TO '{f}.out'",
    "COPY (SELECT 1) TO '{f}.out' (FORMAT parquet)",
    "ATTACH '{f}.duckdb' AS other",
    "ATTACH 'dbname=x' AS other (TYPE postgres)",
    "EXPORT DATABASE '{f}.out'",
    "IMPORT DATABASE '{f}.out'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{f}.duckdb_extension'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET allow_unsigned_extensions = true",
    "SET allowed_directories = ['/']",
    "SET temp_directory = '{f}'",
    "SET log_query_path = '{f}.out'",
    "SET threads = 1",
    "SET memory_limit = '1GB'",
    "PRAGMA enable_profiling = 'json'",
    "PRAGMA profiling_output = '{f}.out'",
)


@pytest.mark.parametrize("sql", REFUSED)
def test_the_sandbox_refuses_and_names_the_setting(
    closed: psycopg.Connection, tmp_path: Path, sql: str
) -> None:
    files = tmp_path / "file"
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
        closed.execute(sql.replace("{f}", str(files)))
    assert "front.external_access" in (caught.value.diag.message_hint or "")
    assert closed.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("sql", ["COPY t FROM PROGRAM 'id'", "COPY t TO PROGRAM 'cat'"])
def test_no_setting_runs_programs(
    closed: psycopg.Connection, opened: psycopg.Connection, sql: str
) -> None:
    for conn in (closed, opened):
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="can't run programs"):
            conn.execute(sql)


def test_files_are_queried_in_place_where_allowed(
    opened: psycopg.Connection, tmp_path: Path
) -> None:
    csv, parquet, json = (tmp_path / f"notes.{kind}" for kind in ("csv", "parquet", "json"))
    rows = [(1, "one"), (2, None)]
    opened.execute(
        "CREATE OR REPLACE TABLE notes AS SELECT * FROM (VALUES (1, 'one'), (2, NULL)) v(a, b)"
    )
    opened.execute(f"COPY notes TO '{csv}' (HEADER)")
    opened.execute(f"COPY notes TO '{parquet}' (FORMAT parquet)")
    opened.execute(f"COPY notes TO '{json}' (FORMAT json)")
    for source in (
        f"'{csv}'",
        f"'{parquet}'",
        f"read_csv('{csv}')",
        f"read_parquet('{tmp_path}/*.parquet')",
        f"read_json('{json}')",
    ):
        assert opened.execute(f"SELECT a, b FROM {source} ORDER BY a").fetchall() == rows
    found = opened.execute(f"SELECT file FROM glob('{tmp_path}/*') ORDER BY file").fetchall()
    assert found == [(str(path),) for path in sorted((csv, parquet, json))]
    opened.execute("CREATE OR REPLACE TABLE back (a INTEGER, b VARCHAR)")
    assert opened.execute(f"COPY back FROM '{csv}' (HEADER)").statusmessage == "COPY 2"
    joined = f"SELECT count(*) FROM back JOIN '{parquet}' p ON back.a = p.a WHERE p.a = %s"
    assert opened.execute(joined, [1]).fetchone() == (1,)
    opened.execute(f"ATTACH '{tmp_path / 'other.duckdb'}' AS other")
    opened.execute("CREATE TABLE other.kept AS SELECT 7 AS n")
    assert opened.execute("SELECT n FROM other.kept").fetchone() == (7,)
    opened.execute("DETACH other")
    opened.execute("SET threads = 1")


def test_a_catalogue_that_was_left_half_made_is_made_anew() -> None:
    async def leave_half(sql: DuckDbSqlServer) -> None:
        session = await sql.open_session(ClientInfo(user="gone"))
        await session.execute_own(f"ATTACH ':memory:' AS {DATABASE}")
        for statement in catalog_statements()[:5]:
            await session.execute_own(statement)
        await session.close()

    with running_pgwire() as server:
        server.call(leave_half(server.sql_server))
        for _ in range(2):  # The first one needs the catalog, the second one has it.
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("CREATE TABLE IF NOT EXISTS healed (a INTEGER)")
                names = conn.execute("SELECT relname FROM pg_class WHERE relname = 'healed'")
                assert names.fetchall() == [("healed",)]
