"""The frame of our TCP streams: a fixed header, a head, then raw payload bytes.

    offset  0  magic, 4 bytes
            4  u8     version of the stream's protocol
            5  u8     frame type
            6  u16    flags, 0
            8  u32    request id; repeated in the reply
           12  u32    head bytes     (a message)
           16  u32    payload bytes  (never parsed)

Little-endian. dmp/wire/frame.py and metaserver/rpc/locate_stream.py name the magic, the frame types
and the bounds of their streams. ``FrameConnection`` is for frames of an event loop; the data plane
has threads and moves its payloads straight between socket and memory (dmp/wire/socket_io.py).
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Generic, NamedTuple, TypeVar

from tierkv.kvcore.errors import RemoteProtocolError

Kind = TypeVar("Kind", bound=IntEnum)

HEADER: Final = struct.Struct("<4sBBHIII")
HEADER_BYTES: Final = HEADER.size
_FIRST_BUFFER_BYTES: Final = 4096
_KEPT_BUFFER_BYTES: Final = 256 << 10
_FRAMES_IN_A_ROW: Final = 8
"""After this many frames of one connection the event loop turns to others."""


class FrameHeader(NamedTuple, Generic[Kind]):
    """A parsed frame header; the sizes are within bounds."""

    type: Kind
    request_id: int
    head_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class FrameFormat(Generic[Kind]):
    """The frames of one stream protocol.

    Attributes:
        name: name of the stream in errors.
        magic: first bytes of every frame.
        version: version of the protocol.
        kinds: frame types.
        carries_payload: types with a payload.
        max_head_bytes: longest head.
        max_payload_bytes: longest payload.
    """

    name: str
    magic: bytes
    version: int
    kinds: type[Kind]
    max_head_bytes: int
    max_payload_bytes: int = 0
    carries_payload: frozenset[Kind] = frozenset()
    _by_number: dict[int, Kind] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_number", {int(kind): kind for kind in self.kinds})

    def pack(
        self, kind: Kind, request_id: int, *, head_bytes: int, payload_bytes: int = 0
    ) -> bytes:
        """Return the header of a frame."""
        request_id &= 0xFFFFFFFF
        return HEADER.pack(self.magic, self.version, kind, 0, request_id, head_bytes, payload_bytes)

    def parse(self, raw: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader[Kind]:
        """Check and unpack the header at ``offset`` of ``raw``.

        Raises:
            RemoteProtocolError: wrong magic, version or type, or a size out of bounds. The rest of
                the stream is unusable.
        """
        magic, version, number, flags, request_id, head_bytes, payload_bytes = HEADER.unpack_from(
            raw, offset
        )
        if magic != self.magic:
            raise RemoteProtocolError(f"not a TierKV {self.name} frame")
        if version != self.version:
            raise RemoteProtocolError(
                f"peer speaks {self.name} version {version}, this one {self.version}"
            )
        kind = self._by_number.get(number)
        if kind is None:
            raise RemoteProtocolError(f"unknown frame type {number}")
        if flags:
            raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
        if head_bytes > self.max_head_bytes or payload_bytes > self.max_payload_bytes:
            raise RemoteProtocolError(
                f"a frame of {head_bytes} + {payload_bytes} bytes is too long"
            )
        if payload_bytes and kind not in self.carries_payload:
            raise RemoteProtocolError(f"a {kind.name} frame carries no payload")
        return FrameHeader(kind, request_id, head_bytes, payload_bytes)


class FrameBuffer(Generic[Kind]):
    """Bytes as they arrive, taken off as whole frames. Sans I/O; grows to the longest frame.

    Attributes:
        _start: end of the frames that were taken.
        _end: end of the received bytes.
    """

    def __init__(self, frames: FrameFormat[Kind]) -> None:
        self._format = frames
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._start = 0
        self._end = 0

    def space(self) -> memoryview:
        """Return the place of the next bytes; never empty after ``next`` returned None."""
        return memoryview(self._buffer)[self._end :]

    def received(self, size: int) -> None:
        """Count bytes that were written into ``space``."""
        self._end += size

    def next(self, *, most_bytes: int) -> tuple[FrameHeader[Kind], bytes] | None:
        """Take the next frame; None if it has not arrived wholly.

        Args:
            most_bytes: longest head allowed.

        Raises:
            RemoteProtocolError: the bytes are no frame. The rest of the stream is unusable.
        """
        size = HEADER_BYTES
        if self._end - self._start >= size:
            header = self._format.parse(self._buffer, self._start)
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
        if self._start == 0 and self._end and size <= len(self._buffer):
            return
        rest = self._buffer[self._start : self._end]
        large = len(self._buffer) > _KEPT_BUFFER_BYTES >= size
        if size > len(self._buffer) or large:
            # A new buffer: the event loop may still hold a view of the old one.
            self._buffer = bytearray(max(size, _FIRST_BUFFER_BYTES) if large else 2 * size)
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class FrameConnection(asyncio.BufferedProtocol, Generic[Kind]):
    """One end of a stream of frames, in an event loop.

    A subclass takes frames in ``frame_received``. Anything else than frames ends the connection.

    Attributes:
        transport: the connection; None before and after.
        most_bytes: longest head that the peer may send now.
        is_full: the peer does not read as fast as frames are sent.
    """

    def __init__(self, frames: FrameFormat[Kind], *, most_bytes: int) -> None:
        self.transport: asyncio.Transport | None = None
        self.most_bytes = most_bytes
        self.is_full = False
        self._format = frames
        self._received = FrameBuffer(frames)

    def frame_received(self, header: FrameHeader[Kind], head: bytes) -> None:
        """Take one frame; a RemoteProtocolError ends the connection."""
        raise NotImplementedError

    def broken(self, error: RemoteProtocolError) -> None:
        """Close the connection, because the peer broke a rule."""
        self.close()

    def may_take(self) -> bool:
        """Return False to leave frames in the buffer and on the wire until ``take_frames``."""
        return True

    def send(self, kind: Kind, request_id: int, head: bytes = b"") -> None:
        """Send a frame; forgotten on a closed connection."""
        if self.transport is not None:
            lead = self._format.pack(kind, request_id, head_bytes=len(head))
            self.transport.write(lead + head)

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
                frame = self._received.next(most_bytes=self.most_bytes)
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
        return self._received.space()

    def buffer_updated(self, nbytes: int) -> None:
        self._received.received(nbytes)
        self.take_frames()
