"""A whole cluster in one process: what ``tierkv.connect()`` and ``tierkv sql`` run on.

The same parts as in a real cluster, without sockets between them: meta server, memory pool, compute
node, front. The pool's segment is private and goes away with the process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from compute.local import LocalComputeClient
from dbfront.contracts import ClientInfo
from dmp.config import DmpConfig
from dmp.transport.inproc import InprocPoolNode
from kvcore.ids import HostId, NodeId
from kvcore.node import NodeRole
from metaserver.config import MetaConfig
from metaserver.local import LocalMeta
from tierkv.compute_part import ComputePart, compute_config, make_compute_part
from tierkv.config import LoadedConfig
from tierkv.dbapi import Connection
from tierkv.disk_tier import disk_tier
from tierkv.front_part import FrontPart
from tierkv.loop_thread import LoopThread
from tierkv.parts import DmpPart
from tierkv.settings import Settings

EXTENT_BYTES = 4 << 20


class EmbeddedCluster:
    """All parts in one process, on one event loop.

    Attributes:
        meta: the directory.
        pool: the memory pool node.
        compute: the compute node.
        front: SQL and generation.
    """

    def __init__(self, config: LoadedConfig) -> None:
        self._config = config
        self.meta = LocalMeta(
            MetaConfig(
                cluster_secret=_secret(config.settings),
                default_policy=config.settings.namespace.policy(),
            )
        )
        self.pool: DmpPart
        self.compute: ComputePart
        self.front: FrontPart

    async def start(self) -> None:
        """Start every part.

        Raises:
            ConfigError: no room for the pool, or a setting that can't be used.
            ModelFolderError: the model can't be served.
        """
        settings = self._config.settings
        host = HostId(settings.cluster.host or socket.gethostname())
        compute = compute_config(
            settings.compute, node_id=NodeId("compute-0"), host=host, role=NodeRole.COMPUTE
        )
        self.compute = await make_compute_part(compute, self.meta)
        pool = _pool_config(settings, host)
        lower = disk_tier(settings.dmp, pool.node_id, extent_bytes=pool.extent_bytes)
        self.pool = DmpPart(pool, self.meta, listen=False, open_lower=lower)
        await self.pool.start()
        self.compute.node.set_pool_nodes([InprocPoolNode(self.pool.node)])
        await self.compute.start()
        client = LocalComputeClient(self.compute.node)
        self.front = FrontPart(self._config, self.meta, compute=[client], external_access=True)
        await self.front.start()

    async def settle(self) -> None:
        """Wait until computed blocks are in the pool and the directory knows."""
        await self.compute.flush()
        await self.pool.flush()

    async def stop(self) -> None:
        """Stop every part, the front first."""
        if hasattr(self, "front"):
            await self.front.stop()
        if hasattr(self, "compute"):
            await self.compute.stop()
        if hasattr(self, "pool"):
            await self.pool.stop()
        await self.meta.close()


@dataclass(frozen=True, slots=True)
class EmbeddedProcess:
    """A started embedded cluster and the loop it runs on."""

    loop: LoopThread
    cluster: EmbeddedCluster

    def connect(self, *, user: str = "default") -> Connection:
        """Open a connection; closing it stops the cluster and the loop."""
        client = ClientInfo(user=user, application_name="tierkv")
        return Connection(self.loop, self.cluster.front.sql, self.cluster.stop, client)


def start_embedded(config: LoadedConfig) -> EmbeddedProcess:
    """Start an embedded cluster on a loop of its own.

    Raises:
        ConfigError, ModelFolderError: as EmbeddedCluster.start.
    """
    loop = LoopThread()
    try:
        return EmbeddedProcess(loop, loop.run(_start(config)))
    except BaseException:
        loop.stop()
        raise


def connect_with(config: LoadedConfig, *, user: str = "default") -> Connection:
    """Start an embedded cluster and return a connection to it; closing it stops the cluster."""
    return start_embedded(config).connect(user=user)


async def _start(config: LoadedConfig) -> EmbeddedCluster:
    cluster = await asyncio.to_thread(EmbeddedCluster, config)
    try:
        await cluster.start()
    except BaseException:
        await cluster.stop()
        raise
    return cluster


def _pool_config(settings: Settings, host: HostId) -> DmpConfig:
    name = f"tierkv-{os.getpid()}-{secrets.token_hex(4)}.seg"
    return DmpConfig(
        node_id=NodeId("dmp-0"),
        host=host,
        segment_path=str(Path(settings.dmp.segment_dir) / name),
        capacity_bytes=int(settings.dmp.capacity),
        extent_bytes=EXTENT_BYTES,
        demote_above=settings.dmp.demote_above,
        eviction_policy=settings.dmp.eviction_policy,
        lease_share=settings.dmp.lease_share,
        scrub_rate_bytes_per_s=int(settings.dmp.scrub_rate),
        nameless=True,
    )


def _secret(settings: Settings) -> bytes | None:
    return settings.cluster.secret.encode() or None
