"""The life of one client connection: startup, TLS, login, then messages until the end.

The server creates one ``ClientHandler`` per accepted socket and awaits ``serve``. A protocol error
ends only its own connection, with a FATAL error.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import ssl
from dataclasses import dataclass, field
from typing import Final

from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.pgwire.config import PgWireConfig
from tierkv.dbfront.pgwire.conversation.exchange import Exchange
from tierkv.dbfront.pgwire.conversation.extended_query import ExtendedQuery
from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.dbfront.pgwire.protocol.auth import MECHANISM, Authenticator
from tierkv.dbfront.pgwire.protocol.connection import PgConnection
from tierkv.dbfront.pgwire.protocol.replies import (
    ADMIN_SHUTDOWN,
    AdminShutdownError,
    TooManyConnectionsError,
    error_fields,
    too_long,
)
from tierkv.dbfront.pgwire.protocol.stream import PgStream, StartupExchange
from tierkv.dbfront.postgres_dialect.catalog.table_numbers import TableNumbers
from tierkv.dbfront.postgres_dialect.server import DialectServer
from tierkv.dbfront.postgres_dialect.session.session import WireNeeds
from tierkv.dbfront.siblings import Siblings
from tierkv.kvcore.errors import (
    AuthenticationError,
    DrainingError,
    FeatureNotSupportedError,
    SqlError,
    TierKVError,
)
from tierkv.kvwire.credentials import ServerTls

_LOG = logging.getLogger(__name__)
_SECRET_BYTES: Final = 4  # fixed by protocol 3.0


@dataclass(slots=True)
class Lobby:
    """State shared by all connections of a server.

    Attributes:
        config: the server's settings.
        sql_server: opens sessions.
        authenticator: the users.
        tls: set when TLS is on.
        handlers: connections by pid, for CancelRequest.
        numbers: cached numbers of tables.
        siblings: the other workers of the front.
        draining: no client may log in any more.
    """

    config: PgWireConfig
    sql_server: DialectServer
    authenticator: Authenticator
    tls: ServerTls | None = None
    handlers: dict[int, ClientHandler] = field(default_factory=dict)
    numbers: TableNumbers = field(default_factory=TableNumbers)
    siblings: Siblings = field(default_factory=Siblings)
    draining: bool = False

    async def cancel(self, request: m.CancelRequest) -> None:
        """Cancel the running statement of the named connection, here or at another worker."""
        if not self.cancel_here(request):
            await self.siblings.any_does("cancel", **request.details())

    def cancel_here(self, request: m.CancelRequest) -> bool:
        """Cancel a connection's statement if the secret is right; False: another process's pid."""
        handler = self.handlers.get(request.pid)
        if handler is not None and hmac.compare_digest(handler.secret, request.secret):
            handler.cancel()
        return handler is not None


class ClientHandler:
    """One connection.

    Attributes:
        secret: proves a CancelRequest.
    """

    def __init__(self, lobby: Lobby, stream: PgStream) -> None:
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._lobby = lobby
        self._stream = stream
        self._connection = PgConnection()
        self._exchange: Exchange | None = None
        self._user = ""
        self._startup = StartupExchange(
            self._connection,
            stream,
            tls=None if lobby.tls is None else lobby.tls.context,
            require_tls=lobby.config.require_tls,
            start_tls=stream.start_tls,
            on_cancel=lobby.cancel,
        )

    def cancel(self) -> None:
        """Cancel the running statement, if any."""
        if self._exchange is not None:
            self._exchange.cancel()

    def shut_down(self, error: TierKVError) -> None:
        """Cancel the running statement, and end the connection with ``error`` once it is idle."""
        if self._exchange is not None:
            self._exchange.goodbye = error
        self._stream.interrupt(error)
        self.cancel()

    def leave(self, error: TierKVError) -> None:
        """End the connection with ``error`` after its running statement or transaction."""
        if self._exchange is not None:
            self._exchange.leave(error)

    async def serve(self) -> None:
        """Serve the client until the client leaves; raise nothing but a cancellation."""
        try:
            async with asyncio.timeout(self._lobby.config.auth_timeout_s):
                exchange = await self._log_in()
            if exchange is not None:
                await self._converse(exchange)
        except (ConnectionError, ssl.SSLError, TimeoutError) as error:
            _LOG.debug("client %s left: %s", self._peer(), error)
        except TierKVError as error:
            self._goodbye(error)
        except Exception as error:  # noqa: BLE001 - outermost loop: one connection, not the server
            _LOG.exception("connection of %s failed inside the server", self._peer())
            self._goodbye(error)
        finally:
            await self._leave()

    def _peer(self) -> str:
        return self._stream.peer

    def _goodbye(self, error: BaseException) -> None:
        self._connection.close()
        self._stream.write(replies.error_response(error_fields(error, fatal=True)))

    async def _leave(self) -> None:
        self._connection.close()
        exchange, self._exchange = self._exchange, None
        try:
            if exchange is not None:
                self._lobby.handlers.pop(exchange.session.pid, None)
                await exchange.close()
        except TierKVError:
            _LOG.warning("closing the session of %s failed", self._peer(), exc_info=True)
        finally:
            self._stream.close()

    async def _log_in(self) -> Exchange | None:
        startup = await self._startup.run()
        if startup is None:
            return None
        self._connection.accept_startup()
        self._negotiate_version(startup)
        client = self._client_info(startup)
        if self._lobby.draining:
            raise DrainingError
        if len(self._lobby.handlers) >= self._lobby.config.max_connections:
            raise TooManyConnectionsError("sorry, too many clients already")
        await self._authenticate(client.user)
        self._check_share(client.user)
        self._user = client.user
        self._connection.accept_login()
        return await self._welcome(client)

    def _check_share(self, user: str) -> None:
        several = self._lobby.authenticator.has_several
        share = self._lobby.config.share_of_user(several=several)
        if sum(each._user == user for each in self._lobby.handlers.values()) >= share:
            raise TooManyConnectionsError(
                f'too many connections for role "{user}"',
                hint=f"One user may have {share} of {self._lobby.config.max_connections} sessions "
                "(front.max_connections_per_user).",
            )

    def _negotiate_version(self, startup: m.Startup) -> None:
        unknown = [name for name in startup.parameters if name.startswith("_pq_.")]
        if startup.minor or unknown:
            self._stream.write(replies.negotiate_protocol_version(0, unknown))

    def _client_info(self, startup: m.Startup) -> ClientInfo:
        parameters = dict(startup.parameters)
        user = parameters.pop("user", "")
        if not user:
            raise SqlError("no PostgreSQL user name specified in startup packet", sqlstate="28000")
        if parameters.pop("replication", "false").lower() not in ("false", "off", "no", "0"):
            raise FeatureNotSupportedError("replication connections are not supported")
        database = parameters.pop("database", "") or user
        application_name = parameters.get("application_name", "")
        options = {k: v for k, v in parameters.items() if not k.startswith("_pq_.")}
        return ClientInfo(user, database, application_name, self._peer(), options)

    async def _authenticate(self, user: str) -> None:
        if self._lobby.authenticator.trust and self._lobby.config.needs_users:
            raise SqlError(
                "front.api_keys requires keys of REST clients, but no SQL user is configured",
                sqlstate="28000",
                hint="Set front.users to let SQL clients in.",
            )
        if not self._lobby.authenticator.trust:
            login = self._lobby.authenticator.login(user)
            self._stream.write(replies.authentication_sasl([MECHANISM]))
            answer = login.first(*m.sasl_initial(await self._password_data()))
            self._stream.write(replies.authentication_sasl_continue(answer))
            proof = await self._password_data()
            try:
                answer = login.final(proof)
            except AuthenticationError:
                self._lobby.authenticator.note_failure(user)
                await asyncio.sleep(self._lobby.config.failed_login_delay_s)
                raise
            self._stream.write(replies.authentication_sasl_final(answer))
        self._stream.write(replies.AUTHENTICATION_OK)

    async def _password_data(self) -> bytes:
        message = await self._startup.next_message()
        if not isinstance(message, m.PasswordData):
            raise ConnectionResetError("client left during login")
        return message.data

    async def _welcome(self, client: ClientInfo) -> Exchange:
        needs = WireNeeds(self._lobby.numbers, self._lobby.config.session_settings)
        session = await self._lobby.sql_server.open_session(client, needs)
        self._exchange = exchange = Exchange(self._connection, self._stream, session)
        session.on_progress = exchange.tell
        await session.start()
        self._lobby.handlers[session.pid] = self
        for name, value in session.settings.reported():
            exchange.send(replies.parameter_status(name, value))
        exchange.send(replies.backend_key_data(session.pid, self.secret))
        exchange.send(replies.ready_for_query(session.transaction_status))
        if self._lobby.draining:  # Since this client's login began.
            exchange.leaving = AdminShutdownError(ADMIN_SHUTDOWN)
        return exchange

    async def _converse(self, exchange: Exchange) -> None:
        extended = ExtendedQuery(exchange)
        session = exchange.session
        session.set_deallocator(extended.deallocate)
        while (message := await exchange.next_message()) is not None:
            match message:
                case m.Query(sql):
                    await extended.query(sql)
                case m.Sync():
                    await extended.sync()
                case m.Terminate():
                    return
                case m.TooLong():
                    await exchange.fail(too_long(message))
                    if message.simple:
                        exchange.send(self._connection.send_ready(session.transaction_status))
                case m.FunctionCall():
                    await exchange.fail(
                        FeatureNotSupportedError("function calls by OID are not supported")
                    )
                    exchange.send(self._connection.send_ready(session.transaction_status))
                case _:
                    await extended.handle(message)
