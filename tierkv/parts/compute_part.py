"""A compute node as a part of a process. Importing this file imports torch.

``tierkv serve compute|prefill|decode`` adds a gRPC service and a watcher of the pool. The embedded
cluster passes the pool node of its own process.
"""

from __future__ import annotations

import asyncio

from tierkv.compute.config import ComputeConfig
from tierkv.compute.node import ComputeNode
from tierkv.compute.service import serve_node
from tierkv.dmp.transport.select import PathOptions
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.ids import Incarnation
from tierkv.kvwire.channels import BoundServer
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.reporter import MetaReporter
from tierkv.parts.access import ClusterAccess
from tierkv.parts.parts import PoolWatcher


class ComputePart:
    """A compute node and its agent and, when listening, its gRPC service and pool watcher.

    Attributes:
        node: the compute node.
        address: ``host:port`` of the service; empty without a service.
    """

    def __init__(
        self, config: ComputeConfig, meta: MetaClient, *, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        incarnation = Incarnation(int(clock.wall() * 1000))
        self._reporter = MetaReporter(config.node_id, incarnation)
        self.node = ComputeNode(
            config, incarnation=incarnation, meta=meta, reporter=self._reporter, clock=clock
        )
        self._reporter.set_inventory(self.node.inventory)
        self._config = config
        self._meta = meta
        self.address = ""
        self._bound: BoundServer | None = None
        self._watcher: PoolWatcher | None = None
        self._agent: NodeAgent | None = None

    async def start(
        self,
        *,
        listen: str = "",
        advertise: str = "",
        access: ClusterAccess = ClusterAccess(),  # noqa: B008 - frozen
        paths: PathOptions | None = None,
    ) -> None:
        """Start the engine; with ``listen`` serve gRPC and watch the pool.

        Args:
            listen: ``host:port`` of the service; empty for a node in this process.
            advertise: host name for other nodes; empty means the bound host.
            access: token and certificates of the cluster.
            paths: options for transfers to and from the pool.

        Raises:
            ConfigError: the port is taken.
        """
        await self.node.start()
        self.node.traffic = None if paths is None else paths.traffic
        if listen:
            self._bound = await serve_node(self.node, listen, token=access.token, tls=access.tls)
            host, _, port = self._bound.address.rpartition(":")
            self.address = f"{advertise or host}:{port}"
            self.node.set_control_address(self.address)
            self._watcher = PoolWatcher(
                self.node,
                self._meta,
                host=self._config.host,
                token=access.token,
                options=paths,
                version=lambda: 0 if self._agent is None else self._agent.pool_version,
            )
            await self._watcher.start()
        info, source = self.node.info(), self.node.report
        self._agent = NodeAgent(self._meta, info, self._reporter, source, on_hold=self.node.hold)
        await self._agent.start()

    async def joined(self) -> None:
        """Wait until the directory knows this node."""
        if self._agent is not None:
            await self._agent.registered.wait()

    async def flush(self) -> None:
        """Wait until computed blocks are published and the directory knows L1."""
        await self.node.flush()
        if self._agent is not None:
            await self._agent.flush()

    async def stop(self) -> None:
        """Refuse new requests, end the running ones, leave the cluster."""
        if self._bound is not None:
            await self._bound.server.stop(grace=1.0)
        if self._agent is not None:
            await self._agent.stop()
        await self.node.stop()
        if self._watcher is not None:
            await self._watcher.stop()


async def make_compute_part(config: ComputeConfig, meta: MetaClient) -> ComputePart:
    """Load the model off the event loop, which may take minutes, and return the part."""
    return await asyncio.to_thread(ComputePart, config, meta)
