"""The sans-I/O half of a PostgreSQL session: bytes in, messages out, and the rules of the wire.

handler.py feeds it what the socket gave and asks for the next message; replies that change what
may come next go through its ``send_*`` methods. It never touches a socket, a clock or SQL.

    STARTUP ──StartupMessage──▶ AUTH ──ready──▶ READY ◀──────────────┐
       │ SSLRequest, GSSENCRequest: again        │ copy_in           │ Sync, CopyDone,
       └ CancelRequest ▶ CLOSED                  ▼                   │ CopyFail
                                             COPY_IN ────────────────┤
                              error in a batch ▶ SKIPPING ───────────┘
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from tierkv.dbfront.pgwire.protocol import messages as m
from tierkv.dbfront.pgwire.protocol import replies
from tierkv.kvcore.errors import LocalProtocolError, RemoteProtocolError
from tierkv.kvcore.limits import (
    MAX_PGWIRE_FRAME_BYTES,
    MAX_PGWIRE_MESSAGE_BYTES,
    MAX_SQL_BYTES,
    MAX_STARTUP_BYTES,
)

MAX_AUTH_MESSAGE_BYTES: Final = 65_536
"""Longest message before login is complete; nobody unknown makes us hold more."""

_COMPACT_BYTES: Final = 1 << 16
_LIMITS: Final = dict.fromkeys(b"QP", MAX_SQL_BYTES + MAX_AUTH_MESSAGE_BYTES)
"""Of messages that hold SQL, and some names and types beside it."""
_SKIPPED: Final = frozenset(b"QPBFd")
"""Messages of which a too long one costs a statement and not the connection."""


class ConnectionPhase(Enum):
    """Where a connection stands."""

    STARTUP = "startup"
    AUTH = "auth"
    READY = "ready"
    COPY_IN = "copy_in"
    SKIPPING = "skipping"
    CLOSED = "closed"


_COPY = (m.CopyData, m.CopyDone, m.CopyFail)
_EXTENDED = (m.Parse, m.Bind, m.Describe, m.Execute, m.Close, m.Flush)
_ALLOWED: Final[dict[ConnectionPhase, tuple[type, ...]]] = {
    ConnectionPhase.AUTH: (m.PasswordData, m.Terminate),
    ConnectionPhase.READY: (
        m.Query,
        m.Sync,
        m.Terminate,
        m.FunctionCall,
        m.TooLong,
        *_EXTENDED,
        *_COPY,
    ),
    ConnectionPhase.SKIPPING: (
        m.Query,
        m.Sync,
        m.Terminate,
        m.FunctionCall,
        m.TooLong,
        *_EXTENDED,
        *_COPY,
    ),
    ConnectionPhase.COPY_IN: (m.Flush, m.Sync, m.Terminate, m.TooLong, *_COPY),
}


class PgConnection:
    """Frames, phases and skipping of one connection.

    Attributes:
        phase: see the picture above; mutated only by this class.
        extended: whether the message being answered belongs to the extended protocol.
    """

    def __init__(self) -> None:
        self.phase = ConnectionPhase.STARTUP
        self.extended = False
        self._buffer = bytearray()
        self._at = 0
        self._unwanted = 0  # bytes still to come of a message that is too long

    @property
    def buffered_bytes(self) -> int:
        """Bytes received and not yet turned into messages."""
        return len(self._buffer) - self._at

    @property
    def skipping(self) -> bool:
        """Whether an error made us drop messages until Sync."""
        return self.phase is ConnectionPhase.SKIPPING

    def receive_data(self, data: bytes) -> None:
        """Add what the socket gave; never fails, ``next_message`` does."""
        if self._unwanted:
            dropped = min(self._unwanted, len(data))
            self._unwanted -= dropped
            data = data[dropped:]
        self._buffer += data

    def next_message(self) -> m.FrontendMessage | m.StartupMessage | None:
        """Give the next message that matters, or None until more bytes arrive.

        While skipping after an error, everything up to Sync is dropped here; so is COPY data that
        a client was still sending when its COPY failed.

        Raises:
            RemoteProtocolError: the connection can't go on; the phase is CLOSED.
        """
        try:
            return (
                self._next_startup()
                if self.phase is ConnectionPhase.STARTUP
                else self._next_regular()
            )
        except RemoteProtocolError:
            self.phase = ConnectionPhase.CLOSED
            raise

    def sync_is_next(self) -> bool:
        """Whether the next message has arrived and is Sync: a batch of one statement."""
        return self._buffer[self._at : self._at + 1] == b"S"

    def accept_startup(self) -> None:
        """A StartupMessage was good; authentication begins."""
        self._expect(ConnectionPhase.STARTUP)
        self.phase = ConnectionPhase.AUTH

    def accept_login(self) -> None:
        """Authentication is done."""
        self._expect(ConnectionPhase.AUTH)
        self.phase = ConnectionPhase.READY

    def send_copy_in(self, columns: int, *, binary: bool = False) -> bytes:
        """Ask for COPY data."""
        self._expect(ConnectionPhase.READY)
        self.phase = ConnectionPhase.COPY_IN
        return replies.copy_in_response(columns, binary=binary)

    def end_copy_in(self) -> None:
        """All COPY data came."""
        self._expect(ConnectionPhase.COPY_IN)
        self.phase = ConnectionPhase.READY

    def fail_statement(self) -> None:
        """An error was sent; an extended batch skips to its Sync, a simple query does not."""
        if self.phase in (ConnectionPhase.READY, ConnectionPhase.COPY_IN):
            self.phase = ConnectionPhase.SKIPPING if self.extended else ConnectionPhase.READY

    def send_ready(self, status: str) -> bytes:
        """The answer to a Query or Sync is complete."""
        if self.phase not in (ConnectionPhase.READY, ConnectionPhase.SKIPPING):
            raise LocalProtocolError(f"ReadyForQuery in phase {self.phase.value}")
        self.phase = ConnectionPhase.READY
        self.extended = False
        return replies.ready_for_query(status)

    def take_buffered(self) -> bytes:
        """Give up what was received and is no message yet: somebody else reads on from here."""
        data = bytes(self._buffer[self._at :])
        self.close()
        return data

    def close(self) -> None:
        """Nothing more is read."""
        self.phase = ConnectionPhase.CLOSED
        self._buffer.clear()
        self._at = 0

    def _expect(self, phase: ConnectionPhase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"phase is {self.phase.value}, not {phase.value}")

    def _take_frame(self, *, head: int, limit: int) -> bytes | None:
        """Body of the frame whose length stands ``head`` bytes in, or None until it is whole."""
        if self.buffered_bytes < head + 4:
            return None
        at = self._at + head
        size = int.from_bytes(self._buffer[at : at + 4], "big")
        if size < 4 or size > limit:
            raise RemoteProtocolError(
                f"invalid message length {size}", detail=f"Allowed are 4 to {limit} bytes."
            )
        if self.buffered_bytes < head + size:
            return None
        body = bytes(self._buffer[at + 4 : at + size])
        self._at = at + size
        if self._at == len(self._buffer) or self._at > _COMPACT_BYTES:
            del self._buffer[: self._at]
            self._at = 0
        return body

    def _skip_frame(self, type_byte: int, limit: int) -> m.TooLong | None:
        """Drop a message that is too long without waiting for all of it; None if it is not."""
        if (
            self.buffered_bytes < 5
            or self.phase is ConnectionPhase.AUTH
            or type_byte not in _SKIPPED
        ):
            return None
        size = int.from_bytes(self._buffer[self._at + 1 : self._at + 5], "big")
        if not limit < size <= MAX_PGWIRE_FRAME_BYTES:
            return None
        here = min(size + 1, self.buffered_bytes)
        self._unwanted = size + 1 - here
        self._at += here
        if self._at == len(self._buffer) or self._at > _COMPACT_BYTES:
            del self._buffer[: self._at]
            self._at = 0
        return m.TooLong(type_byte, size, limit)

    def _next_startup(self) -> m.StartupMessage | None:
        body = self._take_frame(head=0, limit=MAX_STARTUP_BYTES)
        return None if body is None else m.parse_startup(body)

    def _next_regular(self) -> m.FrontendMessage | None:
        while self.phase is not ConnectionPhase.CLOSED and self.buffered_bytes:
            type_byte = self._buffer[self._at]
            if not m.known_type(type_byte):
                raise RemoteProtocolError(f"invalid frontend message type {type_byte}")
            limit = _LIMITS.get(type_byte, MAX_PGWIRE_MESSAGE_BYTES)
            if self.phase is ConnectionPhase.AUTH:
                limit = MAX_AUTH_MESSAGE_BYTES
            message: m.FrontendMessage | None = self._skip_frame(type_byte, limit)
            if message is None:
                body = self._take_frame(head=1, limit=limit)
                if body is None:
                    return None
                message = m.parse_message(type_byte, body)
            if self._matters(message):
                return message
        return None

    def _matters(self, message: m.FrontendMessage) -> bool:
        """Check a message against the phase; False if it is to be dropped."""
        if not isinstance(message, _ALLOWED[self.phase]):
            raise RemoteProtocolError(
                f"unexpected {type(message).__name__} message in phase {self.phase.value}"
            )
        if isinstance(message, m.Terminate):
            return True
        if self.phase is ConnectionPhase.SKIPPING:
            return isinstance(message, m.Sync)
        if self.phase is ConnectionPhase.COPY_IN:
            # PostgreSQL: Flush and Sync are ignored during COPY in; clients send them early.
            return isinstance(message, (*_COPY, m.TooLong))
        if isinstance(message, _COPY):
            return False
        if isinstance(message, _EXTENDED):
            self.extended = True
        elif isinstance(message, m.Query):
            self.extended = False
        elif isinstance(message, m.TooLong):
            self.extended = not message.simple
        return True
