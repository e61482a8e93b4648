"""The messages of a client before login: requests for encryption, a cancel, the StartupMessage.

Both listeners of the SQL port begin with this exchange, each with its own type of stream. The
client is not authenticated yet.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol.connection import PgConnection
from tierkv.kvcore.errors import AuthenticationError, RemoteProtocolError

_MAX_NEGOTIATIONS: Final = 4  # one SSLRequest, one GSSENCRequest, and some slack


class ClientStream(Protocol):
    """Bytes from and to a client; ``read`` returns empty bytes at the end."""

    async def read(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...


class StartupExchange:
    """The beginning of one connection.

    Attributes:
        encrypted: TLS is on.
    """

    def __init__(
        self,
        connection: PgConnection,
        stream: ClientStream,
        *,
        tls: ssl.SSLContext | None,
        require_tls: bool,
        start_tls: Callable[[ssl.SSLContext], Awaitable[None]],
        on_cancel: Callable[[m.CancelRequest], Awaitable[None]],
    ) -> None:
        """Handle a connection up to its StartupMessage.

        Args:
            connection: turns bytes into messages.
            stream: the stream of the client.
            tls: None refuses encryption.
            require_tls: refuse clients without TLS.
            start_tls: accepts the TLS request and encrypts the stream.
            on_cancel: handles a CancelRequest.
        """
        self.encrypted = False
        self._connection = connection
        self._stream = stream
        self._tls = tls
        self._require_tls = require_tls
        self._start_tls = start_tls
        self._on_cancel = on_cancel

    async def next_message(self) -> m.FrontendMessage | m.StartupMessage | None:
        """Return the client's next message, or None if the client left."""
        while (message := self._connection.next_message()) is None:
            data = await self._stream.read()
            if not data:
                return None
            self._connection.receive_data(data)
        return message

    async def run(self) -> m.Startup | None:
        """Answer encryption requests until the StartupMessage; None ends the connection.

        Raises:
            AuthenticationError: TLS is required and not on.
            RemoteProtocolError: too many requests, or bytes before the TLS handshake.
        """
        for _ in range(_MAX_NEGOTIATIONS):
            match await self.next_message():
                case m.SslRequest():
                    await self._encrypt()
                case m.GssEncRequest():
                    self._stream.write(b"N")
                case m.CancelRequest() as request:
                    await self._on_cancel(request)
                    return None
                case m.Startup() as startup:
                    if self._require_tls and not self.encrypted:
                        raise AuthenticationError("this server accepts TLS connections only")
                    return startup
                case _:
                    return None
        raise RemoteProtocolError("too many encryption requests")

    async def _encrypt(self) -> None:
        if self._connection.buffered_bytes or self.encrypted:
            raise RemoteProtocolError("received unencrypted data after SSL request")
        if self._tls is None:
            self._stream.write(b"N")
            return
        await self._start_tls(self._tls)
        self.encrypted = True
