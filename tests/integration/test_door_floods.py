"""Clients that connect and say nothing, or half of it, take no front's descriptors or disk."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fix_pgwire import tierkv_sql
from tests.fix_text import running_front, write_model_folder
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.server import HttpConnection, HttpServer
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.server import PgWireServer
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.kvcore.clock import SystemClock

pytestmark = pytest.mark.integration

STRANGERS = """
import socket, sys
held = []
for port in sys.argv[1:]:
    for _ in range(160):
        try:
            held.append(socket.create_connection(("127.0.0.1", int(port)), timeout=10))
        except OSError:
            pass
print("held", flush=True)
sys.stdin.read()
"""
GET = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    async with running_front(write_model_folder(tmp_path)) as front:
        config = HttpConfig(port=0, max_connections=100, drain_timeout_s=1.0)
        server = HttpServer(config, front.generation)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def is_answered(port: int) -> bool:
    reader, writer = await connect(port)
    try:
        writer.write(GET)
        return b" 200 " in await reader.readline()
    except ConnectionError:
        return False
    finally:
        writer.close()


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"POST /v1/sql HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ",
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b'content-length: 100\r\n\r\n{"prompt": ',
        GET + b"GET /livez HT",
    ],
    ids=["silent", "head", "body", "second head"],
)
async def test_a_request_that_never_ends_is_closed(
    server: HttpServer,
    half: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(HttpConnection, "head_timeout_s", 0.2)
    monkeypatch.setattr(HttpConnection, "body_timeout_s", 0.2)
    reader, writer = await connect(server.port)
    if half.startswith(GET):
        writer.write(GET)
        await reader.readuntil(b"}")
    writer.write(half.removeprefix(GET))
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    assert await is_answered(server.port)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_connections_above_the_limit_are_closed_and_room_is_given_again(
    server: HttpServer,
) -> None:
    held = [await connect(server.port) for _ in range(100)]
    held[0][1].write(GET)
    assert b" 200 " in await held[0][0].readline()
    assert not await is_answered(server.port)
    for _, writer in held:
        writer.close()
    async with asyncio.timeout(20):
        while not await is_answered(server.port):
            await asyncio.sleep(0.05)


async def test_strangers_that_take_all_descriptors_stop_no_client(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tierkv_sql()
    sql = PgWireServer(PgWireConfig(port=0), DialectServer(engine), SystemClock())
    sql_port = await sql.start()
    reader, writer = await connect(server.port)
    with few_descriptors(spare=150):
        strangers = subprocess.Popen(
            [sys.executable, "-c", STRANGERS, str(server.port), str(sql_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert strangers.stdout is not None
        assert await asyncio.to_thread(strangers.stdout.readline) == b"held\n"
        try:
            writer.write(GET)
            assert b" 200 " in await reader.readline()
            assert not await is_answered(server.port)
        finally:
            await asyncio.to_thread(strangers.communicate)
        async with asyncio.timeout(20):
            while not await is_answered(server.port):
                await asyncio.sleep(0.05)
    refusals = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert 1 <= len(refusals) <= 2
    assert all("refuses clients" in text for text in refusals)
    writer.close()
    await sql.stop()
    await engine.close()


async def test_vanished_clients_are_looked_for(server: HttpServer) -> None:
    _, writer = await connect(server.port)
    assert await is_answered(server.port)
    assert server.connections
    for transport in server.connections:
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()


async def test_malformed_requests_leave_no_log_line(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await connect(server.port)
    writer.write(b"\0\0 nonsense\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
