"""The frame of our TCP streams: a fixed header, a head, then raw payload bytes.

    offset  0  magic, 4 bytes
            4  u8     version of the stream's protocol
            5  u8     frame type
            6  u16    flags, 0
            8  u32    request id; repeated in the reply
           12  u32    head bytes     (a message)
           16  u32    payload bytes  (never parsed)

Little-endian. Sans I/O: dmp/wire/frame.py and metaserver/rpc/locate_frames.py name the magic, the
frame types and the bounds of their streams.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Generic, NamedTuple, TypeVar

from tierkv.kvcore.errors import RemoteProtocolError

Kind = TypeVar("Kind", bound=IntEnum)

HEADER: Final = struct.Struct("<4sBBHIII")
HEADER_BYTES: Final = HEADER.size


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
