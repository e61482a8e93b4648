"""One leg of a relayed connection: an asyncio Protocol for passing bytes on at once.

A relay has two legs, the client's and PostgreSQL's; each leg is the ``other`` of the opposite leg.
A leg unable to send stops the opposite leg from receiving, and no bytes pile up. Before login, and
during an AI statement, the relay reads bytes with ``read`` instead.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

from tierkv.kvcore.errors import RemoteProtocolError

HIGH_WATER_BYTES: Final = 1 << 20
"""Number of unsent or unread bytes at which receiving stops."""


_LINGER_S: Final = 2.0


class Endpoint(asyncio.Protocol):
    """Bytes from and to one peer.

    Attributes:
        on_data: gets the received bytes; with None the bytes are kept for ``read``.
        on_close: called once, when the connection is gone or the peer will send no more.
        other: the leg to slow down while this leg can't send.
        peer: address of the peer.
        closed: True if no more bytes will arrive.
    """

    def __init__(self, on_connect: Callable[[Endpoint], None] | None = None) -> None:
        self.on_data: Callable[[bytes], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self.other: Endpoint | None = None
        self.peer = ""
        self.closed = False
        self._on_connect = on_connect
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._reader: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._writer: asyncio.Future[None] | None = None
        self._full = False
        self._holds: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if self._on_connect is not None:
            callback, self._on_connect = self._on_connect, None
            callback(self)

    def data_received(self, data: bytes) -> None:
        if self.on_data is not None:
            self.on_data(data)
            return
        self._unread += data
        if len(self._unread) > HIGH_WATER_BYTES:
            self.hold("unread")
        self._wake()

    def eof_received(self) -> bool:
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self.resume_writing()
        if not self._lost.done():
            self._lost.set_result(None)

    def pause_writing(self) -> None:
        self._full = True
        if self.other is not None:
            self.other.hold("full")

    def resume_writing(self) -> None:
        self._full = False
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        if self.other is not None:
            self.other.release("full")

    def hold(self, why: str) -> None:
        """Stop receiving until all holds are released; ``why`` names the hold."""
        if not self._holds and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._holds.add(why)

    def release(self, why: str) -> None:
        """Release a hold."""
        if why not in self._holds:
            return
        self._holds.discard(why)
        if not self._holds and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._wake()
        if self.on_close is not None:
            self.on_close()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> bytes:
        """Return the received bytes, waiting for at least one byte; empty at the end."""
        while not self._unread and not self.closed:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.take_unread()

    def take_unread(self) -> bytes:
        """Return the received bytes that are still unread."""
        data = bytes(self._unread)
        self._unread.clear()
        self.release("unread")
        return data

    def write(self, data: bytes) -> None:
        """Send bytes, or queue them."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    async def drain(self) -> None:
        """Wait until the peer has taken most of the written bytes.

        Raises:
            ConnectionResetError: the peer is gone.
        """
        if self._full and not self.closed:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self.closed:
            raise ConnectionResetError("the peer is gone")

    async def start_tls(
        self, context: ssl.SSLContext, *, server_side: bool, hostname: str | None = None
    ) -> None:
        """Encrypt the connection; the peer has agreed.

        Raises:
            RemoteProtocolError: bytes arrived before the handshake (possible injection by a man in
                the middle).
            OSError: the handshake failed; includes ssl.SSLError.
        """
        assert self._transport is not None
        if self._unread:
            raise RemoteProtocolError("received unencrypted data after SSL request")
        transport = await self._loop.start_tls(
            self._transport, self, context, server_side=server_side, server_hostname=hostname
        )
        if transport is None:
            raise ConnectionResetError("the peer left during the TLS handshake")
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def close(self) -> None:
        """Send the queued bytes, then close."""
        if self._transport is not None:
            self._transport.close()

    async def finish(self) -> None:
        """Close, and wait for the end; a peer that stops reading is cut off."""
        if self._transport is None:
            return
        self._transport.close()
        await asyncio.wait([self._lost], timeout=_LINGER_S)
        if not self._lost.done():
            self._transport.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
