"""TierKV over RDMA: two ``tierkv serve dmp`` processes and a compute node that loads from them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fix_rdma import RDMA
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.transport.connection import Peer, PeerConnection
from tierkv.dmp.transport.select import PathOptions, connect_pool_node
from tierkv.dmp.transport.verbs.node import VerbsPoolNode
from tierkv.kvcore.ids import HostId, Incarnation, NodeId
from tierkv.kvcore.node import NodeInfo, NodeRole
from tierkv.kvcore.request import GenerateEvent

pytestmark = [*RDMA, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
PROMPT = [i * 7 % 128 for i in range(70)]
TOKEN = "of-the-cluster"


@dataclass(frozen=True)
class Side:
    """One end of the cable: a node, and what a client at the other end uses."""

    name: str
    address: str
    device: str
    client_device: str
    client_interface: str


SIDES = (
    Side("dmp-a", "10.77.0.1", "rxe0", "rxe1", "rdma1"),
    Side("dmp-b", "10.77.0.2", "rxe1", "rxe0", "rdma0"),
)


class Process:
    """A DMP node as users start one; its segment is small, because registering it takes time."""

    def __init__(self, side: Side, folder: Path) -> None:
        self.side = side
        self.log = folder / f"{side.name}.log"
        command = [
            sys.executable, "-m", "tierkv", "serve", "dmp", "--capacity", "64MiB",
            "--node-id", side.name, "--set", f"dmp.segment_dir={folder}",
            "--set", f"dmp.bind={side.address}", "--set", f"cluster.token={TOKEN}",
            "--set", f"dmp.rdma_devices={side.device}",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.told: dict[str, str] = {}

    def wait_ready(self) -> None:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.log.read_text()
        self.told = json.loads(line)

    def connect(self) -> PoolNode:
        name = NodeId(self.side.name)
        greeting = PeerConnection(Peer(name, self.told["address"], TOKEN))
        incarnation: Incarnation = greeting.welcome.incarnation
        greeting.close()
        info = NodeInfo(
            name, incarnation, NodeRole.DMP, HostId(name), data_address=self.told["address"]
        )
        options = PathOptions(rdma_devices=(self.side.client_device,))
        return connect_pool_node(info, host=HostId("elsewhere"), token=TOKEN, options=options)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.child.poll() is None:
            os.kill(self.child.pid, number)
        self.child.wait(60)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Process]]:
    processes = [Process(side, tmp_path) for side in SIDES]
    try:
        for process in processes:
            process.wait_ready()
        yield processes
    finally:
        for process in processes:
            process.end()


def sent_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def test_a_compute_node_loads_over_rdma_and_says_the_same(nodes: list[Process]) -> None:
    # Imports torch, which takes most of a minute under emulation.
    from tests.fix_model import answer, make_request, running_node

    async def life(*pools: PoolNode, cached: bool = True) -> tuple[list[int], GenerateEvent]:
        async with running_node(*pools, host="elsewhere") as node:
            said = await answer(node, make_request(PROMPT, use_cache=cached))
            assert await node.flush()
            errors[:] = [node.report().cache_errors]
            return said

    errors: list[object] = []
    want, _ = asyncio.run(life(cached=False))
    with ExitStack() as stack:
        pools = [process.connect() for process in nodes]
        for pool in pools:
            stack.callback(pool.close)
            assert isinstance(pool, VerbsPoolNode) and pool.path.transport == "rdma", pool.path
        before = [sent_bytes(side.client_interface) for side in SIDES]
        first, last = asyncio.run(life(*pools))
        assert (first, last.usage.hit_tokens.l3, errors) == (want, 0, [()])
        assert min(pool.stats().memory.blocks_used for pool in pools) > 0
        # What was put left through the client's side of the cable, to both nodes.
        sent = [sent_bytes(s.client_interface) - b for s, b in zip(SIDES, before, strict=True)]
        written = [pool.stats().memory.write_bytes for pool in pools]
        assert all(s >= w for s, w in zip(sent, written, strict=True)), (sent, written)

        second, last = asyncio.run(life(*pools))
        assert (second, last.usage.hit_tokens.l3, errors) == (want, 64, [()])
        assert all(pool.stats().memory.read_bytes > 0 for pool in pools)
        assert {pool.path.transport for pool in pools} == {"rdma"}

        nodes[0].end(signal.SIGKILL)
        third, last = asyncio.run(life(*pools))
        assert third == want and last.usage.hit_tokens.l3 < 64
