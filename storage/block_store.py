"""The contract of a block store (tier L4), and its values.

Implemented by tests/memory_store.py (reference), storage/disk/segment_store.py (disk) and
storage/archive.py (object storage). A block is put whole, read whole or by range, and verified on
every read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.kvcore import limits
from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.errors import BlockNotFoundError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A whole block, and its writable, C-contiguous destination of exactly the payload size."""

    key: BlockKey
    destination: memoryview


@dataclass(frozen=True, slots=True)
class DiskRangeRead:
    """One range to read into a writable, C-contiguous destination of range_bytes."""

    key: BlockKey
    index: int
    destination: memoryview


class BlockStore(Protocol):
    """Stores whole blocks.

    1. ``put`` stores a whole block. On return the block is readable and, in a store on disk,
       survives the process. A block that is already stored stays unchanged.
    2. ``get_range`` fills the destination with one range and verifies its xxh3_64, or raises
       BlockNotFoundError or ChecksumError. A block with bad bytes is dropped.
    3. ``exists`` tells whether ``get_range`` would find the block. ``find`` returns the description
       of the block at rest (``BlockSpec.at_rest``), or None if the block is not stored.
    4. ``delete`` drops a block and ignores an unknown key.
    5. ``blocks`` lists the stored blocks, oldest put first.
    6. A full store refuses a ``put`` with PoolFullError, or makes room by evicting other blocks. A
       broken medium raises TransportError or PoolFullError and leaves no part of the block.
    7. All calls are thread-safe. After ``close`` every call raises TransportError.
    8. ``get_block`` fills the destination with the whole payload, verifies every range and raises
       like ``get_range``. The return value is the checksums of the put, one little-endian uint64
       per range. A caller that passes the bytes on passes these checksums on too.
    """

    def put(self, block: BlockSpec, payload: memoryview) -> None: ...

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None: ...

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes: ...

    def exists(self, key: BlockKey) -> bool: ...

    def find(self, key: BlockKey) -> BlockSpec | None: ...

    def delete(self, key: BlockKey) -> None: ...

    def blocks(self) -> Sequence[BlockSpec]: ...

    def close(self) -> None: ...


class StoreListener(Protocol):
    """Receives the blocks that leave a store.

    1. ``fading`` names the blocks of the next file to be collected, as soon as the file is known.
       The file is collected after about one file's worth of puts; until then the blocks can be
       archived.
    2. ``evicted`` names dropped blocks, after the drop: by garbage collection or because of bad
       bytes.
    3. Both run in the thread of a put or get, without a lock held, and must be quick.
    """

    def fading(self, blocks: Sequence[BlockSpec]) -> None: ...

    def evicted(self, blocks: Sequence[BlockSpec]) -> None: ...


def check_block(block: BlockSpec, payload: memoryview) -> BlockSpec:
    """Check a put and return what a store keeps of the block.

    Raises:
        ValueError: the payload is not as long as the block says, or a number is out of bounds;
            a bug of the caller.
    """
    if len(block.key) != BLOCK_KEY_BYTES or len(block.parent) != BLOCK_KEY_BYTES:
        raise ValueError(f"a block key has {BLOCK_KEY_BYTES} bytes")
    if not 1 <= block.ranges.count <= limits.MAX_LAYERS:
        raise ValueError(f"a block has 1 to {limits.MAX_LAYERS} ranges, got {block.ranges.count}")
    if not 1 <= block.ranges.payload_bytes <= limits.MAX_SLOT_BYTES:
        raise ValueError(f"a block of {block.ranges.payload_bytes} bytes")
    if not 0 <= block.tokens < 1 << 32:
        raise ValueError(f"a block of {block.tokens} tokens")
    for name in (block.owner.model, block.owner.tenant):
        if len(name.encode()) > limits.MAX_NAME_CHARS or "\0" in name:
            raise ValueError(f"a name of {len(name)} characters, or with a zero byte")
    if payload.nbytes != block.ranges.payload_bytes:
        raise ValueError(
            f"{payload.nbytes} bytes given for a block of {block.ranges.payload_bytes}"
        )
    return block.at_rest()


def block_size_checked(block: BlockSpec, destination: memoryview) -> memoryview:
    """Return the destination of a whole block as flat bytes.

    Raises:
        BlockNotFoundError: the sizes differ.
    """
    size = block.ranges.payload_bytes
    if destination.nbytes != size:
        raise BlockNotFoundError(
            f"block {block.key.hex()} has {size} bytes, not {destination.nbytes}"
        )
    return destination.cast("B")


def range_span(block: BlockSpec, index: int, destination: memoryview) -> slice:
    """Return the position of a range in the payload.

    Raises:
        BlockNotFoundError: no such range, or the destination has another size.
    """
    if not 0 <= index < block.ranges.count or destination.nbytes != block.ranges.size_bytes:
        raise BlockNotFoundError(
            f"range {index} of {destination.nbytes} bytes is not in a block of "
            f"{block.ranges.count} x {block.ranges.size_bytes}"
        )
    return slice(index * block.ranges.size_bytes, (index + 1) * block.ranges.size_bytes)
