"""The PostgreSQL listener: accepts sockets, creates a ClientHandler for each, stops cleanly.

``await start()`` returns the bound port. ``await stop()`` sends 57P01 to every client and waits for
the sessions to close.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from tierkv.dbfront.accepting import (
    Acceptor,
    accept_clients,
    client_tls,
    most_sockets,
    wait_for_clients,
)
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.conversation.handler import ClientHandler, Lobby
from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol.auth import Authenticator
from tierkv.dbfront.pgwire.protocol.replies import ADMIN_SHUTDOWN, AdminShutdownError
from tierkv.dbfront.pgwire.protocol.stream import PgStream
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.siblings import Siblings
from tierkv.kvcore.clock import Clock

_LOG = logging.getLogger(__name__)


class PgWireServer:
    """A PostgreSQL listener in front of a DialectServer; ``stop`` leaves the DialectServer open.

    Attributes:
        logins: the users.
    """

    def __init__(
        self,
        config: PgWireConfig,
        sql_server: DialectServer,
        clock: Clock,
        siblings: Siblings | None = None,
    ) -> None:
        self._config = config
        self.logins = Authenticator(config.users)
        self._siblings = siblings or Siblings()
        self._siblings.answers["cancel"] = self._cancel_asked
        self._sql_server = sql_server
        self._clock = clock
        self._acceptor: Acceptor | None = None
        self._clients: dict[asyncio.Task[None], ClientHandler] = {}
        self._lobby: Lobby | None = None
        self._stopping = False

    @property
    def connections(self) -> int:
        """Return the number of open sockets, logged in or not."""
        return len(self._clients)

    async def start(self) -> int:
        """Listen.

        Returns:
            port: the bound port.

        Raises:
            ConfigError: unusable settings, or the port is in use.
        """
        config = self._config
        config.check()
        self._lobby = Lobby(
            config,
            self._sql_server,
            self.logins,
            client_tls(config.tls_cert_file, config.tls_key_file),
            siblings=self._siblings,
        )
        self._stopping = False
        self._acceptor = await accept_clients(
            config.bind,
            config.port,
            lambda: PgStream(self._accept),
            has_room=lambda: len(self._clients) < most_sockets(config.max_connections),
            reuse_port=config.reuse_port,
        )
        port = self._acceptor.port
        _LOG.info("pgwire listens on %s:%d", config.bind, port)
        return port

    async def drain(self, most_s: float) -> None:
        """Refuse new sessions, and end each open one after its statement or transaction.

        Args:
            most_s: longest wait for statements and transactions.
        """
        if self._lobby is None:
            return
        self._lobby.draining = True
        if self._acceptor is not None and self._config.reuse_port:
            self._acceptor.close()  # The kernel gives the clients to the other workers.
        for handler in list(self._clients.values()):
            handler.leave(AdminShutdownError(ADMIN_SHUTDOWN))
        if self._clients:
            await asyncio.wait(set(self._clients), timeout=most_s)

    async def stop(self) -> None:
        """Stop listening, notify every client, and close the sessions."""
        self._stopping = True
        if self._acceptor is not None:
            self._acceptor.close()
        goodbye = AdminShutdownError(ADMIN_SHUTDOWN)
        for handler in list(self._clients.values()):
            handler.shut_down(goodbye)
        await wait_for_clients(self._clients, self._config.shutdown_grace_s)
        self._acceptor = None

    async def _cancel_asked(self, details: Mapping[str, Any]) -> bool:
        request = m.CancelRequest.of_details(details)
        return self._lobby is not None and self._lobby.cancel_here(request)

    def _accept(self, stream: PgStream) -> None:
        assert self._lobby is not None
        if self._stopping:
            stream.abort()
            return
        started_s = self._clock.now()
        handler = ClientHandler(self._lobby, stream)
        task = asyncio.get_running_loop().create_task(handler.serve())
        self._clients[task] = handler

        def done(finished: asyncio.Task[None]) -> None:
            self._clients.pop(finished, None)
            stream.close()
            _LOG.debug("connection of %s lasted %.3f s", stream.peer, self._clock.now() - started_s)

        task.add_done_callback(done)
