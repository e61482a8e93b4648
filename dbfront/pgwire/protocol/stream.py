"""One client's socket, and the messages before login.

asyncio's StreamReader would treat bytes sent before a TLS handshake as encrypted bytes, and does
not report a client that leaves during its statement. ``PgStream`` refuses the former and reports
the latter: an asyncio Protocol with bounded buffers, for the server, handler.py and exchange.py.
``StartupExchange`` reads requests for encryption, a cancel and the StartupMessage; both listeners
of the SQL port begin so, each with its own type of stream. The client is not authenticated yet.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol.connection import PgConnection
from tierkv.kvcore.errors import AuthenticationError, RemoteProtocolError

READ_HIGH_BYTES: Final = 256 << 10
"""Number of unread bytes at which reading from the socket pauses."""

WRITE_HIGH_BYTES: Final = 64 << 10
"""Number of unsent bytes at which ``drain`` waits for the client."""


class PgStream(asyncio.Protocol):
    """Bytes from and to one client.

    Attributes:
        on_connect: called once with the stream, when the TCP connection is open.
        peer: address of the client.
        on_hangup: called once, when the client is gone; the session then cancels its statement.
    """

    def __init__(self, on_connect: Callable[[PgStream], None]) -> None:
        self.on_connect: Callable[[PgStream], None] | None = on_connect
        self.on_hangup: Callable[[], None] | None = None
        self.peer = ""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()
        self._eof = False
        self._interrupt: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._write_paused = False
        self._reading_paused = False

    @property
    def transport(self) -> asyncio.Transport:
        """Return the open transport."""
        assert self._transport is not None
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        if self.on_connect is not None:
            callback, self.on_connect = self.on_connect, None
            callback(self)

    def data_received(self, data: bytes) -> None:
        self._incoming += data
        if len(self._incoming) > READ_HIGH_BYTES and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()
        self._wake(self._reader)

    def eof_received(self) -> bool:
        self._hang_up()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._hang_up()
        self._wake(self._writer)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake(self._writer)

    def _hang_up(self) -> None:
        if not self._eof:
            self._eof = True
            if self.on_hangup is not None:
                self.on_hangup()
        self._wake(self._reader)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def read(self) -> bytes:
        """Return the received bytes, waiting for at least one byte; empty at the end.

        Raises:
            BaseException: the error passed to ``interrupt``.
        """
        while not self._incoming and not self._eof:
            if self._interrupt is not None:
                raise self._interrupt
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = bytes(self._incoming)
        self._incoming.clear()
        if self._reading_paused and not self._eof:
            self._reading_paused = False
            self.transport.resume_reading()
        return data

    def interrupt(self, error: BaseException) -> None:
        """Make the current or next waiting ``read`` raise ``error``."""
        self._interrupt = error
        self._wake(self._reader)

    def write(self, data: bytes) -> None:
        """Queue bytes; call ``drain`` after large amounts."""
        if not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has taken most of the written bytes.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self._write_paused and not self.transport.is_closing():
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        else:
            await asyncio.sleep(0)  # let other sessions run during a long result
        if self.transport.is_closing():
            raise ConnectionResetError("client is gone")

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Accept the TLS request and encrypt the stream.

        Raises:
            RemoteProtocolError: bytes arrived before the handshake (possible injection by a man in
                the middle).
            OSError: the handshake failed; includes ssl.SSLError.
        """
        if self._incoming:
            raise RemoteProtocolError("received unencrypted data after SSL request")
        self.transport.write(b"S")
        # No await before start_tls: no bytes can arrive between here and the handshake.
        transport = await self._loop.start_tls(self.transport, self, context, server_side=True)
        if transport is None:
            raise ConnectionResetError("client left during the TLS handshake")
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def close(self) -> None:
        """Send the queued bytes, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


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
