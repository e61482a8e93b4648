"""A PostgreSQL-speaking server in a thread of its own, for real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dbfront.contracts import SqlServer
from dbfront.engines.duckdb_engine import DuckDbConfig
from dbfront.pgwire.config import PgWireConfig
from dbfront.pgwire.server import PgWireServer
from dbfront.session import DuckDbSqlServer
from kvcore.clock import SystemClock
from tests.plain_sql import PlainSqlServer

START_S = 20.0


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


def plain_sql() -> SqlServer:
    return PlainSqlServer()


@contextmanager
def running_pgwire(
    make_sql: Callable[[], SqlServer] = tierkv_sql, **settings: Any
) -> Iterator[RunningServer]:
    """Run a server until the block ends; it must stop cleanly."""
    started: list[RunningServer] = []
    errors: list[BaseException] = []
    up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        sql_server = make_sql()
        server = PgWireServer(
            PgWireConfig(port=0, shutdown_grace_s=5.0, **settings), sql_server, SystemClock()
        )
        try:
            port = await server.start()
            started.append(RunningServer(port, server, sql_server, asyncio.get_running_loop()))
            up.set()
            await stop.wait()
            await server.stop()
            assert server.connections == 0
        finally:
            await sql_server.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert up.wait(START_S)
    try:
        if not started:
            raise errors[0]
        yield started[0]
    finally:
        if started:
            started[0].loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
