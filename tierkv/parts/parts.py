"""The parts of a process, ready to start and stop: memory pool node, disk tier, pool watcher.

``tierkv serve`` starts one part per process and reaches the meta server over gRPC. The embedded
cluster starts all parts in one process. Each part owns a connection to the directory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tierkv.config import name_list
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.node.lower_tier import LowerTier
from tierkv.dmp.node.node import DmpNode
from tierkv.dmp.pool_node import PoolNode
from tierkv.dmp.server.server import DmpServer
from tierkv.dmp.slots.accounts import Quota
from tierkv.dmp.transport.select import PathOptions, Transport, connect_pool_node
from tierkv.dmp.zone_traffic import ZoneTraffic
from tierkv.kvcore import limits
from tierkv.kvcore.block_event import BlockEvent, BlockReporter, NullReporter
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import ConfigError, DirectoryUnavailableError, TransportError
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, ZoneId
from tierkv.kvcore.node import NodeInfo, NodeReport, NodeRole, PathReport
from tierkv.kvwire.credentials import ClusterToken
from tierkv.metaserver.agent import NodeAgent
from tierkv.metaserver.client import DirectoryNode, KvLimits, MetaClient, Namespace
from tierkv.metaserver.reporter import MetaReporter
from tierkv.parts.access import pool_tls
from tierkv.settings import DmpSettings, Settings
from tierkv.storage.disk.segment_folder import MIN_FILES, choose_segment_bytes
from tierkv.storage.disk.segment_format import PAGE

_log = logging.getLogger(__name__)
WATCH_INTERVAL_S = 1.0
QUOTA_LOOK_S = 0.5


class LateReporter:
    """Passes block events on to a reporter that is created later.

    A DMP node learns its incarnation only at the start, and the reporter needs the incarnation.
    Events before ``target`` is set are dropped: a reporter begins with a whole inventory anyway.
    """

    def __init__(self) -> None:
        self.target: BlockReporter = NullReporter()

    def report(self, events: Sequence[BlockEvent]) -> None:
        """Pass events to the target."""
        self.target.report(events)


class HasPoolNodes(Protocol):
    """The methods of a compute node that PoolWatcher calls."""

    def set_pool_nodes(self, nodes: Sequence[PoolNode]) -> None: ...


class DmpPart:
    """A memory pool node and its data plane and, in a cluster, its agent.

    Attributes:
        node: the pool node.
        address: ``host:port`` of the data plane; empty without a data plane.
    """

    def __init__(
        self,
        config: DmpConfig,
        meta: MetaClient | None,
        *,
        listen: bool = True,
        clock: Clock | None = None,
        open_lower: Callable[[], LowerTier] | None = None,
    ) -> None:
        self._reporter = LateReporter()
        self._meta = meta
        self._listen = listen
        self.node = DmpNode(config, self._reporter, clock or SystemClock(), open_lower)
        self.address = ""
        self._server: DmpServer | None = None
        self._agent: NodeAgent | None = None
        self._follower: QuotaFollower | None = None

    async def start(self) -> None:
        """Attach the segment, listen and, in a cluster, register.

        Raises:
            ConfigError: no room for the segment, or the port is taken.
        """
        await asyncio.to_thread(self.node.start)
        if self._listen:
            self._server = DmpServer(self.node)
            self._server.start()
            self.address = self._server.address
        if self._meta is None:
            _log.info("pool node %s stands alone: no cluster.meta_address", self.node.node_id)
            return
        info = self.node.reports.info(data_address=self.address)
        reporter = MetaReporter(info.node_id, info.incarnation, self.node.reports.inventory)
        self._reporter.target = reporter
        self._agent = NodeAgent(
            self._meta, info, reporter, self.report, on_hold=self.node.gets.lease
        )
        await self._agent.start()
        self._follower = QuotaFollower(self._meta, self._agent, info.node_id, self.node.set_quotas)
        self._follower.start()

    def report(self) -> NodeReport:
        """Return the content of a heartbeat: the node's counters and doors."""
        return replace(self.node.reports.report(), paths=self._doors())

    def _doors(self) -> tuple[PathReport, ...]:
        if not self._listen:
            return (PathReport("", "inproc", "one process"),)
        segment = str(self.node.config.segment_file)[: limits.MAX_REASON_CHARS]
        rdma = self._server.rdma if self._server is not None else None
        shm = PathReport("", "shm", segment, usable=not self.node.config.nameless)
        if rdma is None or rdma.reason:
            reason = rdma.reason.removeprefix("no RDMA: ") if rdma is not None else "not started"
            return shm, PathReport("", "rdma", reason, usable=False), self._tcp_door()
        return shm, PathReport("", "rdma", ", ".join(rdma.devices)), self._tcp_door()

    def _tcp_door(self) -> PathReport:
        secured = " (TLS)" if self.node.config.tls.serves else ""
        return PathReport("", "tcp", f"{self.address}{secured}")

    async def joined(self) -> None:
        """Wait until the directory, if any, knows this node."""
        if self._agent is not None:
            await self._agent.registered.wait()

    async def flush(self) -> None:
        """Wait until the directory knows all blocks of this node."""
        if self._agent is not None:
            await self._agent.flush()

    async def stop(self) -> None:
        """Drain, leave the cluster and close the segment; sealed blocks stay in the file."""
        ended = await asyncio.to_thread(self.node.drain)
        rest = "nothing is under way" if ended else "what is under way after dmp.drain_s is dropped"
        _log.info("pool node %s stops: %s", self.node.config.node_id, rest)
        if self._follower is not None:
            await self._follower.stop()
        if self._agent is not None:
            await self._agent.stop()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        await asyncio.to_thread(self.node.stop)


def path_options(settings: Settings) -> PathOptions:
    """Convert the settings for transports to pool nodes."""
    cluster = settings.cluster
    traffic = ZoneTraffic(
        ZoneId(cluster.zone), clock=SystemClock(), bytes_per_s=cluster.cross_zone_rate
    )
    return PathOptions(
        Transport(settings.pool.transport),
        name_list(settings.pool.rdma_devices),
        pool_tls(settings),
        traffic,
    )


async def announce(
    meta: MetaClient, info: NodeInfo, report: Callable[[], NodeReport] = NodeReport
) -> NodeAgent:
    """Register a process without blocks, for the admin views; stop the agent to leave."""
    reporter = MetaReporter(info.node_id, info.incarnation)
    agent = NodeAgent(meta, info, reporter, report)
    await agent.start()
    return agent


class PoolWatcher:
    """Keeps a compute node connected to every live DMP node in the directory."""

    def __init__(
        self,
        node: HasPoolNodes,
        meta: MetaClient,
        *,
        host: HostId,
        token: ClusterToken | None,
        options: PathOptions | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare to look.

        Args:
            node: gets the connections.
            meta: lists the pool nodes.
            host: this machine.
            token: the cluster token.
            options: how to connect.
            version: returns a number that differs after a pool node came, left or died; 0: unknown.
                The list is then asked for at each look, else only after a change: a thousand nodes
                that all list a thousand nodes each second are too much for a meta server.
        """
        self._node = node
        self._meta = meta
        self._host = host
        self._token = token
        self._options = options
        self._known: dict[tuple[NodeId, Incarnation], PoolNode] = {}
        self._version = version
        self._seen_version = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then keep looking in the background."""
        await self._look()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop looking and close the connections."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._node.set_pool_nodes(())
        for pool_node in self._known.values():
            await asyncio.to_thread(pool_node.close)
        self._known.clear()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self._look()

    async def _look(self) -> None:
        """Connect new nodes, close gone nodes; without a directory keep the current connections."""
        version = self._version()
        if version and version == self._seen_version:
            return
        try:
            states = await self._meta.list_nodes()
        except DirectoryUnavailableError:
            return
        live = {
            (state.info.node_id, state.info.incarnation): state.info
            for state in states
            if state.info.role is NodeRole.DMP and state.state != "dead"
        }
        if live.keys() == self._known.keys():
            self._seen_version = version
            return
        gone = [self._known.pop(key) for key in list(self._known) if key not in live]
        for key, info in live.items():
            if key not in self._known:
                with suppress(TransportError):
                    self._known[key] = await asyncio.to_thread(self._connect, info)
        self._node.set_pool_nodes(tuple(self._known.values()))
        if live.keys() == self._known.keys():  # Else a connection failed, and is tried again.
            self._seen_version = version
        for pool_node in gone:
            await asyncio.to_thread(pool_node.close)

    def _connect(self, info: NodeInfo) -> PoolNode:
        _log.info("pool node %s at %s", info.node_id, info.data_address)
        return connect_pool_node(info, host=self._host, token=self._token, options=self._options)


class QuotaFollower:
    """Keeps a pool node's quotas equal to the namespaces' limits, within a second of a change.

    Heartbeats bring versions; after a change the meta server is asked. Each node allows a namespace
    a share of the capacity: as large a part as the node's memory is of all pool nodes' memory. The
    shares add up to the capacity, so the nodes need not talk to each other.
    """

    def __init__(
        self,
        meta: MetaClient,
        agent: NodeAgent,
        node: NodeId,
        apply: Callable[[Sequence[Quota]], None],
    ) -> None:
        """Prepare; ``apply`` is called in a worker thread."""
        self._meta = meta
        self._agent = agent
        self._node = node
        self._apply = apply
        self._seen = (0, 0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            versions = self._agent.namespaces_version, self._agent.pool_version
            if versions != self._seen and versions[0]:
                with suppress(DirectoryUnavailableError):
                    namespaces = await self._meta.list_namespaces()
                    nodes = await self._meta.list_nodes()
                    quotas = quotas_of(namespaces, nodes, self._node)
                    await asyncio.to_thread(self._apply, quotas)
                    self._seen = versions
            await asyncio.sleep(QUOTA_LOOK_S)


def quotas_of(
    namespaces: Sequence[Namespace], nodes: Sequence[DirectoryNode], own: NodeId
) -> list[Quota]:
    """Return the quotas of one pool node, for the namespaces that have limits."""
    sizes = {
        node.info.node_id: node.info.capacity_bytes
        for node in nodes
        if node.info.role is NodeRole.DMP and node.state != "dead"
    }
    share = sizes.get(own, 0) / max(1, sum(sizes.values())) if own in sizes else 1.0
    found = []
    for namespace in namespaces:
        kept = namespace.limits or KvLimits()
        if replace(kept, evicts=True) == KvLimits():
            continue
        capacity, disk = (
            max(1, int(total * share)) if total else 0
            for total in (kept.capacity_bytes, kept.disk_capacity_bytes)
        )
        quota = Quota(
            namespace.name,
            frozenset(namespace.members),
            capacity,
            kept.ttl_s,
            kept.evicts,
            kept.eviction,
            kept.version,
            disk,
            read_bytes_per_s=kept.read_bytes_per_s * share,
            write_bytes_per_s=kept.write_bytes_per_s * share,
            requests_per_s=kept.requests_per_s * share,
            weight=kept.weight or 1.0,
            media=kept.media,
            model=kept.model,
        )
        found.append(quota)
    if len(found) > limits.MAX_LIMITED_NAMESPACES:
        _log.error(
            "%d namespaces have limits, a pool node keeps %d of them",
            len(found), limits.MAX_LIMITED_NAMESPACES,
        )  # fmt: skip
    return found[: limits.MAX_LIMITED_NAMESPACES]


def disk_tier(
    settings: DmpSettings, node: NodeId, *, extent_bytes: int
) -> Callable[[], LowerTier] | None:
    """Return the function that opens the node's disk pool, tier L4; None without a disk pool.

    Without ``dmp.disk_path`` there is no tier L4, and evicted blocks are lost. Each node has a
    separate folder below ``dmp.disk_path``, so several nodes of one machine can share the setting.

    Args:
        settings: folder and size of the disk pool.
        node: the node with the disk pool.
        extent_bytes: extent size of the node's memory, the limit of a block's size. Each block must
            fit a file, because a refused block would be offered again and again.

    Raises:
        ConfigError: an archive without a disk pool above it, or too small a disk pool.
    """
    if not settings.disk_path:
        if settings.archive_url:
            raise ConfigError(
                "dmp.archive_url is set, but an archive lies below a disk pool",
                hint="Set dmp.disk_path to a folder on a local disk.",
            )
        return None
    capacity = int(settings.disk_capacity)
    least = MIN_FILES * (extent_bytes + 2 * PAGE)
    if capacity < least:
        raise ConfigError(
            f"dmp.disk_capacity {capacity} is too small: {MIN_FILES} files that hold the largest "
            f"block take {least} bytes",
            hint="Raise dmp.disk_capacity, or leave dmp.disk_path empty.",
        )
    folder = Path(settings.disk_path).expanduser() / node

    def open_store() -> LowerTier:
        from tierkv.storage.l4 import L4Store  # Only nodes with a disk pool load this module.

        return L4Store.open(
            folder,
            capacity_bytes=capacity,
            segment_bytes=max(choose_segment_bytes(capacity), extent_bytes + 2 * PAGE),
            archive_url=settings.archive_url,
            archive_options=settings.archive_options,
        )

    return open_store
