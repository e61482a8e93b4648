"""A full disk below the tables is 53100 with the cure, whatever it stopped; reading goes on."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from dbfront.engines.duckdb_errors import to_tierkv_error
from kvcore.errors import SqlError
from tests.fix_small_disk import fill, small_disk  # noqa: F401 - a fixture


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
