"""AI calls per second of a front with one worker process and with two, over real sockets.

Run ``python -m bench.front_workers``. Two clusters of real processes run side by side: a meta
server and a compute node that answers at once (bench/front_overhead.py), each with a
``tierkv serve front --workers N``. Client processes send statements with ``ai_generate`` over
psycopg, each over its own connection, spread over the workers. The numbers of workers take turns,
and each pair gives a ratio. Tables: DuckDB in memory, and with ``postgres_`` a PostgreSQL server
that runs on the same machine. Clients, nodes, PostgreSQL and workers share the machine's cores,
whose number is printed: where all cores are busy already, a second worker can't add anything.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psycopg

from bench.front_overhead import InstantNode
from bench.report import Report, finish, parse_arguments
from tests.fix_postgres import PASSWORD, USER, running_postgres
from tierkv.compute.service import serve_node
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.server import MetaServer
from tierkv.parts.parts import announce

WORKERS = (1, 2)
CLIENTS = 8
CLIENT_PROCESSES = 2
ROWS = 50
"""Distinct calls of one statement, so that the front's work per call is measured, not its doors."""

WORDS = "the customer wrote a note about the product. " * 10


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("front workers")
    report.add("cores", os.cpu_count() or 0)
    report.add("load_before", os.getloadavg()[0])
    seconds, rounds = (1.5, 1) if arguments.quick else (4.0, 5)
    rng = random.Random(arguments.seed)
    memory = ["--set", "front.database=:memory:"]
    measure(report, "", memory, "user=tierkv dbname=main", seconds, rounds, rng)
    with running_postgres() as postgres:
        login = f"user={USER} password='{PASSWORD}' dbname=app"
        measure(report, "postgres_", ["--postgres", postgres.dsn], login, seconds, rounds, rng)
    report.add("load_after", os.getloadavg()[0])
    finish(report, arguments.format)


def measure(
    report: Report,
    name: str,
    options: Sequence[str],
    login: str,
    seconds: float,
    rounds: int,
    rng: random.Random,
) -> None:
    """Report the calls per second by number of workers, and the ratio of pairs."""
    with ExitStack() as stack:
        dsns = {}
        for workers in WORKERS:
            port = stack.enter_context(_front(workers, options))
            dsns[workers] = f"host=127.0.0.1 port={port} {login}"
            _load(dsns[workers], 0.5, rng.getrandbits(32))
        rates: dict[int, list[float]] = {workers: [] for workers in WORKERS}
        for _ in range(rounds):
            for workers in rng.sample(WORKERS, len(WORKERS)):
                rates[workers].append(_load(dsns[workers], seconds, rng.getrandbits(32)))
    for workers, found in rates.items():
        report.add(f"{name}{workers}_workers_calls_per_s", statistics.median(found))
    pairs = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    report.add(f"{name}2_workers_of_1", statistics.median(pairs))
    report.add(f"{name}2_workers_of_1_least", min(pairs))
    report.add(f"{name}2_workers_of_1_most", max(pairs))


@contextmanager
def _front(workers: int, options: Sequence[str]) -> Iterator[int]:
    """Run a meta server, an instant node and a front; yield the SQL port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    cluster = context.Process(target=_serve_cluster, args=(theirs,), daemon=True)
    cluster.start()
    meta = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "tierkv", "serve", "front", "--workers", str(workers)]
        argv += ["--set", f"cluster.meta_address={meta}", "--set", f"cluster.run_dir={folder}"]
        argv += ["--set", "front.pg_port=0", "--set", "front.http_port=0"]
        argv += ["--set", "front.max_calls=0", "--set", "cluster.log_level=warning", *options]
        argv += ["--set", "cluster.start_wait_s=30", "--set", "cluster.start_nodes=1"]
        with (Path(folder) / "log").open("w") as log:
            front = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        assert front.stdout is not None
        try:
            line = front.stdout.readline()
            assert line, (Path(folder) / "log").read_text()
            yield int(json.loads(line)["pg"].rpartition(":")[2])
        finally:
            front.terminate()
            front.wait(30)
            front.stdout.close()
            cluster.kill()
            cluster.join()


def _serve_cluster(pipe: Connection) -> None:
    """Serve the meta server and a node until this process is killed."""

    async def serve() -> None:
        server = MetaServer(MetaConfig(address="127.0.0.1:0"))
        address = await server.start()
        node = InstantNode()
        bound = await serve_node(node, "127.0.0.1:0")
        assert server.local is not None
        info = replace(node.info(), control_address=bound.address)
        await announce(server.local, info)
        pipe.send(address)
        await asyncio.Event().wait()

    asyncio.run(serve())


def _load(dsn: str, seconds: float, seed: int) -> float:
    """Return the calls per second of all clients, which run in processes of their own."""
    context = multiprocessing.get_context("spawn")
    clients = []
    for number in range(CLIENT_PROCESSES):
        ours, theirs = context.Pipe()
        arguments = (theirs, dsn, seconds, f"{seed}-{number}")
        process = context.Process(target=_run_clients, args=arguments, daemon=True)
        process.start()
        clients.append((process, ours))
    for _, pipe in clients:
        pipe.recv()  # All are connected before any begins.
    for _, pipe in clients:
        pipe.send("begin")
    rate = sum(pipe.recv() for _, pipe in clients)
    for process, _ in clients:
        process.join()
    return float(rate)


def _run_clients(pipe: Connection, dsn: str, seconds: float, name: str) -> None:
    pipe.send(asyncio.run(_run_all(pipe, dsn, seconds, name)))


async def _run_all(pipe: Connection, dsn: str, seconds: float, name: str) -> float:
    count = CLIENTS // CLIENT_PROCESSES
    connections = [
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) for _ in range(count)
    ]
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    began = time.perf_counter()
    done = await asyncio.gather(
        *(
            _ask(connection, f"{name}-{number}", began + seconds)
            for number, connection in enumerate(connections)
        )
    )
    took_s = time.perf_counter() - began
    for connection in connections:
        await connection.close()
    return sum(done) / took_s


async def _ask(connection: psycopg.AsyncConnection, name: str, until_s: float) -> int:
    """Send statements of distinct calls until a time; return the number of calls."""
    calls = 0
    while time.perf_counter() < until_s:
        await connection.execute(
            f"SELECT count(ai_generate('{WORDS}{name} {calls} ' || i)) "
            f"FROM generate_series(1, {ROWS}) AS t(i)"
        )
        calls += ROWS
    return calls


if __name__ == "__main__":
    main()
