"""The sans-I/O half of a PostgreSQL session: bytes in, messages out, and the protocol rules.

exchange.py and stream.py pass the received bytes in and ask for the next message. Replies that
change the phase are made by ``send_*`` methods. The module never touches a socket, a clock or SQL.

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
"""Longest message before the end of login; bounds the memory of unknown clients."""

_COMPACT_BYTES: Final = 1 << 16
_LIMITS: Final = dict.fromkeys(b"QP", MAX_SQL_BYTES + MAX_AUTH_MESSAGE_BYTES)
"""Limits of messages with SQL, and some names and types beside the SQL."""
_SKIPPED: Final = frozenset(b"QPBFd")
"""Types of messages for which excess length costs a statement, not the connection."""


class ConnectionPhase(Enum):
    """The phase of a connection."""

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
        phase: see the diagram above; mutated only by this class.
        extended: True if the current message belongs to the extended protocol.
    """

    def __init__(self) -> None:
        self.phase = ConnectionPhase.STARTUP
        self.extended = False
        self._buffer = bytearray()
        self._at = 0
        self._unwanted = 0  # remaining bytes of a message that is too long

    @property
    def buffered_bytes(self) -> int:
        """Return the number of received bytes that are not yet parsed."""
        return len(self._buffer) - self._at

    @property
    def skipping(self) -> bool:
        """Return True while an error makes the connection drop messages until Sync."""
        return self.phase is ConnectionPhase.SKIPPING

    def receive_data(self, data: bytes) -> None:
        """Add received bytes; errors are raised by ``next_message``, never here."""
        if self._unwanted:
            dropped = min(self._unwanted, len(data))
            self._unwanted -= dropped
            data = data[dropped:]
        self._buffer += data

    def next_message(self) -> m.FrontendMessage | m.StartupMessage | None:
        """Return the next relevant message, or None until more bytes arrive.

        While skipping after an error, all messages up to Sync are dropped here. COPY data that a
        client was still sending when its COPY failed is dropped too.

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
        """Return True if the next message has arrived and is Sync: a batch of one statement."""
        return self._buffer[self._at : self._at + 1] == b"S"

    def accept_startup(self) -> None:
        """Accept a StartupMessage; authentication begins."""
        self._expect(ConnectionPhase.STARTUP)
        self.phase = ConnectionPhase.AUTH

    def accept_login(self) -> None:
        """End authentication; messages are accepted from now on."""
        self._expect(ConnectionPhase.AUTH)
        self.phase = ConnectionPhase.READY

    def send_copy_in(self, columns: int, *, binary: bool = False) -> bytes:
        """Ask for COPY data."""
        self._expect(ConnectionPhase.READY)
        self.phase = ConnectionPhase.COPY_IN
        return replies.copy_in_response(columns, binary=binary)

    def end_copy_in(self) -> None:
        """End COPY after all data has arrived."""
        self._expect(ConnectionPhase.COPY_IN)
        self.phase = ConnectionPhase.READY

    def fail_statement(self) -> None:
        """Note a sent error; an extended batch skips to its Sync, a simple query does not."""
        if self.phase in (ConnectionPhase.READY, ConnectionPhase.COPY_IN):
            self.phase = ConnectionPhase.SKIPPING if self.extended else ConnectionPhase.READY

    def send_ready(self, status: str) -> bytes:
        """Complete the answer to a Query or Sync."""
        if self.phase not in (ConnectionPhase.READY, ConnectionPhase.SKIPPING):
            raise LocalProtocolError(f"ReadyForQuery in phase {self.phase.value}")
        self.phase = ConnectionPhase.READY
        self.extended = False
        return replies.ready_for_query(status)

    def take_buffered(self) -> bytes:
        """Close the connection and return the unparsed bytes for another reader."""
        data = bytes(self._buffer[self._at :])
        self.close()
        return data

    def close(self) -> None:
        """Stop reading and drop unparsed bytes."""
        self.phase = ConnectionPhase.CLOSED
        self._buffer.clear()
        self._at = 0

    def _expect(self, phase: ConnectionPhase) -> None:
        if self.phase is not phase:
            raise LocalProtocolError(f"phase is {self.phase.value}, not {phase.value}")

    def _take_frame(self, *, head: int, limit: int) -> bytes | None:
        """Return the frame's body, or None until complete; the length is after ``head`` bytes."""
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
        """Drop a message of excess size, without waiting for its end; None for an allowed size."""
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
        """Check a message against the phase; return False if the message must be dropped."""
        if not isinstance(message, _ALLOWED[self.phase]):
            raise RemoteProtocolError(
                f"unexpected {type(message).__name__} message in phase {self.phase.value}"
            )
        if isinstance(message, m.Terminate):
            return True
        if self.phase is ConnectionPhase.SKIPPING:
            return isinstance(message, m.Sync)
        if self.phase is ConnectionPhase.COPY_IN:
            # As in PostgreSQL, Flush and Sync are ignored during COPY in; clients send both early.
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
