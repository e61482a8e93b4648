"""A real cluster as processes: ``tierkv up``, started, killed in parts and stopped by tests.

Used by tests/integration. Conditions are awaited with a deadline; nothing sleeps for a fixed time.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

ROOT = Path(__file__).parents[1]
T = TypeVar("T")
START_S = 120.0
PORT_CLAIMS = Path(tempfile.gettempdir()) / f"tierkv-test-ports-{os.getuid()}"


def wait_for(condition: Callable[[], T], *, what: str, deadline_s: float = 60.0) -> T:
    """Return the first true value of ``condition``; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s} s: {what}")
        time.sleep(0.05)


def free_port() -> int:
    """Return a port of this machine that no server has, and that no other test gets.

    Below the ports that the kernel gives to clients: a connection somewhere on the machine can't
    take the port before its server does. A lock file, held until the test process ends, keeps it
    from the tests beside, whose server may not have started when they ask. The generator is the
    system's: the seeded one starts anew in every test, and alike in the processes side by side.
    """
    PORT_CLAIMS.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        claim = os.open(PORT_CLAIMS / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with socket.socket() as probe:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                probe.bind(("127.0.0.1", port))
            except OSError:
                os.close(claim)
                continue
            return port


class Cluster:
    """One ``tierkv up``.

    Attributes:
        run_dir: its run directory.
        pg_port: SQL.
        http_port: REST.
        process: the supervisor.
    """

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.pg_port, self.http_port = free_port(), free_port()
        self.log = run_dir.with_suffix(".log")
        command = [
            sys.executable, "-m", "tierkv", "up",
            "--pg-port", str(self.pg_port), "--http-port", str(self.http_port),
            "--set", f"cluster.run_dir={run_dir}", "--set", "dmp.capacity=256MiB",
            "--set", "compute.l1_capacity=64MiB", "--set", "compute.threads=1",
            "--set", "dmp.remove_on_stop=true", "--set", "compute.block_tokens=16",
            *arguments,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_for(self._is_up, what=f"cluster up: {self.log}", deadline_s=START_S)

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"tierkv up ended: {self.log.read_text()}")
        return (self.run_dir / "cluster.json").exists()

    def state(self) -> dict[str, Any]:
        """Return what ``tierkv up`` wrote about its children."""
        found: dict[str, Any] = json.loads((self.run_dir / "cluster.json").read_text())
        return found

    def nodes(self) -> dict[str, tuple[str, int]]:
        """Return state and incarnation per node, as the nodes view shows them."""
        rows = self.query("SELECT node_id, state, incarnation FROM tierkv.nodes")
        return {row[0]: (row[1], int(row[2])) for row in rows}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL through psycopg."""
        dsn = f"host=127.0.0.1 port={self.pg_port} user=tierkv dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(sql).fetchall()

    def kill(self, node: str) -> None:
        """Kill -9 a child and wait until the supervisor has started it again."""
        pid = self.pid_of(node)
        assert pid, f"no process of {node}"
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.pid_of(node) not in (0, pid), what=f"{node} started again")
        wait_for(self._views_work, what="the meta server answers the views")

    def _views_work(self) -> bool:
        try:
            return bool(self.nodes())
        except psycopg.OperationalError:
            return False

    def pid_of(self, node: str) -> int:
        """Find a child's process by its command line; 0 while there is none."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            mine = str(self.run_dir / "cluster.toml").encode() in words
            if alive and mine and node.encode() in words:
                return int(folder.name)
        return 0

    def complete(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """POST /v1/completions with token ids, greedy; return the body."""
        body = {"model": "tierkv-demo", "prompt": list(prompt), "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions",
            json.dumps(body | {"max_tokens": 24, "ignore_eos": True} | options).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            pytest.fail(f"HTTP {error.code}: {error.read().decode()}")

    def stop(self) -> int:
        """Ctrl-C, wait, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def start_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Cluster]]:
    """Start clusters that are stopped after the module's tests."""
    started: list[Cluster] = []

    def start(*arguments: str) -> Cluster:
        started.append(Cluster(tmp_path_factory.mktemp("cluster") / "run", *arguments))
        return started[-1]

    yield start
    for cluster in started:
        cluster.stop()
