"""The roles of a cluster as single processes, with proxies between them (tests/fix_chaos.py).

Unlike ``tierkv up`` nothing starts a killed process again: the test says when.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import psycopg

from tests.fix_chaos import ChaosProxy
from tests.fix_cluster import ROOT, free_port, wait_for
from tierkv.compute.client import connect_compute
from tierkv.dmp.client.pool import Pool
from tierkv.processes.cluster_files import segment_prefix

BLOCK_TOKENS = 16
COMPUTE = ("compute-0", "compute-1")
ANSWER_S = 40.0
"""Less than the minute after which gRPC by itself gives a silent peer up."""


class Roles:
    """Meta, one pool node, two compute nodes and a front.

    Attributes:
        to_meta: between the front and the meta server's gRPC.
        to_stream: between the front and the meta server's stream of locates.
        to_compute: between the front and each compute node.
        to_pool: between the compute nodes and the pool node; all its bytes travel there.
    """

    def __init__(
        self,
        folder: Path,
        more: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Name ports; ``more`` has further settings by process."""
        self._folder, self._more = folder, more or {}
        self._environment = {**os.environ, **(environment or {})}
        self._values = count()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in ("meta", "stream", "dmp-0", *COMPUTE)}
        self.pg_port, self.http_port = free_port(), free_port()
        self.to_meta, self.to_stream = self._proxy("meta"), self._proxy("stream")
        self.to_compute = {name: self._proxy(name) for name in COMPUTE}
        self.to_pool = self._proxy("dmp-0")

    def _proxy(self, name: str) -> ChaosProxy:
        """Stand where a node says that it is; it listens on the same port of another address."""
        port = self._ports[name]
        return ChaosProxy(f"127.0.0.1:{port}", listen=f"127.0.0.2:{port}")

    def start(self, *names: str) -> None:
        """Start processes together and wait until each is ready."""
        for name in names:
            self._processes[name] = self._popen(name, self._all_settings(name), self._log(name))
        for name in names:
            out = self._processes[name].stdout
            assert out is not None
            assert b'"ready"' in out.readline(), self._log(name).read_text()

    def _popen(self, name: str, settings: Iterable[str], log: Path) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "tierkv", "serve", name.partition("-")[0], "--node-id", name,
            *(word for item in settings for word in ("--set", item)),
        ]  # fmt: skip
        with log.open("ab") as out:
            return subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=out, env=self._environment
            )

    @contextmanager
    def rival(self, name: str) -> Iterator[Path]:
        """Start another process with a node's name, of another folder and port; its log."""
        log = self._folder / f"rival-{name}.log"
        others = ("cluster.run_dir", "dmp.port", "compute.port")
        settings = [item for item in self._settings(name) if item.partition("=")[0] not in others]
        process = self._popen(name, [*settings, f"cluster.run_dir={self._folder / 'other'}"], log)
        try:
            yield log
        finally:
            process.terminate()
            _end(process)

    def nodes(self, *columns: str) -> dict[str, tuple[Any, ...]]:
        """Return columns of the nodes view by node."""
        rows = self.query(f"SELECT node_id, {', '.join(columns)} FROM tierkv.nodes")
        return {row[0]: row[1:] for row in rows}

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL through psycopg."""
        dsn = f"host=127.0.0.1 port={self.pg_port} user=tierkv dbname=main"
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def said(self, what: str) -> list[str]:
        """Return the lines of the nodes' logs that hold ``what``."""
        logs = (self._log(name) for name in (*COMPUTE, "dmp-0"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return [line for line in lines if what in line]

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _all_settings(self, name: str) -> Iterator[str]:
        yield from self._settings(name)
        yield from self._more.get(name, ())

    def _settings(self, name: str) -> Iterator[str]:
        meta = self.to_meta.address if name == "front" else f"127.0.0.1:{self._ports['meta']}"
        yield f"cluster.run_dir={self._folder / 'run'}"
        yield f"cluster.meta_address={meta}"
        yield "cluster.token=roles"
        if name == "meta":
            yield f"meta.port={self._ports['meta']}"
            yield f"meta.stream_port={self._ports['stream']}"
            yield f"meta.database={self._folder / 'meta.sqlite'}"
        elif name == "front":
            yield f"front.pg_port={self.pg_port}"
            yield f"front.http_port={self.http_port}"
        elif name.startswith("compute"):
            yield f"compute.port={self._ports[name]}"
            yield "cluster.advertise=127.0.0.2"
            yield from ("compute.threads=1", f"compute.block_tokens={BLOCK_TOKENS}")
            yield "compute.l1_capacity=64MiB"
            yield from ("compute.load_policy=always", "pool.transport=tcp")
        elif name.startswith("dmp"):
            yield f"dmp.port={self._ports[name]}"
            yield "cluster.advertise=127.0.0.2"
            yield from ("dmp.capacity=64MiB", "dmp.remove_on_stop=true")

    def lose_machine(self, name: str) -> None:
        """Kill -9 a pool node, and take its memory away."""
        self.kill(name)
        prefix = segment_prefix(self._folder / "run")
        Path(f"/dev/shm/{prefix}{name}.seg").unlink()

    def damage_meta(self) -> None:
        """Kill -9 the meta server and write over its database and SQLite's log of it."""
        self.kill("meta")
        for name in ("meta.sqlite", "meta.sqlite-wal"):
            (self._folder / name).write_bytes(b"not a database" * 999)

    def in_pool(self) -> int:
        """How many blocks the directory knows in the pool."""
        return int(
            self.query("SELECT count(*) FROM tierkv.kvcache_blocks WHERE tier <> 'L1'")[0][0]
        )

    def fill_pool(self, value_count: int) -> None:
        """Put new values of 1 MiB into the pool node."""
        with Pool.connect(f"127.0.0.1:{self._ports['dmp-0']}", token="roles") as pool:
            for number in islice(self._values, value_count):
                assert pool.put(f"value-{number}", bytes([number % 256]) * (1 << 20))

    def kill(self, name: str) -> None:
        """Kill -9."""
        process = self._processes.pop(name)
        process.kill()
        _end(process)

    def end(self, name: str) -> None:
        """SIGTERM, and wait for the end."""
        process = self._processes.pop(name)
        process.terminate()
        _end(process)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop a process without ending it."""
        pid = self._processes[name].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def complete(self, prompt: Sequence[int], **options: Any) -> str:
        """POST /v1/completions with token ids, greedy; return the text."""
        with self._post(prompt, options) as response:
            return str(json.load(response)["choices"][0]["text"])

    def _post(self, prompt: Sequence[int], options: Mapping[str, Any]) -> Any:
        body = {"prompt": list(prompt), "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions",
            json.dumps(body | dict(options)).encode(),
            {"content-type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:
            error.add_note(error.read().decode())
            raise

    def stream(self, prompt: Sequence[int], **options: Any) -> Iterator[str]:
        """As ``complete``, over server-sent events: yield the pieces of the text as they come."""
        with self._post(prompt, {"stream": True} | options) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield str(json.loads(line[6:])["choices"][0]["text"])

    def drop_caches(self) -> None:
        """Have the compute nodes forget their pages, so that the pool is asked next."""
        asyncio.run(self._drop_caches())

    async def _drop_caches(self) -> None:
        for name in COMPUTE:
            client = connect_compute(f"127.0.0.1:{self._ports[name]}", **self._access())
            try:
                await client.drop_cache()
            finally:
                await client.close()

    def _access(self) -> dict[str, Any]:
        """What a client of a role shows."""
        return {"token": "roles"}

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """GET /readyz?verbose."""
        url = f"http://127.0.0.1:{self.http_port}/readyz?verbose"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_whole(self) -> None:
        """Wait until nothing is degraded and the meta server knows all nodes."""
        wait_for(lambda: self.readiness()[1]["status"] == "ready", what="the cluster is whole")
        wait_for(lambda: self._alive() == 5, what="all nodes are listed as alive")

    def _alive(self) -> int:
        try:
            return [state for (state,) in self.nodes("state").values()].count("alive")
        except psycopg.OperationalError:
            return 0

    def heal(self) -> None:
        """Have all proxies forward everything again."""
        for proxy in self._proxies():
            proxy.heal()

    def _proxies(self) -> list[ChaosProxy]:
        return [self.to_meta, self.to_stream, self.to_pool, *self.to_compute.values()]

    def stop(self) -> None:
        """End everything, the front first."""
        for process in reversed(self._processes.values()):
            process.terminate()
            _end(process)
        for proxy in self._proxies():
            proxy.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that was told to end."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)
    if process.stdout is not None:
        process.stdout.close()
