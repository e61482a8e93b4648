"""What both sides of one relayed connection still owe each other, without I/O.

The relay passes bytes in whole chunks and reads only frame headers. ``Conversation`` counts
unanswered messages: before the relay speaks for itself, PostgreSQL must have answered everything
the client sent, and the transaction state must be known. ``ClientFrames`` cuts the client's bytes
at the messages that must be looked at; a frame boundary is never guessed.
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
"""What ends the answer to a message of the extended protocol; one each."""

_ASKS: Final = frozenset(b"PBCDE")
_SYNC: Final = ord("S")
_ENDS: Final = frozenset(b"QSF")
"""Messages that ReadyForQuery answers."""

_COPY_ENDS: Final = frozenset(b"cf")


class Conversation:
    """Counts both directions.

    Attributes:
        status: of the last ReadyForQuery: ``I``, ``T`` or ``E``.
        parameters: what PostgreSQL last reported of its settings.
        sent: messages of the extended protocol that the client sent.
        answered: how many of them were answered.
        failed: an error came since the last ReadyForQuery.
        skipping: it was in a batch: PostgreSQL reads nothing but the next Sync.
    """

    def __init__(self) -> None:
        self.status = "I"
        self.parameters: dict[str, str] = {}
        self.sent = 0
        self.answered = 0
        self.failed = self.skipping = False
        self._last_end = 0
        self._ends: deque[tuple[int, int]] = deque()  # kind, value of ``sent`` at that message
        self._copying_in = False
        self._skip = 0
        self._carry = b""

    @property
    def waits_for_ready(self) -> bool:
        """Whether a ReadyForQuery is still to come."""
        return bool(self._ends)

    @property
    def in_batch(self) -> bool:
        """Whether the client has begun a batch of the extended protocol and not ended it."""
        return self.sent > self._last_end

    @property
    def copying_in(self) -> bool:
        """Whether PostgreSQL waits for COPY data of the client."""
        return self._copying_in

    @property
    def between_frames(self) -> bool:
        """Whether what PostgreSQL sent so far ends at the end of a frame."""
        return self._skip == 0 and not self._carry

    @property
    def settled(self) -> bool:
        """Whether everything was answered; nothing of PostgreSQL's is to come but notifications."""
        return (
            not self._ends
            and (self.failed or self.answered >= self.sent)
            and not self._copying_in
            and self.between_frames
        )

    def client_frame(self, kind: int) -> None:
        """Note a message that goes to PostgreSQL."""
        if kind in _ASKS:
            self.sent += 1
        elif kind in _ENDS and (kind == _SYNC or not self.skipping):
            # In COPY from the client PostgreSQL ignores Sync, which clients send early.
            if not (kind == _SYNC and self._copying_in):
                self._ends.append((kind, self.sent))
                self._last_end = self.sent
        elif kind in _COPY_ENDS:
            self._copying_in = False

    def server_data(self, data: bytes) -> None:
        """Note bytes that PostgreSQL sent; they need not end at the end of a frame."""
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
"""Longer messages are passed on unread: no statement of that length has AI calls we would run."""


class ChunkCut(NamedTuple):
    """What a chunk came to.

    Attributes:
        passed: bytes for PostgreSQL, possibly ending inside a message.
        message: a whole message that must be looked at; it follows ``passed``.
    """

    passed: bytes
    message: bytes | None


class ClientFrames:
    """Frames of one client, told to the conversation's books as they are passed on.

    Attributes:
        names_matter: a prepared statement or portal has AI calls, so messages that name one are
            given out too.
    """

    def __init__(self, conversation: Conversation, matters: Callable[[bytes], bool]) -> None:
        """Begin after the startup.

        Args:
            conversation: told of every message in ``passed``; not of those given out.
            matters: says whether a whole message must be looked at; asked for statements, and for
                all messages with names while ``names_matter``.
        """
        self.names_matter = False
        self._conversation = conversation
        self._matters = matters
        self._rest = b""
        self._later: list[bytes] = []  # what follows _rest, while a long message is incomplete
        self._skip = self._missing = 0

    @property
    def held(self) -> int:
        """Bytes that arrived and were not given out."""
        return len(self._rest) + sum(map(len, self._later))

    def feed(self, data: bytes) -> ChunkCut:
        """Take a chunk (or none, to go on after a message) and say what to do with it.

        Raises:
            RemoteProtocolError: no such message exists, or its length is impossible.
        """
        if self._missing > len(data) > 0:
            self._missing -= len(data)
            self._later.append(data)
            return ChunkCut(b"", None)
        data = self._taken() + data
        at, end = self._skip, len(data)
        held_kinds = _NAMED if self.names_matter else _TEXTS
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
            self._conversation.client_frame(kind)
            at = following
        if at < end:
            self._rest, self._skip = data[at:], 0
            return ChunkCut(data[:at], None)
        self._skip = at - end
        return ChunkCut(data, None)

    def _taken(self) -> bytes:
        """Give all that was kept, and keep nothing."""
        data = b"".join((self._rest, *self._later)) if self._later else self._rest
        self._rest, self._missing = b"", 0
        self._later.clear()
        return data

    def next_message(self) -> bytes | None:
        """Give the next whole message whatever it is; None until more arrives by ``add``.

        Raises:
            RemoteProtocolError: as ``feed``, or the message is too long to be held.
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
        """Keep bytes for ``next_message``."""
        self._rest = self._taken() + data
