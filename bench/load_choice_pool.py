"""The pool below the nodes of bench.load_choice: L2 and L3 in a separate process, L4 on a disk.

L2 is the process's memory, mapped. L3 is the same memory over TCP, as from another machine. L4 is a
node in this process whose memory holds an eighth of the blocks; the rest lies in files, and a
directory locates the blocks, as in a cluster.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.pool_ours import OurServer
from bench.pool_peers import cache_folder
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.transport.inproc import InprocPoolNode
from tierkv.dmp.transport.select import connect_pool_node
from tierkv.kvcore.block import Tier
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.parts import DmpPart
from tierkv.storage.l4 import L4Store

HOST: Final = HostId("bench")
"""Host of the pool."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers below L1.

    Attributes:
        connect: returns the pool node as seen from a host.
        meta: the directory; None if the nodes are asked directly.
    """

    connect: Callable[[HostId], PoolNode]
    meta: MetaClient | None = None


@asynccontextmanager
async def open_pool(tier: Tier, *, blocks: int, block_bytes: int) -> AsyncIterator[Below]:
    """Run a pool whose blocks are in ``tier`` for a reader on the host passed to ``connect``."""
    if tier is Tier.L4:
        async with _on_disk(blocks * block_bytes, block_bytes) as below:
            yield below
        return
    server = OurServer()
    await asyncio.to_thread(server.start, block_bytes)
    info = server.info
    assert info is not None
    try:
        yield Below(lambda host: connect_pool_node(info, host=host))
    finally:
        server.stop()


@asynccontextmanager
async def _on_disk(size_bytes: int, block_bytes: int) -> AsyncIterator[Below]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-bench-") as memory,
        tempfile.TemporaryDirectory(dir=cache_folder(), prefix="l4-") as disk,
    ):
        extent = -(-2 * block_bytes // _MIB) * _MIB
        config = DmpConfig(
            NodeId("dmp"), HOST, segment_path=f"{memory}/segment",
            capacity_bytes=max(2 * extent, size_bytes // 8), ready_ahead_bytes=0,
            extent_bytes=extent, demote_above=0.0,
        )  # fmt: skip
        meta = LocalMeta()
        pool = DmpPart(
            config,
            meta,
            listen=False,
            open_lower=lambda: L4Store.open(Path(disk), capacity_bytes=4 << 30),
        )
        await pool.start()
        try:
            yield Below(lambda host: InprocPoolNode(pool.node), meta)
        finally:
            await pool.stop()
            await meta.close()
