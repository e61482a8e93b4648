"""A statement's text is cut into tokens once and planned once, over either query protocol.

The interpreter's profiling hook counts calls of the real functions; nothing is replaced.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import asyncpg
import pytest

from tests.fix_text import running_front, write_model_folder
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.text import lexer

pytestmark = pytest.mark.integration

_CALL = "ai_generate(body, options => '{\"max_tokens\": 4}')"


@dataclass
class Counted:
    """How often each text was cut into tokens, and planned."""

    cut: Counter[str] = field(default_factory=Counter)
    planned: Counter[str] = field(default_factory=Counter)


@contextmanager
def counted() -> Iterator[Counted]:
    counts = Counted()
    counters = {lexer._cut.__code__: counts.cut, plan_statement.__code__: counts.planned}

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (counter := counters.get(frame.f_code)) is not None:
            counter[str(frame.f_locals["text"])] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A client of a server in this thread, with a table ``docs`` of one row."""
    async with running_front(write_model_folder(folder)) as front:
        sql_server = DuckDbSqlServer(DuckDbConfig(threads=1), front.generation)
        server = PgWireServer(PgWireConfig(port=0), DialectServer(sql_server), SystemClock())
        port = await server.start()
        connection = await asyncpg.connect(
            host="127.0.0.1", port=port, user="alice", database="main", ssl=False
        )
        await connection.execute("CREATE TABLE docs AS SELECT 1 AS id, 'one' AS body")
        try:
            yield connection
        finally:
            await connection.close()
            await server.stop()
            await sql_server.close()


async def test_simple_query_is_cut_and_planned_once(tmp_path: Path) -> None:
    sql = f"SELECT {_CALL} FROM docs"
    async with connected(tmp_path) as connection:
        with counted() as counts:
            await connection.execute(sql)
        assert (counts.cut, counts.planned) == ({sql: 1}, {sql: 1})


async def test_statements_of_one_query_are_cut_with_it(tmp_path: Path) -> None:
    one, other = f"SELECT {_CALL} FROM docs", "SELECT id FROM docs"
    async with connected(tmp_path) as connection:
        with counted() as counts:
            await connection.execute(f"{one}; {other};")
        assert (counts.cut[one], counts.cut[other], counts.cut[f"{one}; {other};"]) == (0, 0, 1)
        assert (counts.planned[one], counts.planned[other]) == (1, 1)


async def test_prepared_statement_is_cut_once_however_often_it_runs(tmp_path: Path) -> None:
    sql = f"SELECT {_CALL} FROM docs WHERE id = $1"
    cast = sql.replace("$1", "CAST($1 AS INTEGER)")
    async with connected(tmp_path) as connection:
        with counted() as counts:
            statement = await connection.prepare(sql)
            await statement.fetch(1)
            assert (counts.cut[sql], counts.cut[cast]) == (1, 1)
            assert (counts.planned[sql], counts.planned[cast]) == (0, 1)
            await statement.fetch(1)
            await statement.fetch(1)
        assert (counts.cut[sql], counts.cut[cast]) == (1, 1)
        assert counts.planned[cast] == 3, "form keys are good for one run"
        own = [text for text in counts.cut if text not in (sql, cast)]
        assert len(own) == 1 and "duckdb_columns()" in own[0] and counts.cut[own[0]] == 1


async def test_prepared_statement_without_calls_is_planned_once(tmp_path: Path) -> None:
    sql = "SELECT body FROM docs WHERE id = $1"
    cast = sql.replace("$1", "CAST($1 AS INTEGER)")
    async with connected(tmp_path) as connection:
        with counted() as counts:
            statement = await connection.prepare(sql)
            for _ in range(3):
                assert await statement.fetchval(1) == "one"
                assert await connection.fetchval("SELECT 2") == 2
        assert (counts.cut[sql], counts.cut[cast], counts.planned[cast]) == (1, 1, 1)
