"""The HTTP server: start, port and stop; and the layers around the application.

The composition root creates ``HttpServer``. uvicorn runs inside the caller's event loop, without
uvicorn's signal handlers and logging. ``HttpConnection`` adds time-outs for the head and the body
of a request, which uvicorn lacks. ``Edge`` is plain ASGI around the application: request ids, the
size limit of bodies and a log line per request, so even a crash has an x-request-id.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tierkv.dbfront.accepting import BACKLOG, Acceptor
from tierkv.dbfront.accounts.statistic_tables import MEMORY
from tierkv.dbfront.contracts import TextGenerator
from tierkv.dbfront.http.app import make_app
from tierkv.dbfront.http.config import HttpConfig, KeyRing
from tierkv.dbfront.http.endpoints.metrics import Family, Metrics
from tierkv.dbfront.http.responses.background import ResponseQueue
from tierkv.dbfront.http.services import ReadinessCheck
from tierkv.dbfront.queue.file_log import FileLog
from tierkv.dbfront.sessions.conversations import Conversations
from tierkv.dbfront.sessions.session_file import SessionFile
from tierkv.dbfront.siblings import Siblings
from tierkv.dbfront.sql_session import SqlServer
from tierkv.dbfront.views.admin import ClusterSource
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import new_request_id

HEAD_TIMEOUT_S: Final = 20.0
BODY_TIMEOUT_S: Final = 120.0
"""The longest body, 16 MiB, arrives within this time at 1.2 Mbit/s."""

IDLE_TIMEOUT_S: Final = 30
"""Maximum time between two requests; clients' pools keep connections some seconds."""

# uvicorn warns of every malformed request, so strangers could fill the log. The requests are
# answered 400.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


class HttpConnection(H11Protocol):
    """The connection of one client.

    Attributes:
        head_timeout_s: maximum time from connecting, or from the first byte of a request, to the
            end of the request's head.
        body_timeout_s: maximum time from the end of the head to the end of the body.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S
    _awaited: object = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(h11.IDLE)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await(self.conn.their_state)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def _await(self, state: object) -> None:
        """Run the timer of the message part awaited from the client; it starts with the state."""
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._awaited = awaited
        if awaited is not None:
            wait_s = self.head_timeout_s if awaited is h11.IDLE else self.body_timeout_s
            self._timer = self.loop.call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        self.transport.abort()


log = logging.getLogger("tierkv.http")

_NAME = re.compile(limits.NAME_PATTERN)


class Edge:
    """The ASGI layer around the application."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        started_s = self._clock.now()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            # The application has already answered 500 and logged the error; the server needs no
            # error.
            if not exchange.status:
                raise
        log.info(
            "%s %s %s %.1f ms %s",
            scope["method"],
            scope["path"],
            exchange.status,
            (self._clock.now() - started_s) * 1e3,
            exchange.request_id,
        )


class _Exchange:
    """A request and its response, with the size of the body.

    Attributes:
        request_id: the client's x-request-id if valid, else a new id.
        status: status of the response; 0 before the response begins.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        self.request_id = given if _NAME.fullmatch(given) else new_request_id()
        self.status = 0
        length = headers.get(b"content-length", "0")
        self._declared = int(length) if length.isdecimal() else 0
        self._received = 0
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Pass the body on, up to the size limit.

        Raises:
            HTTPException: 413. The connection is then closed, because the rest of the body is not
                read.
        """
        if self._declared > limits.MAX_HTTP_BODY_BYTES:
            raise _too_long()
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > limits.MAX_HTTP_BODY_BYTES:
                raise _too_long()
        return message

    async def send(self, message: Message) -> None:
        """Add the request id to the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                (b"request-id", self.request_id.encode()),  # What Anthropic's clients read.
            ]
        await self._send(message)


def _too_long() -> HTTPException:
    message = f"the body is longer than {limits.MAX_HTTP_BODY_BYTES} bytes"
    return HTTPException(413, message, headers={"connection": "close"})


class HttpServer:
    """Serves REST over one generator.

    Attributes:
        app: the FastAPI application, for inspection.
        metrics: register ``metrics.take`` with the generator's ``publish_to``.
        port: the listening port; 0 before ``start``.
        keys: the keys that open the door.
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
        siblings: Siblings | None = None,
        cluster: ClusterSource | None = None,
        conversations: Conversations | None = None,
        queue: ResponseQueue | None = None,
    ) -> None:
        """Create a server; the server does not listen yet.

        Without ``conversations`` or ``queue`` the server keeps its own, in memory.

        Raises:
            ConfigError: the configuration is refused, for example a public address without keys.
        """
        config.check()
        self.metrics = metrics or Metrics()
        self.port = 0
        self.keys = KeyRing(config)
        self._config = config
        self._clock = clock or SystemClock()
        self.app: FastAPI
        self.app, self._services, self._background = make_app(
            config,
            generator,
            metrics=self.metrics,
            checks=checks or {},
            sql=sql,
            clock=self._clock,
            keys=self.keys,
            cluster=cluster,
            conversations=conversations or Conversations(SessionFile(), self._clock),
            queue=queue or ResponseQueue(FileLog(MEMORY, self._clock)),
        )
        if siblings is not None:
            self._services.siblings = siblings
            siblings.answers["metrics"] = self._tell_metrics
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connections(self) -> list[asyncio.Transport]:
        """Return the transports of the connected clients."""
        if self._server is None:
            return []
        return [each.transport for each in self._server.server_state.connections]

    async def start(self) -> int:
        """Listen and serve.

        Returns:
            the port, chosen by the system if the configuration says 0.

        Raises:
            ConfigError: the port is in use, or the address is not an address of this machine.
        """
        listener = _listen(self._config)
        self.port = listener.getsockname()[1]
        self._background.start()
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

    async def _tell_metrics(self, _: Mapping[str, Any]) -> list[Family]:
        return self.metrics.families()

    async def drain(self, most_s: float) -> None:
        """Report "not ready" and refuse requests; wait for those that run, then end them.

        Args:
            most_s: longest wait for running requests. Then each is answered 503, or its stream ends
                with an error.
        """
        self._services.draining = True
        if self._server is None:
            return
        if self._config.reuse_port:
            for server in self._server.servers:
                server.close()  # The kernel gives the clients to the other workers.
        if running := {*self._server.server_state.tasks, *self._background.drain()}:
            await asyncio.wait(running, timeout=most_s)
        self._services.ended.set()

    async def stop(self) -> None:
        """Report "not ready", let running requests end for a while, then close the connections."""
        self._services.draining = True
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        # uvicorn cancels requests that did not end in time, but does not wait for their cleanup.
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        await self._background.stop()
        self._server = self._task = None


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers, with bounded accepting and a ready event."""

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
        if config.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "in use" if error.errno == errno.EADDRINUSE else str(error)
        raise ConfigError(
            f"can't serve HTTP on {config.host}:{config.port}: {reason}",
            hint="Choose another http port (--http-port), or stop the process that uses it.",
        ) from error
    return listener
