"""Frames of locates: the frame types, and a connection that takes frames off a socket.

Both ends of the stream use this module: metaserver/rpc/locate_door.py and
metaserver/rpc/locate_stream.py. The head of every frame is a message of kvwire/v1/meta.proto with
its checksum, as over gRPC; there are no payloads.

    client                                     server
    HELLO  StreamHello  ------------------->   checks token and id
           <-------------------  REPLY (empty)
    LOCATE LocateRequest  ----------------->
           <-------------------  REPLY LocateReply, or REFUSED (empty): ask over gRPC

Requests may be pipelined; replies keep their order.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire.checksums import sealed, unsealed
from tierkv.kvwire.frames import HEADER_BYTES, FrameFormat, FrameHeader

_Message = TypeVar("_Message", bound=Message)

VERSION: Final = 1
MAX_HELLO_BYTES: Final = 4096
"""Longest first frame, from a peer that has not shown its token yet."""

_FIRST_BUFFER_BYTES: Final = 4096
_KEPT_BUFFER_BYTES: Final = 256 << 10
_FRAMES_IN_A_ROW: Final = 8
"""After this many frames of one connection the event loop turns to others."""


class LocateFrame(IntEnum):
    """Kind of a request or reply."""

    HELLO = 1
    LOCATE = 2
    LOCATE_MANY = 3
    REPLY = 64
    REFUSED = 65


FRAMES: Final = FrameFormat(
    "locate", b"TKVM", VERSION, LocateFrame, max_head_bytes=limits.MAX_GRPC_MESSAGE_BYTES
)
Header = FrameHeader[LocateFrame]


def message_of(raw: bytes, kind: type[_Message]) -> _Message:
    """Return the message of a head; RemoteProtocolError if the bytes are damaged."""
    whole = unsealed(raw)
    if whole is not None:
        try:
            return kind.FromString(whole)
        except DecodeError:
            pass
    raise RemoteProtocolError("a frame was damaged on its way")


class FrameBuffer:
    """Bytes as they arrive, taken off as whole frames. Sans I/O; grows to the longest frame.

    Attributes:
        _start: end of the frames that were taken.
        _end: end of the received bytes.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def space(self) -> memoryview:
        """Return the place of the next bytes; never empty after ``next`` returned None."""
        return memoryview(self._buffer)[self._end :]

    def received(self, size: int) -> None:
        """Count bytes that were written into ``space``."""
        self._end += size

    def next(self, *, most_bytes: int) -> tuple[Header, bytes] | None:
        """Take the next frame; None if it has not arrived wholly.

        Args:
            most_bytes: longest head allowed.

        Raises:
            RemoteProtocolError: the bytes are no frame. The rest of the stream is unusable.
        """
        size = HEADER_BYTES
        if self._end - self._start >= size:
            header = FRAMES.parse(self._buffer, self._start)
            if header.head_bytes > most_bytes:
                raise RemoteProtocolError(f"a frame of {header.head_bytes} bytes is too long")
            size += header.head_bytes
            if self._end - self._start >= size:
                at, self._start = self._start + HEADER_BYTES, self._start + size
                return header, bytes(memoryview(self._buffer)[at : self._start])
        self._make_room(size)
        return None

    def _make_room(self, size: int) -> None:
        """Move the rest to the front of a buffer for a frame of ``size`` bytes."""
        rest = self._buffer[self._start : self._end]
        large = len(self._buffer) > _KEPT_BUFFER_BYTES >= size
        if size > len(self._buffer) or large:
            # A new buffer: the event loop may still hold a view of the old one.
            self._buffer = bytearray(max(size, _FIRST_BUFFER_BYTES) if large else 2 * size)
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class FrameConnection(asyncio.BufferedProtocol):
    """One end of a stream of frames, in an event loop.

    A subclass takes frames in ``frame_received``. Anything else than frames ends the connection.

    Attributes:
        transport: the connection; None before and after.
        most_bytes: longest head that the peer may send now.
        is_full: the peer does not read as fast as frames are sent.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self.transport: asyncio.Transport | None = None
        self.most_bytes = most_bytes
        self.is_full = False
        self._frames = FrameBuffer()

    def frame_received(self, header: Header, head: bytes) -> None:
        """Take one frame; a RemoteProtocolError ends the connection."""
        raise NotImplementedError

    def broken(self, error: RemoteProtocolError) -> None:
        """Close the connection, because the peer broke a rule."""
        self.close()

    def may_take(self) -> bool:
        """Return False to leave frames in the buffer and on the wire until ``take_frames``."""
        return True

    def send(self, kind: LocateFrame, request_id: int, message: Message | None = None) -> None:
        """Send a frame; forgotten on a closed connection."""
        if self.transport is not None:
            head = b"" if message is None else sealed(message.SerializeToString())
            self.transport.write(FRAMES.pack(kind, request_id, head_bytes=len(head)) + head)

    def close(self) -> None:
        """Close at once; unsent bytes are lost."""
        if self.transport is not None:
            self.transport.abort()

    def take_frames(self) -> None:
        """Take the whole frames in the buffer, some at a time, then read on."""
        transport = self.transport
        if transport is None:
            return
        try:
            for _ in range(_FRAMES_IN_A_ROW):
                if not self.may_take():
                    transport.pause_reading()
                    return
                frame = self._frames.next(most_bytes=self.most_bytes)
                if frame is None:
                    transport.resume_reading()
                    return
                self.frame_received(*frame)
        except RemoteProtocolError as error:
            self.broken(error)
            return
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(self.take_frames)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a connection of bytes"
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._frames.received(nbytes)
        self.take_frames()
