"""Statements whose WITH writes, against DuckDB with plain functions: each writes exactly once."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from tests.fix_sql import InstantGenerator, answer_text
from tests.property.test_sql_replay import is_it
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.dbfront.statement.session import DuckDbSession
from tierkv.kvcore.errors import FeatureNotSupportedError, RowLevelError

pytestmark = pytest.mark.skipif(
    int(duckdb.__version__.split(".")[0]) < 2, reason="the WITH of this DuckDB can't write"
)

MADE = """
CREATE TABLE u (k INTEGER, v VARCHAR);
INSERT INTO u SELECT i, 'v' || i % 7 FROM range(24) r(i);
CREATE TABLE arch (k INTEGER, a VARCHAR);
CREATE TABLE log (k INTEGER, made TIMESTAMP);
"""
LEFT = (
    "SELECT * FROM u ORDER BY ALL",
    "SELECT * FROM arch ORDER BY ALL",
    "SELECT k FROM log ORDER BY ALL",
)

MOVE = "WITH gone AS (DELETE FROM u WHERE k < 5 RETURNING *) "
COPIED = "WITH x AS (INSERT INTO arch SELECT k, v FROM u RETURNING *) "
CHANGED = "WITH x AS (UPDATE u SET v = v || '!' RETURNING *) "
STATEMENTS = {
    "move": MOVE + "INSERT INTO arch SELECT k, ai_generate(v || ' Where?') FROM gone",
    "move and return": MOVE + "INSERT INTO arch SELECT k, v FROM gone RETURNING k, ai_generate(a)",
    "move into a new table": "CREATE TABLE made AS " + MOVE + "SELECT k, ai_generate(v) FROM gone",
    "insert, then insert": COPIED + "INSERT INTO arch SELECT k, ai_generate(a) FROM x",
    "insert, then delete": COPIED + "DELETE FROM u WHERE ai_filter('q', v)",
    "insert, then update": COPIED + "UPDATE u SET v = ai_generate(v)",
    "insert and read": COPIED + "SELECT k, ai_generate(a) AS a FROM x ORDER BY k",
    "answers inserted": "WITH x AS (INSERT INTO arch SELECT k, ai_generate(v) FROM u RETURNING *) "
    "SELECT count(*), min(a) FROM x",
    "a WITH in it": "WITH x AS (WITH h AS (SELECT 7 AS k) INSERT INTO arch SELECT k, 'h' FROM h "
    "RETURNING *) SELECT k, ai_generate(a) AS a FROM x",
    "nothing returned": "WITH x AS (INSERT INTO arch VALUES (1, 'a')) "
    "SELECT length(ai_generate('b')) AS a",
    "emptied": "WITH x AS (TRUNCATE u) SELECT length(ai_generate('b')) AS a",
    "first by answers": COPIED + "SELECT k, ai_generate(a) AS a, ai_generate('b' || a) AS b FROM x "
    "ORDER BY a, k LIMIT 3",
    "two filters": COPIED + "SELECT k FROM x WHERE ai_filter('q', a) AND ai_filter('r', a) "
    "ORDER BY k",
    "two filters of what is gone": "WITH x AS (DELETE FROM u RETURNING *) SELECT k, v FROM x "
    "WHERE ai_filter('q', v) AND ai_filter('r', v) ORDER BY k",
    "two filters of what is changed": CHANGED + "SELECT k, v FROM x "
    "WHERE ai_filter('q', v) AND ai_filter('r', v) ORDER BY k",
    "a filter and LIMIT": COPIED + "SELECT 1 AS one FROM x WHERE ai_filter('q', 'a') LIMIT 2",
}


def plain() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.create_function(
        "ai_generate", lambda p: answer_text(p), ["VARCHAR"], "VARCHAR", null_handling="special"
    )
    connection.create_function(
        "ai_filter", is_it, ["VARCHAR", "VARCHAR"], "BOOLEAN", null_handling="special"
    )
    connection.execute(MADE)
    return connection


@pytest.fixture
async def tables(session: DuckDbSession) -> DuckDbSession:
    for statement in session.split(MADE):
        await session.execute(statement)
    return session


async def left(session: DuckDbSession, *more: str) -> list[list[tuple[object, ...]]]:
    return [list((await session.execute(query)).rows) for query in (*LEFT, *more)]


async def untouched(session: DuckDbSession) -> None:
    with plain() as connection:
        assert await left(session) == [connection.execute(q).fetchall() for q in LEFT]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a transaction"])
@pytest.mark.parametrize("name", STATEMENTS)
async def test_it_writes_once(
    name: str, inside: bool, tables: DuckDbSession, generator: InstantGenerator
) -> None:
    text = STATEMENTS[name]
    more = ["SELECT * FROM made ORDER BY ALL"] if "made AS" in text else []
    with plain() as connection:
        rows = connection.execute(text).fetchall()
        expected = [connection.execute(query).fetchall() for query in (*LEFT, *more)]
    if inside:
        await tables.execute("BEGIN")
    result = await tables.execute(text)
    if inside:
        await tables.execute("COMMIT")
    if result.columns is not None:
        assert list(result.rows) == rows
    else:
        assert int(result.command_tag.split()[-1]) == rows[0][0]
    assert await left(tables, *more) == expected
    assert len(generator.prompts) == len(set(generator.prompts))


@pytest.mark.parametrize("name", STATEMENTS)
async def test_explaining_leaves_nothing_behind(
    name: str, tables: DuckDbSession, generator: InstantGenerator
) -> None:
    text = STATEMENTS[name]
    for options in ("", "(AI_ESTIMATE) "):
        await tables.execute(f"EXPLAIN {options}{text}")
        await tables.execute("BEGIN")
        await tables.execute(f"EXPLAIN {options}{text}")
        assert tables.transaction_status == "T"
        await tables.execute("COMMIT")
    assert generator.prompts == []
    await untouched(tables)


async def test_an_estimate_knows_the_calls_of_what_it_takes_back(tables: DuckDbSession) -> None:
    told = (await tables.execute("EXPLAIN (AI_ESTIMATE) " + STATEMENTS["move"])).rows[-1][1]
    assert "rows 5, distinct 5, requests 5" in str(told)


@pytest.mark.parametrize("name", STATEMENTS)
async def test_explain_analyze_writes_once(name: str, tables: DuckDbSession) -> None:
    text = STATEMENTS[name]
    with plain() as connection:
        connection.execute(text)
        expected = [connection.execute(query).fetchall() for query in LEFT]
    told = await tables.execute(f"EXPLAIN ANALYZE {text}")
    assert told.rows[-1][0] == "ai_plan"
    assert await left(tables) == expected


@pytest.mark.parametrize("name", STATEMENTS)
async def test_describing_writes_nothing(name: str, tables: DuckDbSession) -> None:
    text = STATEMENTS[name]
    described = await tables.describe(text)
    await untouched(tables)
    assert described.columns == (await tables.execute(text)).columns


async def test_a_file_is_written_once_and_with_the_answers(
    generator: InstantGenerator, tmp_path: Path
) -> None:
    server = DuckDbSqlServer(DuckDbConfig(threads=2, sandbox=False), generator)
    try:
        session = await server.open_session(ClientInfo(user="ann"))
        for statement in session.split(MADE):
            await session.execute(statement)
        query = MOVE + "SELECT k, ai_generate(v) AS a FROM gone"
        await session.execute(f"COPY ({query}) TO '{tmp_path}/gone.csv'")
        read = await session.execute(f"SELECT * FROM '{tmp_path}/gone.csv' ORDER BY k")
        assert list(read.rows) == [(k, answer_text(f"v{k}")) for k in range(5)]
        assert (await session.execute("SELECT count(*) FROM u")).rows == [(19,)]
        await session.execute(f"EXPLAIN (AI_ESTIMATE) COPY ({query}) TO '{tmp_path}/none.csv'")
        assert (await session.execute(f"SELECT * FROM glob('{tmp_path}/*')")).rows == [
            (f"{tmp_path}/gone.csv",)
        ]
        copies = f"WITH c AS (COPY u TO '{tmp_path}/u.csv') SELECT ai_generate('a')"
        with pytest.raises(FeatureNotSupportedError, match="COPY in a WITH"):
            await session.execute(copies)
    finally:
        await server.close()


@pytest.mark.parametrize(
    "later",
    [
        "INSERT INTO arch VALUES (9, 'z') RETURNING ai_generate('y')",
        "CREATE TABLE IF NOT EXISTS made AS SELECT ai_generate('y') AS a",
        "SELECT CAST(coalesce(ai_generate('y'), 'missing')[:0] || '1' AS INTEGER)",
        STATEMENTS["move"],
    ],
)
async def test_what_a_with_wrote_earlier_is_not_forgotten(
    later: str, tables: DuckDbSession
) -> None:
    """DuckDB can only begin anew, so the change is made again."""
    await tables.execute("BEGIN")
    await tables.execute("WITH x AS (INSERT INTO log VALUES (1, NULL) RETURNING *) SELECT * FROM x")
    await tables.execute(later)
    await tables.execute("COMMIT")
    assert (await tables.execute("SELECT k FROM log")).rows == [(1,)]


async def test_what_is_explained_changes_no_transaction(tables: DuckDbSession) -> None:
    await tables.execute("BEGIN")
    await tables.execute("EXPLAIN ANALYZE SELECT count(*) FROM u")
    await tables.execute("SHOW TABLES")
    await tables.execute(STATEMENTS["move"])
    await tables.execute("COMMIT")
    assert (await tables.execute("SELECT count(*) FROM arch")).rows == [(5,)]


async def test_it_is_never_streamed(tables: DuckDbSession) -> None:
    await tables.execute("SET tierkv.execution = stream")
    with pytest.raises(FeatureNotSupportedError, match="it writes"):
        await tables.execute(STATEMENTS["insert and read"])
    await untouched(tables)


async def test_a_failed_call_fails_it_and_nothing_is_written(
    tables: DuckDbSession, generator: InstantGenerator
) -> None:
    generator.failing["v3"] = RowLevelError("no")
    for name in ("insert and read", "move"):
        with pytest.raises(RowLevelError):
            await tables.execute(STATEMENTS[name])
    await untouched(tables)
