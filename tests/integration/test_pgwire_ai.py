"""AI calls through the wire: SELECT and COPY, NULL prompts, and Describe that calls no model."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from tests.fix_text import byte_tokenizer, running_front, write_model_folder
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock

pytestmark = pytest.mark.integration


async def test_ai_calls_in_select_and_copy(tmp_path: Path) -> None:
    async with running_front(write_model_folder(tmp_path)) as front:
        sql_server = DuckDbSqlServer(DuckDbConfig(threads=1), front.generation)
        server = PgWireServer(PgWireConfig(port=0), DialectServer(sql_server), SystemClock())
        port = await server.start()
        conn = await asyncpg.connect(
            host="127.0.0.1", port=port, user="alice", database="main", ssl=False
        )
        await conn.execute(
            "CREATE TABLE docs AS SELECT * FROM (VALUES (1, 'one'), (2, NULL)) v(id, b)"
        )
        query = (
            "SELECT id, ai_generate('say ' || b, options => '{\"max_tokens\": 4}') AS a FROM docs"
        )
        statement = await conn.prepare(f"{query} ORDER BY id")
        assert [(a.name, a.type.name) for a in statement.get_attributes()] == [
            ("id", "int4"),
            ("a", "text"),
        ]
        rows = [tuple(row) for row in await statement.fetch()]
        assert rows[1] == (2, None)
        assert rows[0][1]
        out = bytearray()

        async def keep(data: bytes) -> None:
            out.extend(data)

        status = await conn.copy_from_query(f"{query} ORDER BY id", output=keep)
        assert status == "COPY 2"
        assert out.decode() == f"1\t{rows[0][1]}\n2\t\\N\n"
        statement = await conn.prepare("SELECT ai_generate($1, documents => $2) AS a")
        assert [parameter.name for parameter in statement.get_parameters()] == ["text", "text[]"]
        assert await statement.fetchval("which?", ["first", None, "second"])
        seen = byte_tokenizer().decode(list(front.node.seen[-1].token_ids))
        assert seen == "first\nsecond\nwhich?\n"
        with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
            await conn.fetch("SELECT 1, ai_generate('a', documents => 'b')")
        assert refused.value.position == "41" and "column of lists" in refused.value.hint
        await conn.close()
        await server.stop()
        await sql_server.close()
