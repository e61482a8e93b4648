"""Ranges on the wire: the ranges that READ and WRITE name, and how a block is cut into ranges.

Called by the node, its servers and dmp/transport/tcp.py. The heads of READ and WRITE are the
hottest code of the parser: plain tuples, one precompiled struct per item and no object per range.
A layer-wise load names hundreds of ranges, and a dataclass for each range would cost more than the
rest of a small transfer. DESCRIBE tells clients that know only a key (dmp/client/pool.py) where a
block is and how it is cut; compute nodes know the layout of their blocks and only look blocks up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dmp.wire.messages import RangeRef
from tierkv.dmp.wire.packing import Packer, Unpacker
from tierkv.kvcore import limits
from tierkv.kvcore.block import Location, RangeShape
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import NodeId

Ref = tuple[int, int, int, int, int, int]
"""Incarnation, segment, slot, generation, index of the range, expected bytes of the range."""

WHOLE: Final = 0xFFFF_FFFF
"""Index of the whole payload: all ranges of a reserved slot."""

ANY_SIZE: Final = -1
"""A size that is not checked."""


def as_ref(ref: RangeRef) -> Ref:
    """Return the plain form of a RangeRef, without an expected size."""
    at = ref.location
    return at.incarnation, at.segment, at.slot, at.generation, ref.index, ANY_SIZE


_ITEM: Final = struct.Struct("<QIQQIQ")
_COUNT: Final = struct.Struct("<I")
_ONE: Final = struct.Struct("<IQIQQIQ")
ONE_RANGE_BYTES: Final = _ONE.size
"""Head of a READ of one range: by far the most frequent frame."""

MAX_RANGES: Final = 1_024
"""Maximum number of ranges per frame: requests in flight stay far below a socket's buffer, so the
two sides cannot block each other while both send."""

assert MAX_RANGES <= limits.MAX_FRAME_ITEMS


def pack_ranges(refs: Sequence[Ref]) -> bytes:
    """Return the head of a READ or WRITE frame."""
    if len(refs) == 1:
        return b"\1\0\0\0" + _ITEM.pack(*refs[0])
    return _COUNT.pack(len(refs)) + b"".join([_ITEM.pack(*ref) for ref in refs])


def unpack_ranges(head: bytes | bytearray) -> list[Ref]:
    """Read the head of a READ or WRITE frame.

    Raises:
        RemoteProtocolError: length and count do not agree, or a count, index or size is out of
            bounds.
    """
    size = len(head)
    if size < 4:
        raise RemoteProtocolError("a data-plane message ends too early")
    (count,) = _COUNT.unpack_from(head)
    if not 1 <= count <= MAX_RANGES:
        raise RemoteProtocolError(f"{count} ranges in a frame, 1 to {MAX_RANGES} allowed")
    if size != 4 + count * _ITEM.size:
        raise RemoteProtocolError(f"{count} ranges in a head of {size} bytes")
    refs: list[Ref] = list(_ITEM.iter_unpack(memoryview(head)[4:]))
    for ref in refs:
        if ref[4] >= limits.MAX_LAYERS:
            raise RemoteProtocolError(f"range {ref[4]} is outside [0, {limits.MAX_LAYERS})")
        if ref[5] > limits.MAX_SLOT_BYTES:
            raise RemoteProtocolError(f"a range of {ref[5]} bytes")
    return refs


def unpack_one(buffer: memoryview, offset: int) -> Ref:
    """Read a head of ONE_RANGE_BYTES in place.

    Raises:
        RemoteProtocolError: the head does not name exactly one range, or the range is out of
            bounds.
    """
    count, incarnation, segment, slot, generation, index, size = _ONE.unpack_from(buffer, offset)
    if count != 1 or index >= limits.MAX_LAYERS or size > limits.MAX_SLOT_BYTES:
        raise RemoteProtocolError(f"{count} ranges, range {index} of {size} bytes")
    return incarnation, segment, slot, generation, index, size


def pack_sums(checksums: Sequence[int]) -> bytes:
    """Return the head of the reply to a READ: one xxh3_64 per range."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_sums(head: bytes | bytearray | memoryview, count: int) -> Iterable[int]:
    """Read the head of the reply to a READ of ``count`` ranges."""
    if len(head) != 8 * count:
        raise RemoteProtocolError(f"{len(head)} bytes of checksums for {count} ranges")
    return struct.unpack(f"<{count}Q", head)


@dataclass(frozen=True, slots=True)
class DescribedBlock:
    """A sealed block.

    Attributes:
        location: slot of the block.
        ranges: how the block is cut into ranges.
    """

    location: Location
    ranges: RangeShape


def pack_stored(blocks: Sequence[DescribedBlock | None]) -> bytes:
    """Return the head of a DESCRIBE reply: one entry per requested key."""
    p = Packer().pack("I", len(blocks))
    for block in blocks:
        p.pack("B", block is not None)
        if block is not None:
            p.ref(block.location).pack("QI", block.ranges.size_bytes, block.ranges.count)
    return p.bytes()


def unpack_stored(
    head: bytes | bytearray | memoryview, node: NodeId
) -> list[DescribedBlock | None]:
    """Read the head of a DESCRIBE reply.

    Raises:
        RemoteProtocolError: the head is malformed or a size is out of bounds.
    """
    u = Unpacker(head, node)
    blocks = [_unpack_described(u) if u.integer("B") else None for _ in range(u.count())]
    u.end()
    return blocks


def _unpack_described(u: Unpacker) -> DescribedBlock:
    block = DescribedBlock(u.ref(), RangeShape(u.integer("Q"), u.integer("I")))
    ranges = block.ranges
    if not (
        1 <= ranges.count <= limits.MAX_LAYERS
        and 1 <= ranges.payload_bytes == block.location.length <= limits.MAX_SLOT_BYTES
    ):
        raise RemoteProtocolError(f"a block of {ranges.size_bytes} x {ranges.count} bytes")
    return block
