"""Blocks as a node describes them: locations and range shapes.

Requested by clients that know only a key (dmp/client/pool.py). Compute nodes know the layout of
their blocks and only look the blocks up. Messages of the DESCRIBE frame are packed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.dmp.wire.packing import Packer, Unpacker
from tierkv.kvcore import limits
from tierkv.kvcore.block import RangeShape
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.location import Location


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
    blocks = [_unpack_one(u) if u.integer("B") else None for _ in range(u.count())]
    u.end()
    return blocks


def _unpack_one(u: Unpacker) -> DescribedBlock:
    block = DescribedBlock(u.ref(), RangeShape(u.integer("Q"), u.integer("I")))
    ranges = block.ranges
    if not (
        1 <= ranges.count <= limits.MAX_LAYERS
        and 1 <= ranges.payload_bytes == block.location.length <= limits.MAX_SLOT_BYTES
    ):
        raise RemoteProtocolError(f"a block of {ranges.size_bytes} x {ranges.count} bytes")
    return block
