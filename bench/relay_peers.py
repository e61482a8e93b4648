"""The relay beside pgbouncer and beside a bare program that only forwards bytes: ``pgbench -S``.

Run ``python -m bench.relay_peers``. Each contender is one process in front of the same PostgreSQL
server: ``pgbouncer`` in session mode, ``raw`` (two asyncio protocols that write what they receive),
and ``relay``, the product's relay with its attendant. With uvloop installed (``tierkv[uvloop]``),
``raw_uvloop`` and ``relay_uvloop`` run on its event loop. Contenders take turns in random order;
ratios are medians over rounds. Clients, contender and PostgreSQL share the machine's cores. Also
per contender: microseconds of its processor time per transaction. Not contained: a network, TLS.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import pwd
import random
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from bench.report import Report, finish, parse_arguments
from tests.fix_cluster import free_port
from tests.fix_postgres import (
    PASSWORD,
    USER,
    PostgresServer,
    attendants,
    running_postgres,
)
from tests.fix_sql import InstantGenerator
from tierkv.dbfront.postgres.install import install
from tierkv.dbfront.postgres.server import RelayConfig, RelayServer

LOOPS = ("", "_uvloop")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("relay and peers")
    report.add("cores", os.cpu_count() or 0)
    report.add("load_before", os.getloadavg()[0])
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres())
        asyncio.run(install(postgres.dsn))
        _pgbench(postgres, postgres.port, ["-i", "-q", "-s", "1" if arguments.quick else "10"])
        seconds, rounds = ("1", 1) if arguments.quick else ("2", 4)
        contenders = _contenders(stack, postgres)
        for mode in ("simple", "prepared"):
            for clients in (1, 8):
                words = ["-S", "-n", "-M", mode, "-T", seconds, "-c", str(clients)]
                rng = random.Random(f"{arguments.seed}-{mode}-{clients}")
                _compare(report, f"{mode}_{clients}", words, rounds, (postgres, contenders, rng))
    report.add("load_after", os.getloadavg()[0])
    finish(report, arguments.format)


Contenders = dict[str, tuple[int, int]]
"""By name: port, and the process behind the port (0: not measured)."""


def _compare(
    report: Report,
    cell: str,
    words: list[str],
    rounds: int,
    setting: tuple[PostgresServer, Contenders, random.Random],
) -> None:
    postgres, contenders, rng = setting
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    used: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in rng.sample(sorted(contenders), len(contenders)):
            port, pid = contenders[name]
            before_s = _processor_s(pid)
            out = _pgbench(postgres, port, words)
            rate, count = (re.search(p, out) for p in (r"tps = ([\d.]+)", r"processed: (\d+)"))
            assert rate is not None and count is not None, out
            rates[name].append(float(rate[1]))
            used[name].append(1e6 * (_processor_s(pid) - before_s) / int(count[1]))
    for name in contenders:
        report.add(f"{cell}_{name}_tps", statistics.median(rates[name]))
        if name != "direct":
            report.add(f"{cell}_{name}_us", statistics.median(used[name]))
    for name in (name for name in contenders if name.startswith("relay")):
        for peer in ("direct", "pgbouncer", name.replace("relay", "raw")):
            if peer in rates:
                pairs = [mine / other for mine, other in zip(rates[name], rates[peer], strict=True)]
                report.add(f"{cell}_{name}_of_{peer}", statistics.median(pairs))


def _contenders(stack: ExitStack, postgres: PostgresServer) -> Contenders:
    found: Contenders = {"direct": (postgres.port, 0)}
    if shutil.which("pgbouncer"):
        found["pgbouncer"] = stack.enter_context(_pgbouncer(postgres))
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    for suffix in LOOPS if has_uvloop else LOOPS[:1]:
        for name, serve in (("raw", _serve_raw), ("relay", _serve_relay)):
            target = postgres.port if name == "raw" else postgres.dsn
            found[name + suffix] = stack.enter_context(_process(serve, target, suffix))
    return found


def _processor_s(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pgbench(postgres: PostgresServer, port: int, words: list[str]) -> str:
    environment = {
        "PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": USER, "PGPASSWORD": PASSWORD,
        "PGDATABASE": "app", "PATH": f"{postgres.programs}:/usr/bin:/bin",
    }  # fmt: skip
    done = subprocess.run(
        ["pgbench", *words], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def _pgbouncer(postgres: PostgresServer) -> Iterator[tuple[int, int]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        (folder / "ini").write_text(
            f"[databases]\napp = host=127.0.0.1 port={postgres.port}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = scram-sha-256\n"
            f"auth_file = {folder / 'users'}\npool_mode = session\nunix_socket_dir =\n"
            "log_connections = 0\nlog_disconnections = 0\n"
        )
        argv = [str(shutil.which("pgbouncer")), "-q", str(folder / "ini")]
        if os.getuid() == 0:  # It refuses to run as root.
            someone = pwd.getpwnam("nobody")
            for path in (folder, *folder.iterdir()):
                os.chown(path, someone.pw_uid, someone.pw_gid)
            argv[1:1] = ["-u", "nobody"]
        process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        try:
            while _pgbench_fails(postgres, port):
                assert process.poll() is None, "pgbouncer ended"
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(30)


def _pgbench_fails(postgres: PostgresServer, port: int) -> bool:
    try:
        _pgbench(postgres, port, ["-S", "-n", "-t", "1"])
    except AssertionError:
        return True
    return False


@contextmanager
def _process(
    serve: Callable[[Connection, str], None], target: int | str, suffix: str
) -> Iterator[tuple[int, int]]:
    """Run a server in a process of its own, on the loop that the suffix names."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(serve, theirs, target, suffix), daemon=True, name=suffix
    )
    process.start()
    port = ours.recv()
    assert process.pid is not None
    try:
        yield port, process.pid
    finally:
        process.kill()
        process.join()


def _run(
    serve: Callable[[Connection, int | str], object], pipe: Connection, target: int | str, loop: str
) -> None:
    factory = None
    if loop:
        import uvloop  # only where it is compared

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(pipe, target))  # type: ignore[arg-type]


async def _serve_relay(pipe: Connection, dsn: str) -> None:
    server = RelayServer(RelayConfig(dsn=dsn, port=0), attendants(InstantGenerator())())
    pipe.send(await server.start())
    await asyncio.Event().wait()


class _Leg(asyncio.Protocol):
    """One side of a bare relay, which connects the other side by itself."""

    def __init__(self, port: int, other: _Leg | None = None) -> None:
        self.port, self.other = port, other
        self.transport: asyncio.Transport | None = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other is None:
            self.connecting = asyncio.get_running_loop().create_task(self._connect())
        else:
            self.other.other = self
            self.transport.write(self.other.early)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Leg(self.port, self), "127.0.0.1", self.port)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def _serve_raw(pipe: Connection, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Leg(port), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
