"""The head of an entropy-coded range: what its bytes are, checked before they are believed.

Written and read by compute/codec/entropy.py; pure. One frame holds one layer of one block, so
layers still move alone. Whatever is wrong with a head is a LayoutError, which means "miss".
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
    """How coarse the numbers of a frame are; the value is what its head says."""

    FINE = 0
    MEDIUM = 1
    COARSE = 2
    RAW = 255
    """The numbers as they are: coding them would have made them longer."""


LEVELS = {
    KvCodec.ENTROPY_FINE: CodecLevel.FINE,
    KvCodec.ENTROPY_MEDIUM: CodecLevel.MEDIUM,
    KvCodec.ENTROPY_COARSE: CodecLevel.COARSE,
}
"""The level of each codec that has one; ``adaptive`` has two (compute/tiers/block_puts.py)."""


def coarsest_of(codec: KvCodec) -> CodecLevel:
    """Return how coarse a frame may be for a reader with that codec."""
    return LEVELS.get(codec, CodecLevel.COARSE)


@dataclass(frozen=True, slots=True)
class FrameHead:
    """What a frame says of itself.

    Attributes:
        level: step of its numbers.
        calibration: which tables it was made with (Calibration.number).
        payload_bytes: bytes behind the head; then zeros up to the range's end.
        escapes: numbers that have no code and are stored as they are.
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
        calibration: the only tables that can decode it here.
        numbers: how many numbers it must hold, which bounds its escapes.
        coarsest: the reader's codec promises no more loss than this.

    Raises:
        LayoutError: it is no frame, one of other tables, too coarse, or its lengths can't be.
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
