"""The PostgreSQL port of a front with a PostgreSQL server behind it.

tierkv/parts/postgres_door.py creates the server from a RelayConfig. ``await start()`` returns the
bound port, ``await stop()`` sends 57P01 to every client. Each client gets a separate connection to
the PostgreSQL server. A CancelRequest stops the front's AI calls, or is passed to PostgreSQL while
PostgreSQL works.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierkv.dbfront.accepting import (
    Acceptor,
    accept_clients,
    client_tls,
    most_sockets,
    wait_for_clients,
)
from tierkv.dbfront.pgwire.config import is_loopback
from tierkv.dbfront.pgwire.protocol import messages as frontend
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.replies import (
    ADMIN_SHUTDOWN,
    AdminShutdownError,
    TooManyConnectionsError,
    error_fields,
)
from tierkv.dbfront.postgres.relay import Attendant, Relay
from tierkv.dbfront.postgres.wire import messages
from tierkv.dbfront.postgres.wire.endpoint import Endpoint
from tierkv.dbfront.postgres.wire.login import LoggedIn, Login, Target, connect, parse_dsn
from tierkv.dbfront.siblings import Siblings
from tierkv.kvcore.errors import ConfigError, DrainingError, TierKVError


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The listening address, and the PostgreSQL server behind the relay.

    PostgreSQL manages the users: clients log in to PostgreSQL through the relay.

    Attributes:
        dsn: the PostgreSQL server, in libpq's format; its user installs schema ``tierkv``.
        bind: address to listen on.
        port: TCP port; 0 lets the system choose, and ``RelayServer.start`` returns the port.
        tls_cert_file: PEM certificate chain; empty: no TLS towards clients.
        tls_key_file: PEM private key.
        require_tls: refuse clients without TLS.
        max_connections: maximum number of sessions; further clients are refused with 53300.
        login_timeout_s: maximum time until login; the connection is then closed.
        shutdown_grace_s: maximum wait of ``stop`` for the end of connections.
        session_defaults: defaults of ``tierkv.*`` settings, by full name.
        reuse_port: other workers of the front listen on the port, too.
    """

    dsn: str = field(repr=False)
    bind: str = "127.0.0.1"
    port: int = 5433
    tls_cert_file: str = ""
    tls_key_file: str = ""
    require_tls: bool = False
    max_connections: int = 200
    login_timeout_s: float = 60.0
    shutdown_grace_s: float = 5.0
    session_defaults: Mapping[str, str] = field(default_factory=dict)
    reuse_port: bool = False

    def check(self) -> None:
        """Refuse settings that could not work.

        Raises:
            ConfigError: names the setting and the cure.
        """
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("TLS needs both front.tls_cert and front.tls_key")
        if self.require_tls and not self.tls_cert_file:
            raise ConfigError("front.require_tls is set but there is no front.tls_cert")

    @property
    def public(self) -> bool:
        """Return True if other machines can connect."""
        return not is_loopback(self.bind)


_LOG = logging.getLogger(__name__)

MakeAttendant = Callable[[Relay], Attendant]


class RelayServer:
    """A listener in front of a PostgreSQL server."""

    def __init__(
        self,
        config: RelayConfig,
        make_attendant: MakeAttendant | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """Read the settings; nothing is opened before ``start``.

        Args:
            config: the listening address and the PostgreSQL server.
            make_attendant: creates the attendant of a session; with None all messages pass.
            siblings: the other workers of the front, which may have the session of a CancelRequest.

        Raises:
            ConfigError: settings that can't work.
        """
        config.check()
        self._config = config
        self._make_attendant = make_attendant
        self._target: Target = parse_dsn(config.dsn)
        self._tls = client_tls(config.tls_cert_file, config.tls_key_file)
        self._acceptor: Acceptor | None = None
        self._clients: dict[asyncio.Task[None], Endpoint] = {}
        self._sessions: dict[int, Relay] = {}
        self._stopping = self._draining = False
        self._siblings = siblings or Siblings()
        self._siblings.answers["cancel"] = self._cancel_asked

    @property
    def connections(self) -> int:
        """Return the number of connected clients, logged in or not."""
        return len(self._clients)

    @property
    def sessions(self) -> list[Relay]:
        """Return the logged-in sessions."""
        return list(self._sessions.values())

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            ConfigError: the port is in use.
        """
        config = self._config
        self._stopping = False
        self._acceptor = await accept_clients(
            config.bind,
            config.port,
            lambda: Endpoint(self._accept),
            has_room=lambda: len(self._clients) < most_sockets(config.max_connections),
            reuse_port=config.reuse_port,
        )
        port = self._acceptor.port
        _LOG.info("relay listens on %s:%d for %s", config.bind, port, self._target.address)
        return port

    async def drain(self, most_s: float) -> None:
        """Refuse new sessions, and end each open one after its statement or transaction.

        Args:
            most_s: longest wait for statements and transactions.
        """
        self._draining = True
        if self._acceptor is not None and self._config.reuse_port:
            self._acceptor.close()  # The kernel gives the clients to the other workers.
        for relay in self.sessions:
            relay.leave(AdminShutdownError(ADMIN_SHUTDOWN))
        if self._clients:
            await asyncio.wait(set(self._clients), timeout=most_s)

    async def stop(self) -> None:
        """Stop listening, notify every client, and end the sessions."""
        self._stopping = True
        if self._acceptor is not None:
            self._acceptor.close()
        goodbye = AdminShutdownError(ADMIN_SHUTDOWN)
        for relay in self.sessions:
            relay.stop(goodbye)
        await wait_for_clients(self._clients, self._config.shutdown_grace_s)
        self._acceptor = None

    def _accept(self, client: Endpoint) -> None:
        if self._stopping:
            client.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._clients[task] = client

        def done(finished: asyncio.Task[None]) -> None:
            self._clients.pop(finished, None)
            client.close()

        task.add_done_callback(done)

    async def _serve(self, client: Endpoint) -> None:
        """Serve one client until the client leaves; raise nothing but a cancellation."""
        try:
            async with asyncio.timeout(self._config.login_timeout_s):
                login = await self._log_in(client)
            if login is not None:
                await self._relay(client, login)
        except (ConnectionError, ssl.SSLError, TimeoutError) as error:
            _LOG.debug("client %s left: %s", client.peer, error)
        except TierKVError as error:
            client.write(replies.error_response(error_fields(error, fatal=True)))
        except Exception as error:  # noqa: BLE001 - outermost loop: one connection, not the server
            _LOG.exception("connection of %s failed inside the relay", client.peer)
            client.write(replies.error_response(error_fields(error, fatal=True)))
        finally:
            await client.finish()

    async def _log_in(self, client: Endpoint) -> LoggedIn | None:
        login = Login(
            client,
            self._target,
            tls=None if self._tls is None else self._tls.context,
            require_tls=self._config.require_tls,
            defaults=self._config.session_defaults,
            on_cancel=self._cancel,
            admit=self._admit,
        )
        return await login.run()

    def _admit(self) -> None:
        if self._draining:
            raise DrainingError
        if len(self._sessions) >= self._config.max_connections:
            raise TooManyConnectionsError("sorry, too many clients already")

    async def _relay(self, client: Endpoint, login: LoggedIn) -> None:
        relay = Relay(client, login)
        if self._make_attendant is not None:
            relay.use(self._make_attendant(relay))
        self._sessions[login.pid] = relay
        if self._draining:
            relay.leave(AdminShutdownError(ADMIN_SHUTDOWN))
        try:
            await relay.serve()
        finally:
            if self._sessions.get(login.pid) is relay:  # PostgreSQL may reuse the number.
                del self._sessions[login.pid]

    async def _cancel(self, request: frontend.CancelRequest) -> None:
        """Cancel the named session's work, here or at another worker."""
        if not await self._cancel_here(request):
            await self._siblings.any_does("cancel", **request.details())

    async def _cancel_asked(self, details: Mapping[str, Any]) -> bool:
        return await self._cancel_here(frontend.CancelRequest.of_details(details))

    async def _cancel_here(self, request: frontend.CancelRequest) -> bool:
        """Cancel a session's work if the secret is right; PostgreSQL checks the secret again.

        Returns:
            known: False if the session is not a session of this process.
        """
        relay = self._sessions.get(request.pid)
        if relay is None or not hmac.compare_digest(relay.login.secret, request.secret):
            return relay is not None
        if relay.cancel():
            return True
        backend, _ = await connect(self._target)
        backend.write(messages.cancel_request(request.pid, request.secret))
        await backend.read()
        await backend.finish()
        return True
