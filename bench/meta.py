"""The directory under load: locates from other processes, events, memory, and a restart.

Run ``python -m bench.meta``. The meta server and each client run in separate processes; locates
go over the stream of frames and, named ``grpc``, over gRPC. The directory has 1 M blocks on 100
hosts (and 10 M without --quick), each host with a pool node and a compute node. ``counted``
locates return only counts, as for the scheduler; ``listed`` locates return the replicas of all
blocks. Locates of 0 blocks show the cost of the carrier. If Redis is installed, the same lookups
run there as pipelined EXISTS and as MGET.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.meta_load import HOSTS, SHARED, Load, Task
from bench.meta_redis import RedisKeys
from bench.pool_cores import client_side, server_side
from bench.pool_peers import PeerMissingError
from bench.report import Report, finish, make_parser
from tierkv.kvcore.block import BlockSpec, Location, Owner, Tier
from tierkv.kvcore.block_event import BlockStored, EventBatch
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, Incarnation, NodeId
from tierkv.kvwire.convert import event_records_to_proto
from tierkv.kvwire.event_records import pack_events

REPORTERS = 4
LENGTHS = (1_000, 5_000)
CLIENTS = (1, 16)
_SERVER = """
import asyncio, sys
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.rpc.server import MetaServer

async def serve():
    server = MetaServer(MetaConfig(
        address="127.0.0.1:0", suspect_after_s=600.0, dead_after_s=900.0, forget_after_s=1e4,
    ))
    print(await server.start(), flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        ledger = server.local.state.directory.ledger
        print(len(ledger.blocks), len(ledger.copies), ledger.blocks.nbytes + ledger.copies.nbytes,
              flush=True)
    await server.stop()

asyncio.run(serve())
"""


class Server:
    """A meta server's process."""

    def __init__(self) -> None:
        with server_side():
            self._process = _python("-c", _SERVER)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self.rss_at_start = self.rss()

    def rss(self) -> int:
        """Return the resident memory in bytes."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    def cpu_s(self) -> float:
        """Return the processor time used so far."""
        times = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of blocks and copies, and the bytes of the tables."""
        blocks, copies, nbytes = map(int, _ask(self._process, "?").split())
        return blocks, copies, nbytes

    def close(self) -> None:
        """End the process."""
        _end(self._process)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--blocks", type=int, help="blocks in the directory, instead of both sizes")
    arguments = parser.parse_args(argv)
    client_side()
    report = Report("bench.meta")
    sizes = [arguments.blocks] if arguments.blocks else [1_000_000, 10_000_000]
    if arguments.quick and not arguments.blocks:
        sizes = [500_000]
    for blocks in sizes:
        _measure(report, Load(arguments.seed, blocks), quick=arguments.quick)
    report.add("pack_us_per_event", _pack_seconds() * 1e6)
    report.note(f"{HOSTS} hosts; every {SHARED}th block has a copy on a second host and one in L1")
    finish(report, arguments.format)


def _measure(report: Report, load: Load, *, quick: bool) -> None:
    name = f"{load.blocks / 1e6:g}M"
    server = Server()
    seconds, events = _fill(server, load)
    blocks, copies, nbytes = server.counts()
    assert (blocks, copies) == (load.per_host * HOSTS, events), "not all was taken in"
    report.add(f"{name}_events_per_s", events / seconds)
    grown = server.rss() - server.rss_at_start
    report.add(f"{name}_rss_bytes_per_block_beyond_key", grown / blocks - BLOCK_KEY_BYTES)
    report.add(f"{name}_table_bytes_per_block_beyond_key", nbytes / blocks - BLOCK_KEY_BYTES)
    report.add(f"{name}_copies_per_block", copies / blocks)
    for stream in (True, False):
        _locates(report, server, load, name, 0, 1, 0, quick, stream)
        for length in LENGTHS:
            for clients in CLIENTS:
                for max_replicas in (0, 4):
                    _locates(
                        report, server, load, name, length, clients, max_replicas, quick, stream
                    )
    server.close()
    again = Server()
    seconds, _ = _fill(again, load)
    report.add(f"{name}_restart_until_right_s", seconds)
    again.close()
    _redis(report, load, name)


def _fill(server: Server, load: Load) -> tuple[float, int]:
    """Report the inventories of all nodes; return seconds and events."""
    tasks = [
        Task("report", server.address, load.seed, load.blocks, tuple(range(n, HOSTS, REPORTERS)))
        for n in range(REPORTERS)
    ]
    times = _run(tasks)
    events = HOSTS * (load.per_host + 2 * (load.per_host // SHARED))
    return max(t[1] for t in times) - min(t[0] for t in times), events


def _locates(
    report: Report, server: Server, load: Load, name: str, length: int, clients: int,
    max_replicas: int, quick: bool, stream: bool,
) -> None:  # fmt: skip
    if length > load.per_host:
        return
    rounds = (200 if quick else 1_000) // clients + 30
    tasks = [
        Task(
            "locate",
            server.address,
            load.seed,
            load.blocks,
            (),
            length,
            max_replicas,
            rounds,
            n,
            stream,
        )
        for n in range(clients)
    ]
    began = server.cpu_s()
    times = sorted(t for result in _run(tasks) for t in result)
    taken = server.cpu_s() - began
    what = "counted" if not max_replicas else "listed"
    what += "" if stream else "_grpc"
    for label, q in (("p50", 0.5), ("p99", 0.99)):
        metric = f"{name}_{what}_{length}_x{clients}_{label}_ms"
        report.add(metric, float(np.quantile(times, q)) * 1e3)
    report.add(f"{name}_{what}_{length}_x{clients}_server_cpu_ms", taken / len(times) * 1e3)


def _redis(report: Report, load: Load, name: str) -> None:
    try:
        redis = RedisKeys()
    except PeerMissingError as error:
        report.note(f"no Redis beside it: {error}")
        return
    for host in range(HOSTS):
        redis.store(load.chain(host, 0, load.per_host))
    for length in LENGTHS:
        if length > load.per_host:
            continue
        for way, ask in (("exists", redis.exists), ("mget", redis.mget)):
            times = [ask(load.chain(host, 0, length)) for host in range(HOSTS)]
            report.add(f"{name}_redis_{way}_{length}_x1_p50_ms", statistics.median(times) * 1e3)
        mget_ms = report.metrics[f"{name}_redis_mget_{length}_x1_p50_ms"]
        for what in ("counted", "listed", "counted_grpc", "listed_grpc"):
            ours_ms = report.metrics[f"{name}_{what}_{length}_x1_p50_ms"]
            report.add(f"{name}_{what}_{length}_of_redis_mget", ours_ms / mget_ms)
    redis.close()


def _pack_seconds() -> float:
    """Return the seconds that a node needs to make the record of a reported event."""
    node, life = NodeId("dmp-0"), Incarnation(1)
    keys = Load(1, 4_096 * HOSTS).chain(0, 0, 4_096)
    owners = [Owner("qwen3-32b", "acme", f"session-{n // 64}") for n in range(len(keys))]
    events = tuple(
        BlockStored(
            BlockSpec(key, BlockKey(bytes(16)), 64, owner=owner),
            Tier.L2,
            Location(node, life, 0, n, n + 1, 8 << 20),
        )
        for n, (key, owner) in enumerate(zip(keys, owners, strict=True))
    )
    batch = EventBatch(node, life, 1, events)
    gc.disable()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        event_records_to_proto(pack_events(batch)).SerializeToString()
        times.append(time.perf_counter() - began)
    gc.enable()
    return statistics.median(times) / len(events)


def _run(tasks: Sequence[Task]) -> list[list[float]]:
    """Run each task in a separate process; all tasks begin at the same time."""
    with _clients(len(tasks)) as clients:
        for client, task in zip(clients, tasks, strict=True):
            _say(client, task.line())
        for client in clients:
            _hear(client)  # The client is ready.
        for client in clients:
            _say(client, "go")
        return [[float(t) for t in _hear(client)] for client in clients]


@contextmanager
def _clients(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    clients = [_python("-m", "bench.meta_load") for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            _end(client)


def _python(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> Sequence[float | str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a process ended with {process.wait()}"
    heard: Sequence[float | str] = json.loads(line)
    return heard


def _ask(process: subprocess.Popen[str], line: str) -> str:
    _say(process, line)
    assert process.stdout is not None
    return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


if __name__ == "__main__":
    main()
