"""Cutting what a client sends at the messages the relay must look at, without I/O.

Everything else is given back in whole chunks, to be passed on as it came. A message that may matter
is held until it is whole; a frame boundary is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tierkv.dbfront.postgres.wire.conversation import LENGTH, Conversation
from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError

_TEXTS: Final = frozenset(b"QP")
_NAMED: Final = frozenset(b"QPBECD")
_KNOWN: Final = frozenset(b"QPBECDSHXFdcfp")
_LONGEST_HELD: Final = limits.MAX_SQL_BYTES
"""Longer messages are passed on unread: no statement of that length has AI calls we would run."""


class Cut(NamedTuple):
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

    def feed(self, data: bytes) -> Cut:
        """Take a chunk (or none, to go on after a message) and say what to do with it.

        Raises:
            RemoteProtocolError: no such message exists, or its length is impossible.
        """
        if self._missing > len(data) > 0:
            self._missing -= len(data)
            self._later.append(data)
            return Cut(b"", None)
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
                    return Cut(data[:at], data[at:following])
            self._conversation.client_frame(kind)
            at = following
        if at < end:
            self._rest, self._skip = data[at:], 0
            return Cut(data[:at], None)
        self._skip = at - end
        return Cut(data, None)

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
