"""Who owes whom an answer: the books of one relayed connection, without I/O.

The relay passes bytes in whole chunks and only hops over frame headers. What this class counts is
what it must know before it may say something of its own: that PostgreSQL has answered everything
the client said, and in which transaction state it is.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final

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
