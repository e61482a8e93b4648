"""Content of the directory for bench.meta, and the client processes that locate and report.

The blocks form chains, a chain per conversation, each chain at a single node. A fifth of the blocks
has a second copy on another host and a fifth is in a compute node's L1. ``python -m
bench.meta_load`` is a client; the client exchanges lines of JSON with bench.meta.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvwire.channels import open_channel
from tierkv.kvwire.convert import event_records_to_proto
from tierkv.kvwire.event_records import OWN, STORED, EventRecords
from tierkv.kvwire.v1 import meta_pb2_grpc
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.directory.copy_table import L1, L2
from tierkv.metaserver.directory.event_columns import RECORD
from tierkv.metaserver.rpc.grpc_client import GrpcMeta

HOSTS = 100
LIFE = Incarnation(1)
MODELS, SESSIONS_PER_BATCH = ("", "qwen3-32b"), 8
BATCH = 4_096
SHARED = 5
"""A fifth of the blocks (1 / SHARED) has a second copy, and a fifth is in L1."""


@dataclass(frozen=True, slots=True)
class Load:
    """Content of a directory, generated from a seed.

    Attributes:
        seed: seed of the keys.
        blocks: number of blocks, divided evenly over the hosts.
    """

    seed: int
    blocks: int

    @property
    def per_host(self) -> int:
        """Blocks whose first copy is on a given host."""
        return self.blocks // HOSTS

    def keys(self, host: int) -> NDArray[np.uint64]:
        """Return the keys of a host's blocks, as 64-bit halves, in the order of the chains."""
        rng = np.random.default_rng((self.seed, host))
        return rng.integers(0, 2**64 - 1, (self.per_host, 2), dtype=np.uint64)

    def chain(self, host: int, start: int, blocks: int) -> list[BlockKey]:
        """Return the keys of a chain of a host's blocks."""
        raw = self.keys(host)[start : start + blocks].tobytes()
        step = BLOCK_KEY_BYTES
        return [BlockKey(raw[at : at + step]) for at in range(0, len(raw), step)]


def nodes(host: int) -> tuple[NodeInfo, NodeInfo]:
    """Return a host's pool node and compute node."""
    name = HostId(f"host-{host}")
    return (
        NodeInfo(NodeId(f"dmp-{host}"), LIFE, NodeRole.DMP, name),
        NodeInfo(NodeId(f"compute-{host}"), LIFE, NodeRole.COMPUTE, name),
    )


def inventories(load: Load, host: int) -> Iterator[EventRecords]:
    """Yield the packed inventories of a host's two nodes, in parts."""
    own = load.keys(host)
    beside = load.keys((host - 1) % HOSTS)[: load.per_host // SHARED]
    pool, compute = nodes(host)
    yield from _parts(pool, np.concatenate((own, beside)), L2)
    yield from _parts(compute, own[: load.per_host // SHARED], L1)


def _parts(node: NodeInfo, keys: NDArray[np.uint64], tier: int) -> Iterator[EventRecords]:
    starts = range(0, max(1, len(keys)), BATCH)
    for part, start in enumerate(starts):
        records = pack(keys[start : start + BATCH], tier, start)
        yield EventRecords(
            node.node_id, LIFE, part + 1, records, MODELS, ("", "acme"),
            ("", *[f"s-{node.node_id}-{part}-{n}" for n in range(SESSIONS_PER_BATCH)]),
            inventory=True, more=part + 1 < len(starts), part=part,
        )  # fmt: skip


def pack(keys: NDArray[np.uint64], tier: int, start: int) -> bytes:
    """Pack stored events of blocks whose slots count from ``start``."""
    records = np.zeros(len(keys), RECORD)
    records["low"], records["high"] = keys[:, 0], keys[:, 1]
    records["parents"][1:] = keys[:-1]
    records["kind"], records["tier"], records["tokens"] = STORED, tier, 64
    records["model"] = records["tenant"] = 1
    records["session"] = 1 + np.arange(len(keys)) * SESSIONS_PER_BATCH // max(1, len(keys))
    if tier != L1:
        records["where"], records["length"] = OWN, 8 << 20
        records["slot"] = np.arange(start, start + len(keys))
        records["generation"] = records["slot"] + 1
    return records.tobytes()


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a client process.

    Attributes:
        kind: ``locate`` or ``report``.
        address: address of the meta server.
        load: content of the directory.
        hosts: for ``report``: hosts whose nodes this client reports.
        blocks: for ``locate``: chain length.
        max_replicas: for ``locate``.
        rounds: for ``locate``: number of timed calls.
        number: distinguishes the clients.
        stream: for ``locate``: ask over the stream, not over gRPC.
    """

    kind: str
    address: str
    seed: int
    blocks_in_all: int
    hosts: tuple[int, ...] = ()
    blocks: int = 0
    max_replicas: int = 0
    rounds: int = 0
    number: int = 0
    stream: bool = True

    @property
    def load(self) -> Load:
        """Content of the directory."""
        return Load(self.seed, self.blocks_in_all)

    def line(self) -> str:
        """Return the task as a line of JSON."""
        return json.dumps(asdict(self))


async def _locate(meta: GrpcMeta, task: Task) -> list[float]:
    """Time locates of different chains, one after the other."""
    rng = np.random.default_rng((task.seed, 7, task.number))
    load, chains = task.load, []
    for _ in range(min(task.rounds, 24)):
        start = int(rng.integers(0, load.per_host - task.blocks + 1))
        chains.append(load.chain(int(rng.integers(HOSTS)), start, task.blocks))
    times = []
    assert await meta.open_stream() is task.stream
    await meta.locate(chains[0], max_replicas=task.max_replicas)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    for n in range(task.rounds):
        chain = chains[n % len(chains)]
        began = time.perf_counter()
        reply = await meta.locate(chain, max_replicas=task.max_replicas)
        times.append(time.perf_counter() - began)
        assert reply.prefix_blocks == task.blocks, "the directory lost blocks"
        assert len(reply.replicas) == (task.blocks if task.max_replicas else 0)
    return times


async def _report(meta: MetaClient, task: Task) -> list[float]:
    """Send inventories that are packed and serialised in advance; return the begin and the end."""
    for host in task.hosts:
        for info in nodes(host):
            await meta.register(info)
    batches = [
        event_records_to_proto(batch)
        for host in task.hosts
        for batch in inventories(task.load, host)
    ]
    async with open_channel(task.address) as channel:
        stub = meta_pb2_grpc.MetaStub(channel)
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()
        began = time.time()
        for batch in batches:
            reply = await stub.ReportEvents(batch)
            assert reply.accepted and not reply.send_inventory
        return [began, time.time()]


async def _client() -> None:
    for line in sys.stdin:
        task = Task(**json.loads(line))
        meta = GrpcMeta(task.address, timeout_s=60.0, use_stream=task.stream)
        times = await (_locate if task.kind == "locate" else _report)(meta, task)
        await meta.close()
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    asyncio.run(_client())
