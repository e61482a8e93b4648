"""The network service of the meta server: bind, serve, stop.

Made by the composition root (``tierkv serve meta``, ``tierkv up``); also answers the standard gRPC
health service. All decisions are in the core behind LocalMeta.
"""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import ConfigError
from tierkv.kvwire.channels import BoundServer, bind_server
from tierkv.kvwire.v1 import meta_pb2_grpc
from tierkv.metaserver.config import MetaConfig
from tierkv.metaserver.local import LocalMeta
from tierkv.metaserver.rpc.service import MetaService

_SERVICES = ("", "tierkv.v1.Meta")


class MetaServer:
    """One meta server on one port.

    Attributes:
        local: the same server for callers in this process; None before ``start``.
    """

    def __init__(self, config: MetaConfig, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock
        self._bound: BoundServer | None = None
        self._health = health.aio.HealthServicer()
        self.local: LocalMeta | None = None

    @property
    def address(self) -> str:
        """Return the ``host:port`` for clients; empty before ``start``."""
        return self._bound.address if self._bound else ""

    async def start(self) -> str:
        """Open the database, bind and serve; return the address.

        Raises:
            ConfigError: port in use, public address without token, unusable database.
        """
        local = LocalMeta(self._config, clock=self._clock)
        try:
            bound = bind_server(
                self._config.address, token=self._config.token, setting="meta.address"
            )
        except ConfigError:
            await local.close()
            raise
        self.local = local
        meta_pb2_grpc.add_MetaServicer_to_server(MetaService(local), bound.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, bound.server)
        for service in _SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await bound.server.start()
        self._bound = bound
        return bound.address

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Let running calls end for ``grace_s``, then close; may be called twice."""
        if self._bound is not None:
            await self._health.enter_graceful_shutdown()
            if self.local is not None:
                self.local.end_holds()
            await self._bound.server.stop(grace_s)
            self._bound = None
        if self.local is not None:
            await self.local.close()
            self.local = None
