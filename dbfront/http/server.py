"""The HTTP door as the composition root sees it: start it, learn its port, stop it.

Runs uvicorn inside the caller's event loop, without its signal handlers and without its logging.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping

import uvicorn
from fastapi import FastAPI

from tierkv.dbfront.accepting import BACKLOG, Acceptor
from tierkv.dbfront.contracts import SqlServer, TextGenerator
from tierkv.dbfront.http.app import make_app
from tierkv.dbfront.http.config import HttpConfig
from tierkv.dbfront.http.connection import IDLE_TIMEOUT_S, HttpConnection
from tierkv.dbfront.http.edge import Edge
from tierkv.dbfront.http.endpoints.metrics import Metrics
from tierkv.dbfront.http.services import ReadinessCheck
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import ConfigError


class HttpServer:
    """Serves REST over one generator.

    Attributes:
        app: the FastAPI application, for inspection.
        metrics: register ``metrics.record_call`` with the generator's ``observe``.
        port: the port it listens on; 0 before ``start``.
    """

    def __init__(
        self,
        config: HttpConfig,
        generator: TextGenerator,
        *,
        metrics: Metrics | None = None,
        checks: Mapping[str, ReadinessCheck] | None = None,
        sql: SqlServer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Make a server; it does not listen yet.

        Raises:
            ConfigError: a public address without keys.
        """
        config.check()
        self.metrics = metrics or Metrics()
        self.port = 0
        self._config = config
        self._clock = clock or SystemClock()
        self.app: FastAPI
        self.app, self._services = make_app(
            config,
            generator,
            metrics=self.metrics,
            checks=checks or {},
            sql=sql,
            clock=self._clock,
        )
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> list[asyncio.Transport]:
        """Clients that are connected."""
        if self._server is None:
            return []
        return [each.transport for each in self._server.server_state.connections]

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            the port, chosen by the system when the configuration says 0.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        listener = _listen(self._config)
        self.port = listener.getsockname()[1]
        self._server = _Uvicorn(
            uvicorn.Config(
                Edge(self.app, clock=self._clock),
                http=HttpConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_TIMEOUT_S,
                timeout_graceful_shutdown=max(1, round(self._config.drain_timeout_s)),
            ),
            max_connections=self._config.max_connections,
        )
        self._task = asyncio.create_task(self._server.serve([listener]), name="http-server")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self._task
        return self.port

    async def stop(self) -> None:
        """Say "not ready", let running requests end for a while, then hang up."""
        self._services.draining = True
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        # uvicorn cancels what did not end in time, but does not wait for it to clean up.
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        self._server = self._task = None


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals alone, accepts within bounds and says when it listens."""

    def __init__(self, config: uvicorn.Config, *, max_connections: int) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._max_connections = max_connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        acceptor = Acceptor(
            list(sockets or ()),
            self._make_connection,
            door="REST",
            has_room=lambda: len(self.server_state.connections) < self._max_connections,
        )
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]  # uvicorn only closes them
        self.started = True
        self.ready.set()

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state)


def _listen(config: HttpConfig) -> socket.socket:
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigError(
            f"can't serve HTTP on {config.host}:{config.port}: {reason}",
            hint="choose another http port (--http-port), or stop the process that has it",
        ) from error
    return listener
