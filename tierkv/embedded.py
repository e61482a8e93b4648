"""A whole cluster in one process, for ``tierkv.connect()`` and ``tierkv sql``.

The parts are the same as in a real cluster, without sockets between them: meta server, memory pool,
compute node, front. The front and the directory exist at once, the other parts when a call needs
them (tierkv/embedded_nodes.py). The pool's segment is private and disappears with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from tierkv.config import LoadedConfig
from tierkv.dbapi import Connection
from tierkv.dbfront.contracts import ClientInfo
from tierkv.embedded_nodes import EmbeddedNodes
from tierkv.loop_thread import LoopThread
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.front_part import FrontPart
from tierkv.parts.served_models import with_default_model
from tierkv.settings import Settings


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
                default_policy=config.settings.namespace.policy(),
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

    async def settle(self) -> None:
        """Wait until computed blocks are in the pool and the directory knows."""
        await self.nodes.settle()

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
