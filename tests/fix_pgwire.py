"""A PostgreSQL-speaking server in a thread of its own, for real clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.fix_thread import START_S, running_in_thread
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.sql_session import SqlServer
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.clock import SystemClock


@dataclass
class RunningServer:
    """A server that is up; ``call`` runs a coroutine on its loop."""

    port: int
    server: PgWireServer
    sql_server: Any
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(START_S)

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=alice dbname=main"


def tierkv_sql() -> SqlServer:
    """The product's own SQL server; these tests make no AI calls with it."""
    return DuckDbSqlServer(DuckDbConfig(threads=1), None)  # type: ignore[arg-type]


@contextmanager
def running_pgwire(
    make_sql: Callable[[], SqlServer] = tierkv_sql, **settings: Any
) -> Iterator[RunningServer]:
    """Run a server until the block ends; it must stop cleanly."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[RunningServer]:
        sql_server = make_sql()
        config = PgWireConfig(port=0, shutdown_grace_s=5.0, **settings)
        jobs = getattr(sql_server, "jobs", None)
        server = PgWireServer(config, DialectServer(sql_server, jobs=jobs), SystemClock())
        try:
            port = await server.start()
            yield RunningServer(port, server, sql_server, asyncio.get_running_loop())
            await server.stop()
            assert server.connections == 0
        finally:
            await sql_server.close()

    with running_in_thread(serving) as running:
        yield running
