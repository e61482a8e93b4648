"""The data-plane frame, and the server's side of a stream of frames.

The frame is that of kvwire/frames.py with magic "TKVD" and the types below. Heads are messages
(dmp/wire/messages.py and dmp/wire/range_codec.py), payloads are KV bytes. Control operations
(reserve, seal, lookup) also use this protocol and not gRPC: a round trip costs a fifth, and the
control operations and bytes of one connection have one order of events. A frame names
(incarnation, segment, slot, generation), never an address; the server checks all four against its
own slot table.

Nodes and clients of neighbouring releases work together. A message never changes; what is new has
a frame type of its own, and a client does without if the node does not know the type. The version
changes only with the frame itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from tierkv.dmp.wire.range_codec import ONE_RANGE_BYTES, Ref, unpack_one
from tierkv.dmp.wire.socket_io import Wire, discard
from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire import frames as kvwire_frames
from tierkv.kvwire.frames import HEADER_BYTES, FrameFormat

MAGIC: Final = b"TKVD"
PROTOCOL_VERSION: Final = 3
MAX_HEAD_BYTES: Final = 4 << 20
"""Room for limits.MAX_FRAME_ITEMS references or reservations; long seals are sent in parts."""

MAX_HELLO_BYTES: Final = 4096
"""Longest head of a peer that has not shown its token yet."""


_AHEAD_BYTES: Final = 4096


class FrameType(IntEnum):
    """Kind of a request or reply."""

    HELLO = 1
    LOOKUP = 2
    RESERVE = 3
    WRITE = 4
    SEAL = 5
    ABORT = 6
    READ = 7
    HOLD = 8
    RELEASE = 9
    TOUCH = 10
    SUSPECT = 11
    STATS = 12
    PUT = 13
    PROMOTE = 14
    DESCRIBE = 24
    ABOUT = 25
    ERASE = 26
    RDMA_OFFER = 16
    RDMA_CONNECT = 17
    REPLY = 64
    ERROR = 65


AHEAD: Final = 1 << 31
"""Set in the request id of a READ for which nobody waits yet: other transfers go first. Nodes of
older releases do not look at it."""


MOVES: Final = 1 << 30
"""Set in the request ids of a client that moves blocks between nodes: all others go first."""


def is_moving(request_id: int) -> bool:
    """Return whether a request moves blocks between nodes."""
    return bool(request_id & MOVES)


def is_ahead(request_id: int) -> bool:
    """Return whether a request is one for which nobody waits yet."""
    return bool(request_id & AHEAD)


_FRAMES: Final = FrameFormat(
    "data-plane",
    MAGIC,
    PROTOCOL_VERSION,
    FrameType,
    max_head_bytes=MAX_HEAD_BYTES,
    max_payload_bytes=limits.MAX_FRAME_BYTES,
    carries_payload=frozenset({FrameType.WRITE, FrameType.PUT, FrameType.REPLY}),
)
FrameHeader = kvwire_frames.FrameHeader[FrameType]
pack_header = _FRAMES.pack


def parse_header(
    raw: bytes | bytearray | memoryview, offset: int = 0, *, trusted: bool = True
) -> FrameHeader:
    """Check and unpack a frame header.

    Args:
        raw: the header, and any further bytes that have arrived.
        offset: where the HEADER_BYTES begin in ``raw``.
        trusted: whether the peer has shown its token; an untrusted peer may only send a short
            HELLO.

    Raises:
        RemoteProtocolError: wrong magic, version or type, or a size out of bounds. The rest of the
            stream is unusable.
    """
    header = _FRAMES.parse(raw, offset)
    if not trusted and (header.type is not FrameType.HELLO or header.head_bytes > MAX_HELLO_BYTES):
        raise RemoteProtocolError("the first frame must be a short HELLO")
    return header


class FrameReader:
    """Frames from a wire, each with a deadline from its first byte, or for HELLO from the start.

    One system call reads header and head together into a small buffer that reads ahead. Payload
    bytes in the buffer are copied to their destination; the socket writes all further bytes
    straight to the destination. Payload bytes that were not taken are skipped before the next
    frame.

    Attributes:
        left: payload bytes of the current frame that were not taken yet.
        trusted: whether the peer may send other frames than HELLO.
    """

    def __init__(self, wire: Wire) -> None:
        self.left = 0
        self.trusted = False
        self._wire = wire
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        self._start = 0
        self._end = 0
        self._began = time.monotonic()

    def next(self) -> FrameHeader | None:
        """Wait for a frame's header; None when the peer left between two frames.

        A trusted peer may be silent for any time.

        Raises:
            RemoteProtocolError: the bytes are no header.
            OSError, EOFError: the peer is too slow or gone.
        """
        if self.left:
            self.skip()
        if self._start == self._end and not self._wait():
            return None
        if self.trusted:
            self._began = time.monotonic()
        if self._end - self._start < HEADER_BYTES:
            self._compact(HEADER_BYTES)
        header = parse_header(self._buffer, self._start, trusted=self.trusted)
        self._start += HEADER_BYTES
        self.left = header.payload_bytes
        return header

    def one_range(self, header: FrameHeader) -> Ref | None:
        """Take the head of a single-range READ in place; None if not single or not here yet."""
        start = self._start
        if header.head_bytes != ONE_RANGE_BYTES or self._end - start < ONE_RANGE_BYTES:
            return None
        self._start = start + ONE_RANGE_BYTES
        return unpack_one(self._buffer, start)

    def head(self, header: FrameHeader) -> bytearray:
        """Take the head that follows a header."""
        size = header.head_bytes
        stop = self._start + size
        if stop <= self._end:
            data = bytearray(self._buffer[self._start : stop])
            self._start = stop
            return data
        data = bytearray(size)
        with memoryview(data) as view:
            self._fill(view)
        return data

    def take(self, views: Sequence[memoryview]) -> None:
        """Fill views with the next payload bytes; the caller asks for no more than ``left``."""
        self.left -= sum(map(len, views))
        assert self.left >= 0, "more payload asked for than there is"
        rest: list[memoryview] = []
        for view in views:
            caught = min(len(view), self._end - self._start)
            if caught:
                view[:caught] = self._buffer[self._start : self._start + caught]
                self._start += caught
            if caught < len(view):
                rest.append(view[caught:] if caught else view)
        if rest:
            self._wire.receive_all(rest, began=self._began)

    def skip(self, size: int | None = None) -> None:
        """Read and forget ``size`` payload bytes, or all remaining bytes."""
        size = self.left if size is None else size
        self.left -= size
        caught = min(size, self._end - self._start)
        self._start += caught
        if size > caught:
            discard(self._wire, size - caught, began=self._began)

    def _wait(self) -> bool:
        while True:
            try:
                count = self._wire.receive_some(self._buffer)
            except TimeoutError:
                if not self.trusted:
                    raise
                continue
            self._start, self._end = 0, count
            return count > 0

    def _compact(self, size: int) -> None:
        """Move the unread bytes to the front of the buffer, and read on up to ``size`` bytes."""
        have = self._end - self._start
        self._buffer[:have] = bytes(self._buffer[self._start : self._end])
        self._wire.receive_into(self._buffer[have:size], began=self._began)
        self._start, self._end = 0, size

    def _fill(self, view: memoryview) -> None:
        have = self._end - self._start
        view[:have] = self._buffer[self._start : self._end]
        self._start = self._end
        self._wire.receive_into(view[have:], began=self._began)
