"""The server's side of a stream of frames: one system call reads header and head together.

Used by dmp/server/client_connection.py, one reader per connection. A small buffer reads ahead.
Payload bytes in the buffer are copied to their destination; the socket writes all further bytes
straight to the destination. Payload bytes that were not taken are skipped before the next frame.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tierkv.dmp.wire.frame import FrameHeader, parse_header
from tierkv.dmp.wire.range_codec import ONE_RANGE_BYTES, Ref, unpack_one
from tierkv.dmp.wire.socket_io import Wire, discard
from tierkv.kvwire.frames import HEADER_BYTES

_AHEAD_BYTES: Final = 4096


class FrameReader:
    """Frames from a wire, each with a deadline from its first byte, or for HELLO from the start.

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
