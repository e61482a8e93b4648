"""The data-plane frame: the frame of kvwire/frames.py with magic "TKVD" and the types below.

Heads are messages (dmp/wire/messages.py and dmp/wire/range_codec.py), payloads are KV bytes. Sans
I/O: dmp/server/server.py and dmp/transport/connection.py own the sockets. Control operations
(reserve, seal, lookup) also use this protocol and not gRPC: a round trip costs a fifth, and the
control operations and bytes of one connection have one order of events. A frame names
(incarnation, segment, slot, generation), never an address; the server checks all four against its
own slot table.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire import frames as kvwire_frames
from tierkv.kvwire.frames import FrameFormat

MAGIC: Final = b"TKVD"
PROTOCOL_VERSION: Final = 3
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
