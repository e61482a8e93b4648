"""Our pool as a contender: a DMP node in a process of its own, over TCP and by shared memory.

Called by bench.pool_worker. Every get verifies the value's xxh3 checksum and every put computes it
and evicts nothing that is held; the raw limits beside it do neither.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench.pool_cell import BATCH, Cell, Contender, Operation, Values
from dmp.config import DmpConfig
from dmp.node import DmpNode
from dmp.pool_node import PoolNode, PutRequest, RangeRead
from dmp.server import DmpServer
from dmp.transport.select import connect_pool_node
from kvcore.block_event import NullReporter
from kvcore.block_key import ROOT_PARENT
from kvcore.clock import SystemClock
from kvcore.ids import BlockKey, HostId, NodeId
from kvcore.location import Location
from kvcore.node import NodeInfo

HOST: Final = HostId("bench")
_HOLD_S: Final = 3_600.0


def contenders() -> dict[str, Contender]:
    """Return our transports by name."""
    server = OurServer()
    return {
        "tcp": Ours(server, HostId("elsewhere")),
        "shm": Ours(server, HOST),
    }


class OurServer:
    """The node's process; started anew for each size, with extents that hold several values."""

    def __init__(self) -> None:
        self._size = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self.info: NodeInfo | None = None

    def start(self, size: int) -> NodeInfo:
        """Run a node for values of ``size`` bytes; the same one for both transports."""
        if size == self._size and self.info is not None:
            return self.info
        self.stop()
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        extent = max(32 << 20, 8 * size + (1 << 20))
        capacity = max(1 << 30, 11 * BATCH * size)
        args = (theirs, extent, capacity)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        self.info, self._size, self._control = ours.recv(), size, ours
        assert self.info is not None
        assert self._process.pid is not None
        await_populated(self._process.pid)
        return self.info

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._control.close()
            self._process.join(10)
            self._process.kill()
            self._process.join()
            self._process = self.info = None


class Ours:
    """One client of the node."""

    ops: tuple[str, ...] = ("get", "put")

    def __init__(self, server: OurServer, host: HostId) -> None:
        self._server = server
        self._host = host
        self._node: PoolNode | None = None
        self._numbers = itertools.count()
        self._last: list[Location | None] = []

    def store(self, values: Values) -> None:
        if self._node is not None:
            self._node.close()
        self._values = values
        self._node = connect_pool_node(self._server.start(values.size), host=self._host)
        await_populated(os.getpid())
        self._kept = [_sealed(place) for place in self._put(range(BATCH))]
        assert all(self._node.hold(self._kept, ttl_s=_HOLD_S))

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, node, kept = self._values, self._node, self._kept
        assert node is not None
        targets = [memoryview(row) for row in values.targets[thread]]

        def get(i: int) -> None:
            chosen = values.chosen(i, cell.batch)
            node.read_ranges([RangeRead(kept[k], 0, targets[k]) for k in chosen])

        def put(i: int) -> None:
            self._last = self._put(values.chosen(i, cell.batch))

        return get if cell.op == "get" else put

    def _put(self, chosen: range) -> list[Location | None]:
        assert self._node is not None
        puts = [PutRequest(self._new_key(), ROOT_PARENT, self._values.size, 1, 64) for _ in chosen]
        places = self._node.put(puts, [memoryview(self._values.source[k]) for k in chosen])
        assert None not in places, "the pool had no room"
        return places

    def _new_key(self) -> BlockKey:
        return BlockKey(id(self).to_bytes(8, "little") + next(self._numbers).to_bytes(8, "little"))

    def stored(self) -> list[bytes]:
        assert self._node is not None
        buffers = [bytearray(self._values.size) for _ in self._last]
        reads = [
            RangeRead(_sealed(place), 0, memoryview(b))
            for place, b in zip(self._last, buffers, strict=True)
        ]
        self._node.read_ranges(reads)
        return [bytes(b) for b in buffers]

    def tidy(self) -> None:
        """Nothing to do: the pool evicts what is oldest and not held."""

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        self._server.stop()


def _sealed(place: Location | None) -> Location:
    assert place is not None, "a value was not stored"
    return place


def await_populated(pid: int) -> None:
    """Wait until a process has entered its segment's pages into its page table.

    That goes on in the background for a second or two after a start; measured meanwhile, everybody
    looks slow, the raw socket too.
    """
    before, now = -1, _shared_pages(pid)
    deadline = time.monotonic() + 20.0
    while now != before and time.monotonic() < deadline:
        time.sleep(0.1)
        before, now = now, _shared_pages(pid)


def _shared_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[2])


def _serve(control: Connection, extent_bytes: int, capacity_bytes: int) -> None:
    """Run a node until ``control`` ends."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-bench-") as folder:
        config = DmpConfig(
            NodeId("dmp-bench"), HOST, str(Path(folder) / "segment"),
            capacity_bytes=capacity_bytes, extent_bytes=extent_bytes,
        )  # fmt: skip
        node = DmpNode(config, NullReporter(), SystemClock())
        node.start()
        server = DmpServer(node)
        server.start()
        try:
            control.send(node.info(data_address=server.address))
            control.poll(None)
        finally:
            server.stop()
            node.stop()
