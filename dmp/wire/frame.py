"""The data-plane frame: a fixed header, a packed head, then raw payload bytes.

    offset  0  magic  "TKVD"
            4  u8     protocol version
            5  u8     frame type (FrameType)
            6  u16    flags, 0
            8  u32    request id; repeated in the reply
           12  u32    head bytes     (a message, dmp/wire/messages.py and dmp/wire/range_codec.py)
           16  u32    payload bytes  (KV bytes, never parsed)

Little-endian. Sans I/O: dmp/server/server.py and dmp/transport/connection.py own the sockets.
Control operations (reserve, seal, lookup) also use this protocol and not gRPC: a round trip costs a
fifth, and the control operations and bytes of one connection have one order of events. A frame
names (incarnation, segment, slot, generation), never an address; the server checks all four against
its own slot table.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError

MAGIC: Final = b"TKVD"
PROTOCOL_VERSION: Final = 3
HEADER: Final = struct.Struct("<4sBBHIII")
HEADER_BYTES: Final = HEADER.size
MAX_HEAD_BYTES: Final = 4 << 20
"""Room for limits.MAX_FRAME_ITEMS references or reservations; long seals are sent in parts."""

MAX_HELLO_BYTES: Final = 4096
"""Longest head of a peer that has not shown its token yet."""


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
    RDMA_OFFER = 16
    RDMA_CONNECT = 17
    REPLY = 64
    ERROR = 65


_TYPES: Final = {int(kind): kind for kind in FrameType}
CARRIES_PAYLOAD: Final = frozenset({FrameType.WRITE, FrameType.PUT, FrameType.REPLY})


class FrameHeader(NamedTuple):
    """A parsed frame header; the sizes are within bounds."""

    type: FrameType
    request_id: int
    head_bytes: int
    payload_bytes: int


def pack_header(
    kind: FrameType, request_id: int, *, head_bytes: int, payload_bytes: int = 0
) -> bytes:
    """Return the header of a frame."""
    return HEADER.pack(
        MAGIC, PROTOCOL_VERSION, kind, 0, request_id & 0xFFFFFFFF, head_bytes, payload_bytes
    )


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
    magic, version, kind, flags, request_id, head_bytes, payload_bytes = HEADER.unpack_from(
        raw, offset
    )
    if magic != MAGIC:
        raise RemoteProtocolError("not a TierKV data-plane frame")
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"peer speaks data-plane version {version}, this one {PROTOCOL_VERSION}"
        )
    frame_type = _TYPES.get(kind)
    if frame_type is None:
        raise RemoteProtocolError(f"unknown frame type {kind}")
    if flags:
        raise RemoteProtocolError(f"unknown frame flags {flags:#x}")
    if head_bytes > MAX_HEAD_BYTES or payload_bytes > limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {head_bytes} + {payload_bytes} bytes is too long")
    if payload_bytes and frame_type not in CARRIES_PAYLOAD:
        raise RemoteProtocolError(f"a {frame_type.name} frame carries no payload")
    if not trusted and (frame_type is not FrameType.HELLO or head_bytes > MAX_HELLO_BYTES):
        raise RemoteProtocolError("the first frame must be a short HELLO")
    return FrameHeader(frame_type, request_id, head_bytes, payload_bytes)
