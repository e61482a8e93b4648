"""The head of an entropy-coded range: a description of the bytes, checked before use.

Written and read by compute/codec/entropy.py; pure. A frame holds a layer of a block, so layers
still move alone. Every fault in a head is a LayoutError, which means "miss".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from tierkv.kvcore.errors import LayoutError
from tierkv.kvcore.layout import FRAME_HEAD_BYTES, KvCodec

_MAGIC = b"KQ"
_VERSION = 1
_HEAD = struct.Struct("<2sBBIII")
assert _HEAD.size == FRAME_HEAD_BYTES


class CodecLevel(IntEnum):
    """Coarseness of the values of a frame; the enum value is the byte in the frame's head."""

    FINE = 0
    MEDIUM = 1
    COARSE = 2
    RAW = 255
    """Unencoded values: coding would have made the range longer."""


LEVELS = {
    KvCodec.ENTROPY_FINE: CodecLevel.FINE,
    KvCodec.ENTROPY_MEDIUM: CodecLevel.MEDIUM,
    KvCodec.ENTROPY_COARSE: CodecLevel.COARSE,
}
"""The level of each codec with a single level; ``adaptive`` has two (compute/tiers/block_puts.py).
"""


def coarsest_of(codec: KvCodec) -> CodecLevel:
    """Return the coarsest level that a reader with the codec accepts."""
    return LEVELS.get(codec, CodecLevel.COARSE)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Contents of a frame's head.

    Attributes:
        level: coarseness of the values.
        calibration: number of the tables behind the frame (Calibration.number).
        payload_bytes: bytes after the head; the rest of the range is zeros.
        escapes: count of values without a code, which are stored unencoded.
    """

    level: CodecLevel
    calibration: int
    payload_bytes: int
    escapes: int = 0

    def pack(self) -> bytes:
        """Return the head's bytes."""
        return _HEAD.pack(
            _MAGIC, _VERSION, self.level, self.calibration, self.payload_bytes, self.escapes
        )


def read_head(
    frame: memoryview, *, calibration: int, numbers: int, coarsest: CodecLevel = CodecLevel.COARSE
) -> FrameHead:
    """Read and check a frame's head.

    Args:
        frame: the whole range.
        calibration: number of this node's tables; other tables can't decode here.
        numbers: count of values that the frame must hold, which bounds the escapes.
        coarsest: coarsest level that the reader's codec allows.

    Raises:
        LayoutError: the range is not a frame, uses other tables, is too coarse, or has impossible
            lengths.
    """
    if len(frame) < FRAME_HEAD_BYTES:
        raise LayoutError(f"a range of {len(frame)} bytes is too short for a frame")
    magic, version, level, tables, payload, escapes = _HEAD.unpack_from(frame)
    if magic != _MAGIC or version != _VERSION or level not in set(CodecLevel):
        raise LayoutError("a range is no entropy-coded frame of this version")
    if tables != calibration:
        raise LayoutError(
            f"a frame was made with calibration {tables:08x}, this node has {calibration:08x}"
        )
    if coarsest < level != CodecLevel.RAW:
        raise LayoutError(f"a frame of level {level} is coarser than {coarsest.name}")
    if payload > len(frame) - FRAME_HEAD_BYTES or escapes > numbers:
        raise LayoutError(f"a frame of {len(frame)} bytes can't hold {payload} and {escapes}")
    return FrameHead(CodecLevel(level), tables, payload, escapes)
