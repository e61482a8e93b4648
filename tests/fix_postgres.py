"""A real PostgreSQL server for tests, in a folder of its own, and the relay in front of it."""

from __future__ import annotations

import asyncio
import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from tests.fix_cluster import free_port
from tests.fix_sql import InstantGenerator
from tests.fix_thread import START_S, running_in_thread
from tierkv.dbfront.accounts.statement_log import StatementLog
from tierkv.dbfront.accounts.statistic_store import StatisticStore
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.jobs.job_views import with_uses
from tierkv.dbfront.postgres.attendant import AiAttendant
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres.relay import Relay
from tierkv.dbfront.postgres.server import MakeAttendant, RelayConfig, RelayServer
from tierkv.dbfront.postgres.statements.ai_run import AiServices
from tierkv.dbfront.views.index_places import IndexPlaces, ReadTexts
from tierkv.dbfront.views.statistics import VIEWS as STATISTIC_VIEWS
from tierkv.dbfront.views.statistics import statistic_rows
from tierkv.kvcore.clock import SystemClock
from tierkv.sql.views import Row

USER = "alice"
PASSWORD = "correct horse"
_CONFIG = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = off
full_page_writes = off
password_encryption = scram-sha-256
max_connections = 60
logging_collector = off
"""


def _programs() -> Path:
    """Find the server's programs; packages keep them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    if found:
        return found[0].parent
    name = shutil.which("initdb")
    assert name, "no PostgreSQL server: run deploy/install-test-packages.sh"
    return Path(name).resolve().parent


@dataclass
class PostgresServer:
    """A server that runs; it refuses to run as root, so root runs it as another user."""

    folder: Path
    port: int
    programs: Path
    certificate: tuple[str, str] | None = None
    run_as: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        self._control("start", "-l", str(self.folder / "log"), "-o", f"-p {self.port}")

    def stop(self, mode: str = "fast") -> None:
        """Stop it, if it runs."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self._control("stop", "-m", mode)

    def _control(self, *arguments: str) -> None:
        command = [str(self.programs / "pg_ctl"), "-w", "-D", str(self.folder / "data")]
        with (self.folder / "control").open("w") as out:
            subprocess.run(
                [*command, *arguments], check=True, stdout=out, stderr=out, timeout=60,
                **self.run_as,
            )  # fmt: skip

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} password='{PASSWORD}' dbname=app"

    @property
    def url(self) -> str:
        return f"postgresql://{USER}:{quote(PASSWORD)}@127.0.0.1:{self.port}/app"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def running_postgres(certificate: tuple[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server with a database ``app`` of the superuser ``alice``, who needs a password."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-pg-"))
    run_as: dict[str, Any] = {}
    if os.getuid() == 0:
        someone = pwd.getpwnam("nobody")
        os.chown(folder, someone.pw_uid, someone.pw_gid)
        run_as = {"user": someone.pw_uid, "group": someone.pw_gid, "extra_groups": []}
    server = PostgresServer(folder, free_port(), _programs(), certificate, run_as)
    try:
        _initialise(server)
        server.start()
        try:
            with psycopg.connect(server.dsn.replace("dbname=app", "dbname=postgres")) as connection:
                connection.autocommit = True
                connection.execute("CREATE DATABASE app")
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder)


def _initialise(server: PostgresServer) -> None:
    password = server.folder / "password"
    password.write_text(PASSWORD)
    password.chmod(0o644)
    data = server.folder / "data"
    subprocess.run(
        [
            str(server.programs / "initdb"), "-D", str(data), "-U", USER, "-A", "scram-sha-256",
            "--pwfile", str(password), "-E", "UTF8", "--locale=C.UTF-8", "--no-sync",
        ],
        check=True, capture_output=True, timeout=60, **server.run_as,
    )  # fmt: skip
    lines = _CONFIG
    if server.certificate:
        names = ("server.crt", "server.key")
        for source, name in zip(server.certificate, names, strict=True):
            shutil.copy(source, data / name)
            (data / name).chmod(0o600)
            if server.run_as:
                os.chown(data / name, server.run_as["user"], server.run_as["group"])
        lines += "ssl = on\n"
    with (data / "postgresql.conf").open("a") as config:
        config.write(lines)


@dataclass
class RunningRelay:
    """A relay that is up, on a loop in a thread of its own."""

    port: int
    server: RelayServer
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(START_S)

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} password='{PASSWORD}' dbname=app"

    @property
    def environment(self) -> dict[str, str]:
        """For psql and other programs."""
        return os.environ | {
            "PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": USER,
            "PGPASSWORD": PASSWORD, "PGDATABASE": "app",
        }  # fmt: skip


@contextmanager
def running_relay(
    dsn: str, make_attendant: Callable[[], MakeAttendant] | None = None, **settings: Any
) -> Iterator[RunningRelay]:
    """Run a relay until the block ends; it must stop cleanly."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[RunningRelay]:
        attendants = None if make_attendant is None else make_attendant()
        server = RelayServer(RelayConfig(dsn=dsn, port=0, **settings), attendants)
        port = await server.start()
        yield RunningRelay(port, server, asyncio.get_running_loop())
        await server.stop()
        assert server.connections == 0

    with running_in_thread(serving) as running:
        yield running


def attendants(generator: InstantGenerator) -> Callable[[], MakeAttendant]:
    """Answer AI calls of relayed sessions with a generator."""

    def make() -> MakeAttendant:
        log = StatementLog(StatisticStore(now_s=SystemClock().wall()), SystemClock())

        async def view_rows(view: str, client: ClientInfo) -> list[Row]:
            return await statistic_rows(view, log) if view in STATISTIC_VIEWS else []

        places = IndexPlaces(generator, SystemClock())

        async def index_rows(rows: list[Row], read: ReadTexts, client: ClientInfo) -> list[Row]:
            return await places.add_to(with_uses(rows, (), ()), read, client.user)

        services = AiServices(
            generator, SystemClock(), statements=log, view_rows=view_rows, reset=log.reset,
            index_rows=index_rows,
        )  # fmt: skip

        def attendant(relay: Relay) -> AiAttendant:
            return AiAttendant(relay, services)

        return attendant

    return make


TABLES = """
DROP TABLE IF EXISTS docs, topics;
CREATE TABLE docs (id int PRIMARY KEY, topic int, body text);
INSERT INTO docs SELECT i, i % 4, CASE WHEN i % 10 = 7 THEN NULL ELSE 'body ' || (i % 30) END
  FROM generate_series(0, 59) i;
CREATE TABLE topics (id int PRIMARY KEY, name text);
INSERT INTO topics VALUES (0, 'sport'), (1, 'music'), (2, NULL), (5, 'food');
"""


class RawClient:
    """A client that says exactly what it is told, in pieces of any size."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn)  # logs in and keeps the socket open
        self.socket = socket.socket(fileno=self.connection.fileno())
        self.socket.settimeout(30)

    def say(self, data: bytes, rng: random.Random | None = None) -> None:
        while data:
            size = rng.randint(1, 40) if rng else len(data)
            self.socket.sendall(data[:size])
            data = data[size:]

    def hear(self, readies: int) -> list[tuple[str, bytes]]:
        frames: list[tuple[str, bytes]] = []
        buffer = b""
        while readies:
            while len(buffer) < 5 or len(buffer) < 1 + int.from_bytes(buffer[1:5], "big"):
                piece = self.socket.recv(65536)
                assert piece
                buffer += piece
            size = 1 + int.from_bytes(buffer[1:5], "big")
            frames.append((chr(buffer[0]), buffer[5:size]))
            buffer = buffer[size:]
            readies -= frames[-1][0] == "Z"
        assert not buffer
        return frames

    def close(self) -> None:
        self.socket.detach()
        self.connection.close()


@pytest.fixture
def ai_relay(postgres: PostgresServer, generator: InstantGenerator) -> Iterator[RunningRelay]:
    """A relay whose AI calls the generator answers, over fresh tables."""
    asyncio.run(install(postgres.dsn))
    with psycopg.connect(postgres.dsn) as direct:
        direct.execute(TABLES)
    with running_relay(postgres.dsn, attendants(generator)) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def front_url(postgres: PostgresServer) -> Iterator[str]:
    """A database for what a front keeps; the front's tables go after the test."""
    yield postgres.url
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tierkv_front CASCADE")
