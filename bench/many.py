"""A directory on one and on three meta servers: CPU, shares, double reports, and what a loss costs.

Run ``python -m bench.many [--trace NAME=FILE ...]``. The servers are processes (``tierkv serve
meta``); the client in this process reports blocks and locates chains over gRPC and the stream, one
locate after the other. CPU is that of the servers' processes. The chains share a system prompt and
differ behind it. A wave is 64 chains in one question, as a statement asks. A trace adds each
server's share of the blocks that its requests locate.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bench.policies import tenants
from bench.report import Report, finish, make_parser
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Location, Tier
from tierkv.kvcore.block_event import BlockStored, EventBatch
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole
from tierkv.metaserver.block_owners import BlockOwners
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.several_meta import connect_meta
from tierkv.simulator.trace import Request, load_trace

_NODE = NodeInfo(NodeId("pool"), Incarnation(1), NodeRole.DMP, HostId("here"))
_SYSTEM_BLOCKS, _BATCH, _WAVE = 32, 4_096, 64
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Server:
    """A meta server's process and address."""

    process: subprocess.Popen[bytes]
    address: str

    def cpu_s(self) -> float:
        """Return the processor seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", action="append", default=[], help="NAME=FILE, may be repeated")
    arguments = parser.parse_args(argv)
    report = Report("many")
    chains, locates = (200, 300) if arguments.quick else (2_000, 3_000)
    rounds = 2 if arguments.quick else 5
    made = _chains(random.Random(arguments.seed), chains, 64)
    for count in (1, 3):
        with servers(count) as started:
            asyncio.run(_measure(report, started, made, locates, arguments.seed))
    asyncio.run(_losses(report, made, rounds))
    traces = {"tenants": tenants(arguments.seed, 1_000)}
    for given in arguments.trace:
        name, _, path = given.partition("=")
        traces[name] = load_trace(path).requests
    for name, requests in traces.items():
        _shares(report, name, requests)
    finish(report, arguments.format)


def _chains(rng: random.Random, count: int, blocks: int) -> list[list[BlockKey]]:
    """Make chains behind one system prompt."""
    system = [BlockKey(rng.randbytes(16)) for _ in range(_SYSTEM_BLOCKS)]
    own = blocks - _SYSTEM_BLOCKS
    return [[*system, *(BlockKey(rng.randbytes(16)) for _ in range(own))] for _ in range(count)]


@contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    """Run meta servers of one cluster as processes."""
    with tempfile.TemporaryDirectory(prefix="tierkv-many-") as folder:
        processes = [_start(Path(folder), number) for number in range(count)]
        try:
            yield [Server(process, _address(process)) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(folder: Path, number: int) -> subprocess.Popen[bytes]:
    settings = (f"cluster.run_dir={folder}", "cluster.secret=a secret of the bench")
    words = [word for each in settings for word in ("--set", each)]
    return subprocess.Popen(
        [sys.executable, "-m", "tierkv", "serve", "meta", "--node-id", f"meta-{number}", *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    while line := process.stdout.readline():
        told = json.loads(line)
        if "ready" in told.values() or "address" in told:
            return str(told["address"])
    sys.exit("bench.many: a meta server did not start")


@asynccontextmanager
async def _connected(
    servers: Sequence[Server], made: list[list[BlockKey]]
) -> AsyncIterator[MetaClient]:
    """Report all chains' blocks as those of one pool node, which lives as long as the context."""
    meta = connect_meta(",".join(server.address for server in servers))
    beating = asyncio.create_task(_beat(meta))
    await _report(meta, made)
    try:
        yield meta
    finally:
        beating.cancel()
        await meta.close()


async def _beat(meta: MetaClient) -> None:
    while True:
        await asyncio.sleep(1.0)
        await meta.heartbeat(_NODE.node_id, _NODE.incarnation, NodeReport())


async def _report(meta: MetaClient, made: list[list[BlockKey]]) -> None:
    await meta.register(_NODE)
    seen: set[BlockKey] = set()
    events: list[BlockStored] = []
    for chain in made:
        for parent, key in zip([ROOT_PARENT, *chain], chain, strict=False):
            if key not in seen:
                seen.add(key)
                place = Location(_NODE.node_id, _NODE.incarnation, 0, len(seen), 1, 1 << 16)
                events.append(BlockStored(BlockSpec(key, parent, 64), Tier.L2, place))
    parts = [events[at : at + _BATCH] for at in range(0, len(events), _BATCH)]
    for number, part in enumerate(parts):
        batch = EventBatch(
            _NODE.node_id, _NODE.incarnation, number + 1, tuple(part), True,
            number + 1 < len(parts), number,
        )  # fmt: skip
        await meta.report_events(batch)


async def _measure(
    report: Report, servers: list[Server], made: list[list[BlockKey]], locates: int, seed: int
) -> None:
    name = f"{len(servers)}_servers"
    async with _connected(servers, made) as meta:
        chance = random.Random(seed)
        for chain in made[:50]:
            await meta.locate(chain)
        await asyncio.sleep(0.5)  # The streams of locates open in the background.
        counts = dict(await meta.directory_counts())
        before, times = [server.cpu_s() for server in servers], []
        for _ in range(locates):
            chain = chance.choice(made)
            began = time.perf_counter()
            reply = await meta.locate(chain)
            times.append(time.perf_counter() - began)
            assert reply.prefix_blocks == len(chain)
        spent = [server.cpu_s() - start for server, start in zip(servers, before, strict=True)]
        report.add(f"{name}_cpu_us_per_locate", 1e6 * sum(spent) / locates)
        report.add(f"{name}_largest_cpu_of_mean", max(spent) * len(spent) / max(sum(spent), 1e-9))
        report.add(f"{name}_locate_p50_ms", 1e3 * statistics.median(times))
        before = [server.cpu_s() for server in servers]
        waves = max(1, locates // _WAVE)
        for _ in range(waves):
            found = await meta.locate_many(chance.sample(made, _WAVE))
            assert all(reply.prefix_blocks == len(made[0]) for reply in found)
        spent = [server.cpu_s() - start for server, start in zip(servers, before, strict=True)]
        report.add(f"{name}_cpu_us_per_chain_of_a_wave", 1e6 * sum(spent) / (waves * _WAVE))
        held = [dict(await _counts(server)) for server in servers]
        report.add(f"{name}_reported_of_blocks", sum(h["blocks"] for h in held) / counts["blocks"])
        report.add(
            f"{name}_largest_blocks_of_mean",
            max(h["blocks"] for h in held) * len(held) / sum(h["blocks"] for h in held),
        )


async def _counts(server: Server) -> tuple[tuple[str, int], ...]:
    meta = connect_meta(server.address)
    try:
        return await meta.directory_counts()
    finally:
        await meta.close()


async def _losses(report: Report, made: list[list[BlockKey]], rounds: int) -> None:
    """Kill or freeze one of three servers: the longest locate and the shortest prefix since."""
    for what, sent in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        longest, reads, worst = [], [], 1.0
        for _ in range(rounds):
            with servers(3) as started:
                async with _connected(started, made) as meta:
                    for chain in made[:50]:
                        await meta.locate(chain)
                    started[1].process.send_signal(sent)
                    times = []
                    for chain in made[:100]:
                        began = time.perf_counter()
                        reply = await meta.locate(chain)
                        times.append(time.perf_counter() - began)
                        worst = min(worst, reply.prefix_blocks / len(chain))
                    longest.append(max(times))
                    began = time.perf_counter()
                    await meta.resolve_namespace("t", model_revision="m", layout_fingerprint=b"l")
                    reads.append(time.perf_counter() - began)
        report.add(f"{what}_longest_locate_ms", 1e3 * max(longest))
        report.add(f"{what}_namespace_read_ms", 1e3 * max(reads))
        report.add(f"{what}_least_prefix_share", worst)


def _shares(report: Report, name: str, requests: Sequence[Request]) -> None:
    """Count the blocks of a trace's locates by the server that is asked for each."""
    owners = BlockOwners([f"10.0.0.{number}:7400" for number in range(1, 4)])
    asked = np.zeros(3, np.int64)
    for request in requests:
        keys = [BlockKey(blake2b(str(each).encode(), digest_size=16).digest())
                for each in request.block_ids]  # fmt: skip
        if keys:
            asked += np.bincount(owners.of(keys)[:, 0], minlength=3)
    report.add(f"{name}_largest_share_of_mean", float(asked.max() * 3 / asked.sum()))


if __name__ == "__main__":
    main(sys.argv[1:])
