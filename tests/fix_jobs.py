"""Doors for jobs and AI tables: the embedded database, and a real PostgreSQL, with one model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pytest

from tests.fix_pgwire import running_pgwire
from tests.fix_postgres import PostgresServer, attendants, running_relay
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.statement.server import DuckDbSqlServer

ROWS = 60


@dataclass
class Door:
    """A door that is open, and the model behind it."""

    dsn: str
    generator: InstantGenerator
    loop: asyncio.AbstractEventLoop

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            yield connection

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.session() as connection:
            return connection.execute(sql).fetchall()

    def hold(self) -> None:
        """Let no answer come before ``release``."""

        async def set_gate() -> None:
            self.generator.gate = asyncio.Event()
            self.generator.started.clear()

        asyncio.run_coroutine_threadsafe(set_gate(), self.loop).result(10)

    def release(self) -> None:
        async def open_gate() -> None:
            assert self.generator.gate is not None
            self.generator.gate.set()
            self.generator.gate = None

        asyncio.run_coroutine_threadsafe(open_gate(), self.loop).result(10)

    def state(self) -> tuple[Any, ...]:
        found = self.rows("SELECT state, done, total, written, failed FROM tierkv.jobs")
        return found[0] if found else ()


_TABLES: Final = (
    "jobs", "parts", "failures", "ai_tables", "ai_rows", "kv_indexes", "kv_index_texts",
    "kv_index_progress", "kv_index_times",
)  # fmt: skip

TABLES = f"""
DROP TABLE IF EXISTS docs;
DROP TABLE IF EXISTS answers;
DROP TABLE IF EXISTS made;
DROP TABLE IF EXISTS unmade;
CREATE TABLE docs (id int, body text);
INSERT INTO docs SELECT i, 'text ' || i FROM generate_series(1, {ROWS}) t(i);
CREATE TABLE answers (id int, answer text);
"""


@pytest.fixture(params=["embedded", "postgres"])
def door(request: pytest.FixtureRequest, generator: InstantGenerator) -> Iterator[Door]:
    if request.param == "embedded":
        sql = DuckDbSqlServer(DuckDbConfig(threads=1), generator)
        with running_pgwire(lambda: sql) as running:
            made = Door(running.dsn, generator, running.loop)
            _make_tables(made)
            yield made
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    asyncio.run(install(postgres.dsn))
    with running_relay(postgres.dsn, attendants(generator)) as relay:
        made = Door(relay.dsn, generator, relay.loop)
        _make_tables(made)
        with made.session() as connection:
            for table in _TABLES:
                connection.execute(f"DELETE FROM tierkv_jobs.{table}".encode())
        yield made


def _make_tables(door: Door) -> None:
    with door.session() as connection:
        for text in TABLES.strip().split(";\n"):
            connection.execute(text)


class Running:
    """A job in a thread of its own, with its error."""

    def __init__(self, door: Door, sql: str) -> None:
        self.connection = psycopg.connect(door.dsn, autocommit=True)
        self.error: psycopg.Error | None = None
        self._sql = sql
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.connection.execute(self._sql)
        except psycopg.Error as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.connection.close()
