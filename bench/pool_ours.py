"""Our pool as a contender: a DMP node in a separate process, over TCP and by shared memory.

Called by bench.pool_worker. Every get verifies the value's xxh3 checksum. Every put computes the
checksum and never evicts held blocks. The raw limits in the same benchmark do neither.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from bench.pool_cell import BATCH, Cell, Contender, Operation, Values
from bench.pool_cores import server_side
from tierkv.dmp.client.pool import Pool
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.dmp.transport.shm import ShmPoolNode
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, RangeShape
from tierkv.kvcore.block_event import NullReporter
from tierkv.kvcore.clock import SystemClock
from tierkv.kvcore.ids import BlockKey, HostId, NodeId
from tierkv.kvcore.node import NodeInfo

_HOLD_S: Final = 3_600.0


def contenders() -> dict[str, Contender]:
    """Return our transports by name."""
    server = OurServer()
    return {
        "tcp": Ours(server, "tcp", b"tcp-----"),
        "shm": Ours(server, "shm", b"shm-----"),
        "pool_view": PoolView(server, "shm", b"view----"),
        "shm_view": ShmView(server),
    }


class OurServer:
    """The node's process; restarted for each size, with extents that hold several values."""

    def __init__(self) -> None:
        self._size = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self.address = ""
        self.info: NodeInfo | None = None

    def start(self, size: int) -> str:
        """Run a node for values of exactly ``size`` bytes and return the node's address."""
        if size == self._size and self._process is not None:
            return self.address
        self.stop()
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        extent = max(32 << 20, 8 * size + (1 << 20))
        capacity = max(1 << 30, 11 * BATCH * size)
        args = (theirs, extent, capacity)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        with server_side():
            self._process.start()
        info: NodeInfo = ours.recv()
        self.info, self.address = info, info.data_address
        self._size, self._control = size, ours
        assert self._process.pid is not None
        await_populated(self._process.pid)
        return self.address

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._control.close()
            self._process.join(10)
            self._process.kill()
            self._process.join()
            self._process = None


class Ours:
    """The public client with one transport; all threads share the client, as in a program."""

    ops: tuple[str, ...] = ("get", "put")

    def __init__(self, server: OurServer, transport: str, prefix: bytes) -> None:
        self._server = server
        self._prefix = prefix
        self._transport = transport
        self._pool: Pool | None = None
        self._numbers = itertools.count()
        self._last: list[bytes] = []

    def store(self, values: Values) -> None:
        if self._pool is not None:
            self._pool.close()
        self._values = values
        address = self._server.start(values.size)
        self._pool = Pool.connect(address, transport=self._transport)
        (member,) = self._pool.stats().members
        assert member.path.transport == self._transport, member.path.reason
        await_populated(os.getpid())
        self._kept = self._put(range(BATCH))
        assert all(self._pool.pin(key) for key in self._kept)

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, pool, kept = self._values, self._pool, self._kept
        assert pool is not None
        targets = [memoryview(row) for row in values.targets[thread]]
        pairs = list(zip(kept, targets, strict=True))

        def get_one(i: int) -> None:
            k = values.chosen(i, 1).start
            _found([pool.get_into(kept[k], targets[k])])

        def get_many(i: int) -> None:
            _found(pool.get_many_into(pairs))

        def put(i: int) -> None:
            self._last = self._put(values.chosen(i, cell.batch))

        if cell.op == "put":
            return put
        return get_one if cell.batch == 1 else get_many

    def _put(self, chosen: range) -> list[bytes]:
        assert self._pool is not None
        views = [memoryview(self._values.source[k]) for k in chosen]
        keys = [self._prefix + next(self._numbers).to_bytes(8, "big") for _ in chosen]
        assert all(self._pool.put_many(zip(keys, views, strict=True))), "the pool had no room"
        return keys

    def stored(self) -> list[bytes]:
        assert self._pool is not None
        return [_found_bytes(value) for value in self._pool.get_many(self._last)]

    def tidy(self) -> None:
        """Do nothing: the pool evicts the oldest unpinned blocks."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._server.stop()


class PoolView(Ours):
    """Gets that lend values in place; the next get returns the lent values."""

    ops = ("get",)

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, pool, kept = self._values, self._pool, self._kept
        assert pool is not None
        lent = contextlib.ExitStack()

        def get(i: int) -> list[memoryview]:
            lent.close()
            return [lent.enter_context(pool.view(kept[k])) for k in values.chosen(i, cell.batch)]

        return get


class ShmView:
    """Views in place of held blocks at known locations, as in a compute node on the pool's host."""

    ops = ("get",)

    def __init__(self, server: OurServer) -> None:
        self._server = server
        self._node: ShmPoolNode | None = None

    def store(self, values: Values) -> None:
        if self._node is not None:
            self._node.close()
        self._values = values
        self._server.start(values.size)
        info = self._server.info
        assert info is not None
        node = connect_pool_node(info, host=info.host)
        assert isinstance(node, ShmPoolNode), node.path.reason
        self._node = node
        puts = [
            BlockSpec(
                BlockKey(b"in-place" + k.to_bytes(8, "big")),
                ROOT_PARENT,
                0,
                ranges=RangeShape(values.size, 1),
            )
            for k in range(BATCH)
        ]
        places = node.put(puts, [memoryview(row) for row in values.source])
        self._kept = [place for place in places if place is not None]
        assert len(self._kept) == BATCH and all(node.hold(self._kept, ttl_s=_HOLD_S))

    def operation(self, cell: Cell, thread: int) -> Operation:
        values, node, kept = self._values, self._node, self._kept
        assert node is not None

        def get(i: int) -> list[memoryview]:
            return [node.view_block(kept[k]) for k in values.chosen(i, cell.batch)]

        return get

    def stored(self) -> list[bytes]:
        return []

    def tidy(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        if self._node is not None:
            self._node.close()


def _found(sizes: Sequence[int | None]) -> None:
    assert None not in sizes, "a value was not found"


def _found_bytes(value: bytes | None) -> bytes:
    assert value is not None, "a value was not found"
    return value


def await_populated(pid: int) -> None:
    """Wait until a process has entered its segment's pages into the page table.

    The node allocates all memory at its start (``dmp.ready_ahead``), and a client maps the memory.
    Both continue in the background for a second or two. Measurements in the meantime are slow for
    every contender, even for the raw socket. A put into memory that must be allocated first takes
    about twice as long.
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
            NodeId("dmp-bench"), HostId("bench"), segment_path=f"{folder}/segment",
            capacity_bytes=capacity_bytes, ready_ahead_bytes=capacity_bytes,
            extent_bytes=extent_bytes,
        )  # fmt: skip
        node = DmpNode(config, NullReporter(), SystemClock())
        node.start()
        server = DmpServer(node)
        server.start()
        try:
            control.send(node.reports.info(data_address=server.address))
            control.poll(None)
        finally:
            server.stop()
            node.stop()
