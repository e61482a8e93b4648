"""A full disk below the tables is 53100 with the cure, whatever it stopped; reading goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from tests.fix_small_disk import fill, small_disk  # noqa: F401 - a fixture
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig, DuckDbEngine
from tierkv.dbfront.databases.duckdb_errors import to_tierkv_error
from tierkv.kvcore.errors import ConfigError, SqlError


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE big AS SELECT md5(i::text) a FROM range(300000) r(i)",
        "INSERT INTO t SELECT md5(i::text) FROM range(300000) r(i)",
        "INSERT INTO t SELECT md5(i::text) FROM range(2000) r(i)",
    ],
)
def test_a_full_disk_is_told_with_the_cure_and_reads_go_on(
    small_disk: Path,  # noqa: F811
    sql: str,
    as_json: bool,
) -> None:
    with duckdb.connect(str(small_disk / "t.duckdb")) as database:
        database.execute(f"SET errors_as_json = {as_json}")
        database.execute("CREATE TABLE t (a TEXT)")
        database.execute("INSERT INTO t VALUES ('x')")
        filler = fill(small_disk)
        with pytest.raises(duckdb.Error) as caught:
            database.execute(sql)
        told = to_tierkv_error(caught.value, sql, lambda position: position)
        assert isinstance(told, SqlError)
        assert (told.sqlstate, str(small_disk) in told.message) == ("53100", False)
        assert "Free space" in (told.hint or "")
        assert database.execute("SELECT a FROM t").fetchall() == [("x",)]
        filler.unlink()
        database.execute("INSERT INTO t VALUES ('y')")


def test_a_front_that_starts_on_a_full_disk_reads_and_writes_when_there_is_room(
    small_disk: Path,  # noqa: F811
) -> None:
    path = small_disk / "t.duckdb"
    config = DuckDbConfig(str(path))
    with opened(config) as engine:
        engine._root.execute("CREATE TABLE t AS SELECT md5(i::text) a FROM range(1000) r(i)")
    with duckdb.connect(str(path)) as database:  # The next start has a log to read, too.
        database.execute("SET checkpoint_threshold = '1GB'; PRAGMA disable_checkpoint_on_shutdown")
        database.execute("INSERT INTO t VALUES ('x')")
    filler = fill(small_disk)
    with opened(config) as engine:
        count = "SELECT count(*), max(a) FROM t"
        assert engine._root.execute(count).fetchone() == (1001, "x")
        assert engine._root.execute("FROM duckdb_views() WHERE schema_name = 'tierkv'").fetchall()
        filler.unlink()
        engine._root.execute("INSERT INTO t VALUES ('y')")
        assert engine._root.execute(count).fetchone() == (1002, "y")


def test_a_database_that_can_not_be_made_says_that_the_disk_is_full(
    small_disk: Path,  # noqa: F811
) -> None:
    fill(small_disk)
    with pytest.raises(ConfigError, match="can't open") as caught:
        DuckDbEngine(DuckDbConfig(str(small_disk / "t.duckdb")))
    assert caught.value.hint == "Free space on its disk."


@contextmanager
def opened(config: DuckDbConfig) -> Iterator[DuckDbEngine]:
    engine = DuckDbEngine(config)
    try:
        yield engine
    finally:
        engine.close()
