"""Counts the unanswered messages of both sides of a relayed connection, without I/O.

The relay passes bytes in whole chunks and reads only frame headers. ``Conversation`` counts
unanswered messages: before the relay sends messages itself, PostgreSQL must have answered all
messages of the client, and the transaction state must be known. ``ClientFrames`` cuts the client's
bytes at the messages in need of attention; a frame boundary is never guessed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError

LENGTH: Final[Callable[[bytes, int], tuple[int]]] = struct.Struct("!I").unpack_from

_DATA_ROW: Final = ord("D")
_COPY_DATA: Final = ord("d")
_READY: Final = ord("Z")
_PARAMETER: Final = ord("S")
_ERROR: Final = ord("E")
_COPY_STARTS: Final = frozenset(b"GW")
_WITH_BODY: Final = frozenset(b"ZS")
_ANSWERS: Final = frozenset(b"123TnCsI")
"""Messages that end the answer to an extended-protocol message; one per message."""

_ASKS: Final = frozenset(b"PBCDE")
_SYNC: Final = ord("S")
_ENDS: Final = frozenset(b"QSF")
"""Messages that ReadyForQuery answers."""

_COPY_ENDS: Final = frozenset(b"cf")


class Conversation:
    """Counts both directions.

    Attributes:
        status: status of the last ReadyForQuery: ``I``, ``T`` or ``E``.
        parameters: settings as last reported by PostgreSQL.
        sent: number of the client's messages of the extended protocol.
        answered: number of sent messages that were answered.
        failed: an error arrived after the last ReadyForQuery.
        skipping: the error was in a batch: PostgreSQL ignores all messages up to the next Sync.
    """

    def __init__(self) -> None:
        self.status = "I"
        self.parameters: dict[str, str] = {}
        self.sent = 0
        self.answered = 0
        self.failed = self.skipping = False
        self._last_end = 0
        self._ends: deque[tuple[int, int]] = deque()  # kind, and ``sent`` at this message
        self._copying_in = False
        self._skip = 0
        self._carry = b""

    @property
    def waits_for_ready(self) -> bool:
        """Return True if a ReadyForQuery is outstanding."""
        return bool(self._ends)

    @property
    def in_batch(self) -> bool:
        """Return True if the client has an open batch of the extended protocol."""
        return self.sent > self._last_end

    @property
    def copying_in(self) -> bool:
        """Return True if PostgreSQL waits for COPY data of the client."""
        return self._copying_in

    @property
    def between_frames(self) -> bool:
        """Return True if PostgreSQL's bytes so far end at the end of a frame."""
        return self._skip == 0 and not self._carry

    @property
    def settled(self) -> bool:
        """Return True if everything is answered, and PostgreSQL can send only notifications."""
        return (
            not self._ends
            and (self.failed or self.answered >= self.sent)
            and not self._copying_in
            and self.between_frames
        )

    def client_frame(self, kind: int) -> None:
        """Count a message to PostgreSQL."""
        if kind in _ASKS:
            self.sent += 1
        elif kind in _ENDS and (kind == _SYNC or not self.skipping):
            # During COPY from the client PostgreSQL ignores Sync, which clients send early.
            if not (kind == _SYNC and self._copying_in):
                self._ends.append((kind, self.sent))
                self._last_end = self.sent
        elif kind in _COPY_ENDS:
            self._copying_in = False

    def server_data(self, data: bytes) -> None:
        """Count the frames in PostgreSQL's bytes; the bytes need not end at the end of a frame."""
        if self._carry:
            data = self._carry + data
            self._carry = b""
        at, end = self._skip, len(data)
        while at + 5 <= end:
            kind = data[at]
            following = at + 1 + LENGTH(data, at + 1)[0]
            if kind != _DATA_ROW and kind != _COPY_DATA:
                if following > end and kind in _WITH_BODY:
                    break
                self._answer(kind, data, at)
            at = following
        if at < end:
            self._carry = data[at:]
            self._skip = 0
        else:
            self._skip = at - end

    def _answer(self, kind: int, data: bytes, at: int) -> None:
        if kind in _ANSWERS:
            self.answered += 1
        elif kind == _READY:
            self.status = chr(data[at + 5])
            self.failed = self.skipping = self._copying_in = False
            if self._ends:
                self.answered = self._ends.popleft()[1]
        elif kind == _ERROR:
            self.failed, self._copying_in = True, False
            self.skipping |= self.answered < (self._ends[0][1] if self._ends else self.sent)
            while self.skipping and self._ends and self._ends[0][0] != _SYNC:
                self._ends.popleft()
        elif kind in _COPY_STARTS:
            self._copying_in = True
            while self._ends and self._ends[0][0] == _SYNC:
                self._ends.popleft()
        elif kind == _PARAMETER:
            end = at + 1 + LENGTH(data, at + 1)[0]
            name, value = data[at + 5 : end].split(b"\0")[:2]
            self.parameters[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")


_TEXTS: Final = frozenset(b"QP")
_NAMED: Final = frozenset(b"QPBECD")
_KNOWN: Final = frozenset(b"QPBECDSHXFdcfp")
_LONGEST_HELD: Final = limits.MAX_SQL_BYTES
"""Longer messages are passed on unread: no statement this long may have AI calls."""


class ChunkCut(NamedTuple):
    """The result of ``ClientFrames.feed`` for a chunk.

    Attributes:
        passed: bytes for PostgreSQL, possibly ending inside a message.
        message: a whole message that needs attention; follows ``passed``.
    """

    passed: bytes
    message: bytes | None


class ClientFrames:
    """Frames of one client, counted by the conversation when they are passed on.

    Attributes:
        names_matter: a prepared statement or portal has AI calls; messages with names of statements
            or portals are then returned too.
    """

    def __init__(self, conversation: Conversation, matters: Callable[[bytes], bool]) -> None:
        """Begin after the startup.

        Args:
            conversation: counts every message in ``passed``, but not the returned messages.
            matters: returns True if a whole message needs attention; called for statements, and for
                all messages with names while ``names_matter``.
        """
        self.names_matter = False
        self._conversation = conversation
        self._matters = matters
        self._rest = b""
        self._later: list[bytes] = []  # bytes after _rest, while a long message is incomplete
        self._skip = self._missing = 0

    @property
    def held(self) -> int:
        """Return the number of received bytes that are neither passed on nor returned."""
        return len(self._rest) + sum(map(len, self._later))

    def feed(self, data: bytes) -> ChunkCut:
        """Add a chunk (or none, to continue after a message); return the bytes to pass on.

        Raises:
            RemoteProtocolError: unknown message type, or impossible length.
        """
        if self._missing > len(data) > 0:
            self._missing -= len(data)
            self._later.append(data)
            return ChunkCut(b"", None)
        if self._rest or self._later:
            data = self._taken() + data
        at, end = self._skip, len(data)
        held_kinds = _NAMED if self.names_matter else _TEXTS
        conversation = self._conversation
        while at + 5 <= end:
            kind = data[at]
            size = LENGTH(data, at + 1)[0]
            following = at + 1 + size
            if size < 4 or kind not in _KNOWN:
                raise RemoteProtocolError(f"invalid frontend message {chr(kind)!r} of {size} bytes")
            if kind in held_kinds and size <= _LONGEST_HELD:
                if following > end:
                    self._missing = following - end
                    break
                if self._matters(data[at:following]):
                    self._rest, self._skip = data[following:], 0
                    return ChunkCut(data[:at], data[at:following])
            if kind in _ASKS:
                conversation.sent += 1
            else:
                conversation.client_frame(kind)
            at = following
        if at < end:
            self._rest, self._skip = data[at:], 0
            return ChunkCut(data[:at], None)
        self._skip = at - end
        return ChunkCut(data, None)

    def _taken(self) -> bytes:
        """Take all stored bytes."""
        data = b"".join((self._rest, *self._later)) if self._later else self._rest
        self._rest, self._missing = b"", 0
        self._later.clear()
        return data

    def next_message(self) -> bytes | None:
        """Return the next whole message of any type; None until ``add`` brings more bytes.

        Raises:
            RemoteProtocolError: as ``feed``, or the message is too long.
        """
        if len(self._rest) < 5:
            return None
        size = LENGTH(self._rest, 1)[0]
        if self._rest[0] not in _KNOWN or not 4 <= size <= limits.MAX_PGWIRE_MESSAGE_BYTES:
            raise RemoteProtocolError(f"invalid frontend message of {size} bytes")
        if len(self._rest) < 1 + size:
            return None
        message, self._rest = self._rest[: 1 + size], self._rest[1 + size :]
        return message

    def add(self, data: bytes) -> None:
        """Store bytes for ``next_message``."""
        self._rest = self._taken() + data
