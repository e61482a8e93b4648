"""A whole cluster in one process, for ``tierkv.connect()`` and ``tierkv sql``.

The parts are the same as in a real cluster, without sockets between them: meta server, memory pool,
compute node, front. The front and the directory exist at once. Torch, the model and the pool's
memory take seconds to start, and many statements call no model, so the front awaits
``EmbeddedNodes.start`` at the first AI call or view of the cache. ``EmbeddedNodes.check`` refuses,
before the start, every configuration that can be refused without torch. The pool's segment is
private and disappears with the process.

States of the nodes: asleep -> starting -> started -> closed. Calls during a start await the same
start, and a cancelled call stops waiting without stopping the start. After a failure the next call
starts anew. ``stop`` waits for a running start, which gives up between two steps, then stops the
started parts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierkv.compute.client import ComputeClient
from tierkv.compute.config import ComputeConfig
from tierkv.compute.model_plan import check_config
from tierkv.config import LoadedConfig
from tierkv.dbapi import Connection
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dmp.config import DmpConfig
from tierkv.dmp.segment.segment_place import check_room
from tierkv.kvcore.errors import ConfigError, NoNodeError
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.loop_thread import LoopThread
from tierkv.metaserver.client import MetaClient
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.front_part import FrontPart
from tierkv.parts.served_models import (
    compute_config,
    namespace_policy,
    split_by_model,
    with_default_model,
)
from tierkv.processes.own_process import collecting_nothing
from tierkv.settings import Settings

if TYPE_CHECKING:
    from tierkv.dmp.node.lower_tier import LowerTier
    from tierkv.parts.compute_part import ComputePart
    from tierkv.parts.parts import DmpPart

    MakeComputePart = Callable[[ComputeConfig, MetaClient], Awaitable[ComputePart]]

log = logging.getLogger(__name__)

EXTENT_BYTES: Final = 4 << 20
READY_AHEAD_BYTES: Final = 16 << 20
"""Part of the pool's memory that is made ready: as much as a short statement fills; a server
prepares more."""


class EmbeddedCluster:
    """All parts in one process, on one event loop.

    Attributes:
        meta: the directory.
        nodes: the memory pool and a compute node per model.
        front: SQL and generation.
    """

    def __init__(
        self, config: LoadedConfig, *, on_load: Callable[[str], None] | None = None
    ) -> None:
        """Create the directory; ``start`` creates the other parts.

        Args:
            config: the process's configuration.
            on_load: called with a model's name before the model is loaded.

        Raises:
            ConfigError: a setting that can't be used.
        """
        self._config = config = _without_wall(with_default_model(config))
        self.meta = LocalMeta(
            MetaConfig(
                cluster_secret=_secret(config.settings),
                default_policy=namespace_policy(config.settings.namespace),
            )
        )
        self.nodes = EmbeddedNodes(config.settings, self.meta, on_load=on_load)
        self.front: FrontPart

    async def start(self) -> None:
        """Start the front; the nodes start with the first call that needs them.

        Raises:
            ConfigError: no room for the pool, or a setting can't be used.
            ModelFolderError: the model can't be served.
        """
        await asyncio.to_thread(self.nodes.check)
        self.front = FrontPart(
            self._config, self.meta, start_nodes=self.nodes.start, external_access=True
        )
        await self.front.start()

    async def stop(self) -> None:
        """Stop every part, the front first."""
        if hasattr(self, "front"):
            await self.front.stop()
        await self.nodes.stop()
        await self.meta.close()


@dataclass(frozen=True, slots=True)
class EmbeddedProcess:
    """A started embedded cluster and its event loop."""

    loop: LoopThread
    cluster: EmbeddedCluster

    def connect(self, *, user: str = "default") -> Connection:
        """Open a connection; closing the connection stops the cluster and the loop."""
        client = ClientInfo(user=user, application_name="tierkv")
        return Connection(self.loop, self.cluster.front.sql, self.cluster.stop, client)


def start_embedded(
    config: LoadedConfig, *, on_load: Callable[[str], None] | None = None
) -> EmbeddedProcess:
    """Start an embedded cluster on a loop of its own; ``on_load`` as for EmbeddedCluster.

    Raises:
        ConfigError, ModelFolderError: as EmbeddedCluster.start.
    """
    loop = LoopThread()
    try:
        return EmbeddedProcess(loop, loop.run(_start(config, on_load)))
    except BaseException:
        loop.stop()
        raise


def connect_with(
    config: LoadedConfig,
    *,
    user: str = "default",
    on_load: Callable[[str], None] | None = None,
) -> Connection:
    """Start an embedded cluster and connect; closing the connection stops the cluster."""
    return start_embedded(config, on_load=on_load).connect(user=user)


async def _start(config: LoadedConfig, on_load: Callable[[str], None] | None) -> EmbeddedCluster:
    cluster = await asyncio.to_thread(EmbeddedCluster, config, on_load=on_load)
    try:
        await cluster.start()
    except BaseException:
        await cluster.stop()
        raise
    return cluster


def _without_wall(config: LoadedConfig) -> LoadedConfig:
    """Remove the limit of calls per statement, unless the user set a limit.

    A shared front limits calls to protect other users. Here only one user waits, and is told
    (``tierkv.notice_calls``).
    """
    if config.sources["front.max_calls"] != "default":
        return config
    front = config.settings.front.model_copy(update={"max_calls": 0})
    return replace(config, settings=config.settings.model_copy(update={"front": front}))


def _secret(settings: Settings) -> bytes | None:
    return settings.cluster.secret.encode() or None


class EmbeddedNodes:
    """A pool node and a compute node per model, all started when the first is needed.

    ``start`` and ``stop`` belong to one event loop.

    Attributes:
        computes: the compute nodes, in the order of their models; once started.
        pool: the memory pool node; once started.
    """

    def __init__(
        self, settings: Settings, meta: MetaClient, *, on_load: Callable[[str], None] | None = None
    ) -> None:
        """Create the nodes; nothing is started.

        Args:
            settings: settings of the process.
            meta: the directory for the nodes.
            on_load: called with a model's name before the model is loaded, in the event loop.

        Raises:
            ConfigError: a setting can't be used.
        """
        self.computes: list[ComputePart] = []
        self.pool: DmpPart
        self._meta = meta
        self._on_load = on_load
        host = HostId(settings.cluster.host or socket.gethostname())
        self._models = [
            replace(
                compute_config(
                    model, node_id=NodeId(f"compute-{i}"), host=host, role=NodeRole.COMPUTE
                ),
                touch_l1=False,
            )
            for i, model in enumerate(split_by_model(settings.compute))
        ]
        self._memory = _pool_config(settings, host)
        self._disk = _disk_tier(settings, self._memory)
        self._starting: asyncio.Task[Sequence[ComputeClient]] | None = None
        self._closing = False

    @property
    def started(self) -> bool:
        """True if the nodes answer calls."""
        task = self._starting
        return task is not None and task.done() and not task.cancelled() and not task.exception()

    def check(self) -> None:
        """Refuse an unusable configuration, as far as possible without torch.

        Raises:
            ConfigError: no room for the pool or L1, or no torch.
            ModelFolderError: the model can't be served.
        """
        for model in self._models:
            check_config(model)
        check_room(self._memory.segment_file, self._memory.capacity_bytes)
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "AI calls need torch, which is not installed",
                hint="Run `pip install 'tierkv[compute]'`.",
            )

    async def start(self) -> Sequence[ComputeClient]:
        """Start all nodes unless started, and return the compute nodes' clients.

        Raises:
            ConfigError, ModelFolderError: the nodes can't start; the next call tries again.
            NoNodeError: ``stop`` was called.
        """
        self._go_on()
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start-nodes")
            self._starting.add_done_callback(self._note_end)
        return await asyncio.shield(self._starting)

    async def settle(self) -> None:
        """Wait until computed blocks are in the pool and the directory knows."""
        if self.started:
            for compute in self.computes:
                await compute.flush()
            await self.pool.flush()

    async def stop(self) -> None:
        """Stop the started parts and prevent further starts."""
        self._closing = True
        if self._starting is not None:
            await asyncio.wait({self._starting})  # The callers of ``start`` receive any error.
        await self._stop_parts()

    async def _start(self) -> Sequence[ComputeClient]:
        try:
            return await self._start_parts()
        except BaseException:
            await self._stop_parts()
            raise

    async def _start_parts(self) -> Sequence[ComputeClient]:
        for model in self._models:
            await self._load(model)
        self.pool = _make_pool(self._memory, self._meta, self._disk)
        await self.pool.start()
        self._go_on()
        return [await self._start_compute(compute) for compute in self.computes]

    async def _load(self, model: ComputeConfig) -> None:
        log.info("loading model %s", model.model_name)
        if self._on_load is not None:
            self._on_load(model.model_name)
        make_part = await asyncio.to_thread(_import_torch)
        self._go_on()
        self.computes.append(await make_part(model, self._meta))
        self._go_on()

    async def _start_compute(self, compute: ComputePart) -> ComputeClient:
        from tierkv.compute.client import LocalComputeClient
        from tierkv.dmp.transport.inproc import InprocPoolNode

        compute.node.set_pool_nodes([InprocPoolNode(self.pool.node)])
        await compute.start()
        # Views that asked for the nodes must list the nodes.
        await compute.joined()
        await self.pool.joined()
        return LocalComputeClient(compute.node)

    async def _stop_parts(self) -> None:
        while self.computes:
            await self.computes.pop().stop()
        if hasattr(self, "pool"):
            await self.pool.stop()
            del self.pool

    def _note_end(self, task: asyncio.Task[Sequence[ComputeClient]]) -> None:
        """Forget a failed start; the callers of ``start`` receive the error."""
        if task.cancelled() or task.exception() is not None:
            self._starting = None

    def _go_on(self) -> None:
        if self._closing:
            raise NoNodeError("the embedded cluster is closed")


def _import_torch() -> MakeComputePart:
    with collecting_nothing():
        from tierkv.parts.compute_part import (
            make_compute_part,  # Takes seconds, the reason for this file.
        )

    return make_compute_part


def _make_pool(
    config: DmpConfig, meta: MetaClient, open_lower: Callable[[], LowerTier] | None
) -> DmpPart:
    from tierkv.parts.parts import DmpPart  # Also imports numpy and the pool's transports.

    return DmpPart(config, meta, listen=False, open_lower=open_lower)


def _disk_tier(settings: Settings, pool: DmpConfig) -> Callable[[], LowerTier] | None:
    """As ``disk_tier``; without a disk pool nothing is imported."""
    if not (settings.dmp.disk_path or settings.dmp.archive_url):
        return None
    from tierkv.parts.parts import disk_tier

    return disk_tier(settings.dmp, pool.node_id, extent_bytes=pool.extent_bytes)


def _pool_config(settings: Settings, host: HostId) -> DmpConfig:
    name = f"tierkv-{os.getpid()}-{secrets.token_hex(4)}.seg"
    return DmpConfig(
        node_id=NodeId("dmp-0"),
        host=host,
        segment_path=str(Path(settings.dmp.segment_dir) / name),
        capacity_bytes=int(settings.dmp.capacity),
        ready_ahead_bytes=READY_AHEAD_BYTES,
        extent_bytes=EXTENT_BYTES,
        demote_above=settings.dmp.demote_above,
        eviction_policy=settings.dmp.eviction_policy,
        lease_share=settings.dmp.lease_share,
        scrub_rate_bytes_per_s=int(settings.dmp.scrub_rate),
        nameless=True,
    )
