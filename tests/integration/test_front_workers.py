"""`tierkv serve front --workers`: processes on one port, with PostgreSQL behind or in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fix_cluster import ROOT, free_port, wait_for
from tests.fix_postgres import PASSWORD, USER, PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WORKERS = 2
SLOW = "SELECT ai_generate('Count to a thousand. ' || i) FROM generate_series(1, 900) AS t(i)"


class Front:
    """A cluster of processes whose front has workers.

    Attributes:
        pg_port, http_port: the ports that all workers share.
        pid: the process that starts the workers.
    """

    def __init__(self, pg_port: int, http_port: int, pid: int, dsn: str) -> None:
        self.pg_port, self.http_port, self.pid = pg_port, http_port, pid
        self.dsn = f"host=127.0.0.1 port={pg_port} {dsn}"

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def worker_of(self, connection: psycopg.Connection) -> int:
        """Return which worker has a connection."""
        rows = connection.execute(
            "SELECT worker FROM tierkv.stat_activity WHERE pid = %s",
            (connection.info.backend_pid,),
        )
        ((worker,),) = rows
        return int(worker)

    def one_at_each(self, stack: ExitStack) -> list[psycopg.Connection]:
        """Connect until each worker has a connection; the kernel chooses the worker."""
        found: dict[int, psycopg.Connection] = {}
        for _ in range(64):
            connection = stack.enter_context(self.connect())
            found.setdefault(self.worker_of(connection), connection)
            if len(found) == WORKERS:
                return [found[worker] for worker in range(WORKERS)]
        raise AssertionError(f"64 connections are all at {sorted(found)}")

    def worker_pids(self) -> dict[int, int]:
        """Return the process of each worker that has begun its program."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids}
        return {
            int(argv[argv.index("--worker") + 1]): pid
            for pid, argv in words.items()
            if "--worker" in argv  # Else the process is a fork that still runs its parent's.
        }

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def running(folder: Path, settings: Sequence[str], dsn: str) -> Iterator[Front]:
    """Run `tierkv up --workers 2`; it must end in time."""
    pg_port, http_port = free_port(), free_port()
    argv = [sys.executable, "-m", "tierkv", "up", "--workers", str(WORKERS)]
    for setting in (
        f"cluster.run_dir={folder}", f"front.pg_port={pg_port}", f"front.http_port={http_port}",
        f"dmp.segment_dir={folder}", "dmp.capacity=64MiB", "compute.l1_capacity=64MiB",
        "compute.threads=1", "dmp.remove_on_stop=true", *settings,
    ):  # fmt: skip
        argv += ["--set", setting]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if not any("Ctrl-C" in line for line in process.stdout):
            raise AssertionError((folder / "up.log").read_text())
        state = json.loads((folder / "cluster.json").read_text())["nodes"]["front"]
        yield Front(pg_port, http_port, int(state["pid"]), dsn)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not list((folder / "front.workers").iterdir()), "nothing private is left"


@pytest.fixture(scope="module")
def behind(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Workers with PostgreSQL behind."""
    login = f"user={USER} password='{PASSWORD}' dbname=app"
    folder = tmp_path_factory.mktemp("behind")
    with running(folder, [f"front.postgres={postgres.dsn}"], login) as front:
        yield front


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Workers with DuckDB in memory."""
    folder = tmp_path_factory.mktemp("memory")
    with running(folder, ["front.database=:memory:"], "user=tierkv dbname=main") as front:
        yield front


@pytest.fixture(params=["behind", "in_memory"])
def front(request: pytest.FixtureRequest) -> Any:
    """Both kinds of workers."""
    return request.getfixturevalue(request.param)


def test_views_at_one_worker_show_all_workers(front: Front) -> None:
    with ExitStack() as stack:
        connections = front.one_at_each(stack)
        pids = {connection.info.backend_pid for connection in connections}
        assert len(pids) == WORKERS
        connections[0].execute("SELECT tierkv.stat_reset('statements')")
        before = front.metric("tierkv_requests_total")
        for number, connection in enumerate(connections):
            connection.execute(f"SELECT ai_generate('Hello {number} of workers')")
        for connection in connections:
            seen = connection.execute("SELECT pid, worker FROM tierkv.stat_activity").fetchall()
            assert pids <= {pid for pid, _ in seen}
            assert {worker for _, worker in seen} == set(range(WORKERS))
            ((calls,),) = connection.execute(
                "SELECT sum(calls) FROM tierkv.stat_statements WHERE query LIKE '%ai_generate($1)'"
            ).fetchall()
            assert calls == WORKERS
            workers = connection.execute("SELECT DISTINCT worker FROM tierkv.routing_log")
            assert sorted(workers) == [(worker,) for worker in range(WORKERS)]
            names = connection.execute(
                "SELECT node_id FROM tierkv.nodes WHERE role = 'front' ORDER BY 1"
            )
            assert names.fetchall() == [("front.0",), ("front.1",)]
        assert front.metric("tierkv_requests_total") == before + WORKERS
        assert front.metric('tierkv_nodes{state="alive"}') == 1
        first, second = connections
        first.execute("SELECT tierkv.stat_reset('statements')")
        assert second.execute("SELECT count(*) FROM tierkv.stat_statements").fetchall() == [(0,)]


def _slow_call(connection: psycopg.Connection) -> tuple[threading.Thread, list[str]]:
    """Start a statement that takes long; the SQLSTATE of its end is appended to the list."""
    ended: list[str] = []

    def run() -> None:
        try:
            connection.execute(SLOW)
            ended.append("done")
        except psycopg.Error as error:
            ended.append(error.sqlstate or str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def _wait_for_call(watcher: psycopg.Connection, pid: int) -> None:
    asked = "SELECT phase FROM tierkv.stat_activity WHERE pid = %s"
    wait_for(
        lambda: watcher.execute(asked, (pid,)).fetchall() == [("llm",)],
        what="the statement waits for the model",
    )


def test_a_cancel_reaches_its_session_at_any_worker(front: Front) -> None:
    with ExitStack() as stack:
        connections = front.one_at_each(stack)
        for working, watcher in (connections, reversed(connections)):
            for _ in range(4):  # Each cancel is a new connection, at either worker.
                thread, ended = _slow_call(working)
                _wait_for_call(watcher, working.info.backend_pid)
                working.cancel_safe(timeout=30)
                thread.join(60)
                assert ended == ["57014"]


def test_pg_cancel_backend_reaches_another_worker(in_memory: Front) -> None:
    with ExitStack() as stack:
        connections = in_memory.one_at_each(stack)
        for working, other in (connections, reversed(connections)):
            pid = working.info.backend_pid
            thread, ended = _slow_call(working)
            _wait_for_call(other, pid)
            cancelled = other.execute("SELECT pg_cancel_backend(%s)", (pid,)).fetchall()
            thread.join(60)
            assert cancelled == [(True,)] and ended == ["57014"]
            assert other.execute("SELECT pg_cancel_backend(987654)").fetchall() == [(False,)]


def test_pg_terminate_backend_reaches_another_worker(behind: Front) -> None:
    with ExitStack() as stack:
        ended, other = behind.one_at_each(stack)
        pid = ended.info.backend_pid
        assert other.execute("SELECT pg_terminate_backend(%s, 20000)", (pid,)).fetchall() == [
            (True,)
        ]
        with pytest.raises(psycopg.OperationalError):
            ended.execute("SELECT 1")
        rows = other.execute("SELECT 1 FROM tierkv.stat_activity WHERE pid = %s", (pid,))
        assert rows.fetchall() == []


def test_a_killed_worker_is_started_again_and_the_others_go_on(front: Front) -> None:
    with ExitStack() as stack:
        killed, kept = front.one_at_each(stack)
        old = front.worker_pids()
        os.kill(old[0], signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            killed.execute("SELECT 1")
        assert kept.execute("SELECT ai_generate('Hello again')").fetchall()
        # New connections succeed meanwhile, too: only the living listen.
        assert front.worker_of(stack.enter_context(front.connect())) in range(WORKERS)
        wait_for(lambda: front.worker_pids().get(0) not in (None, old[0]), what="a new process")
        assert front.worker_pids()[1] == old[1]

        def back() -> bool:
            with front.connect() as connection:
                return front.worker_of(connection) == 0

        wait_for(back, what="the new worker accepts clients")
        assert kept.execute("SELECT 1").fetchall() == [(1,)]


@pytest.mark.skipif(find_spec("uvloop") is None, reason="tierkv[uvloop] is not installed")
def test_workers_run_on_uvloop(postgres: PostgresServer, tmp_path: Path) -> None:
    login = f"user={USER} password='{PASSWORD}' dbname=app"
    settings = [f"front.postgres={postgres.dsn}", "front.event_loop=uvloop"]
    with running(tmp_path, settings, login) as front, ExitStack() as stack:
        working, watcher = front.one_at_each(stack)
        assert working.execute("SELECT ai_generate('Hello')").fetchall()
        thread, ended = _slow_call(working)
        _wait_for_call(watcher, working.info.backend_pid)
        working.cancel_safe(timeout=30)
        thread.join(60)
        assert ended == ["57014"]
        assert front.metric('tierkv_nodes{state="alive"}') == 1


def test_a_term_drains_all_workers(postgres: PostgresServer, tmp_path: Path) -> None:
    login = f"user={USER} password='{PASSWORD}' dbname=app"
    with ExitStack() as stack:
        with running(tmp_path, [f"front.postgres={postgres.dsn}"], login) as front:
            connections = front.one_at_each(stack)
            workers = front.worker_pids()
        for connection in connections:
            with pytest.raises(psycopg.errors.AdminShutdown):
                connection.execute("SELECT 1")
        assert not [pid for pid in workers.values() if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("argv", [["up"], ["serve", "front", "--set", "front.database=t.duckdb"]])
def test_workers_are_refused_with_a_database_file(argv: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *argv, "--workers", "2", "--set",
         f"cluster.run_dir={tmp_path}", "--set", "cluster.meta_address=127.0.0.1:1",
         "--set", f"front.pg_port={free_port()}", "--set", f"front.http_port={free_port()}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "DuckDB allows one process per file" in done.stderr and "--postgres DSN" in done.stderr


def test_a_port_of_other_workers_is_refused(in_memory: Front, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", "serve", "front", "--workers", "2", "--set",
         f"cluster.run_dir={tmp_path}", "--set", "cluster.meta_address=127.0.0.1:1",
         "--set", f"front.pg_port={in_memory.pg_port}", "--set", f"front.http_port={free_port()}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"front.pg_port: 127.0.0.1:{in_memory.pg_port} can't be used" in done.stderr
