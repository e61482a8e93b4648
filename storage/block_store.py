"""Blocks at rest (tier L4): the contract of a block store, and its values.

Implemented by storage/memory.py (reference), storage/disk/segment_store.py (disk) and
storage/archive.py (object storage). Blocks are put whole and read by range or whole, verified on
every read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.kvcore import limits
from tierkv.kvcore.errors import BlockNotFoundError
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What is known of a block at rest.

    Attributes:
        key: the block.
        parent: the block before it.
        range_bytes: bytes of one range (one layer).
        range_count: number of ranges.
        tokens: tokens in the block.
        model: model name, for the views.
        tenant: whom it belongs to.
    """

    key: BlockKey
    parent: BlockKey
    range_bytes: int
    range_count: int
    tokens: int
    model: str = ""
    tenant: str = ""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all ranges."""
        return self.range_bytes * self.range_count


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A whole block, and where its bytes go: writable, C-contiguous, exactly its payload long."""

    key: BlockKey
    destination: memoryview


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One range of one block, and where its bytes go: writable, C-contiguous, range_bytes long."""

    key: BlockKey
    index: int
    destination: memoryview


class BlockStore(Protocol):
    """A place where blocks rest.

    1. ``put`` stores a whole block; when it returns, the block is readable and, for a store on
       disk, survives the process. A block that is there already is left as it is.
    2. ``get_range`` fills the destination with one range and verifies its xxh3_64, or raises
       BlockNotFoundError or ChecksumError; a block with bad bytes is gone from then on.
    3. ``exists`` says whether ``get_range`` would find the block; ``find`` answers what is known
       of it, None if it is not stored.
    4. ``delete`` forgets a block; an unknown one is ignored.
    5. ``blocks`` lists what is stored, oldest put first.
    6. A full store refuses a ``put`` with PoolFullError, or makes room by evicting other blocks.
       A broken medium is TransportError or PoolFullError; nothing of the block is left then.
    7. All calls are thread-safe. After ``close`` every call raises TransportError.
    8. ``get_block`` fills the destination with the whole payload, verified like every range, or
       raises as ``get_range`` does. It answers the checksums the bytes were put with, one
       little-endian uint64 per range: whoever passes the bytes on passes these on too.
    """

    def put(self, block: StoredBlock, payload: memoryview) -> None: ...

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None: ...

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes: ...

    def exists(self, key: BlockKey) -> bool: ...

    def find(self, key: BlockKey) -> StoredBlock | None: ...

    def delete(self, key: BlockKey) -> None: ...

    def blocks(self) -> Sequence[StoredBlock]: ...

    def close(self) -> None: ...


class StoreListener(Protocol):
    """Who wants to know which blocks leave.

    1. ``fading`` names the blocks of the file that is collected next, when that is known: the
       time until then (about one file's worth of puts) is the chance to archive them.
    2. ``evicted`` names blocks that were dropped, after they are gone: by garbage collection, or
       because their bytes were found bad.
    3. Both are called from the thread of a put or get, hold no lock, and must be quick.
    """

    def fading(self, blocks: Sequence[StoredBlock]) -> None: ...

    def evicted(self, blocks: Sequence[StoredBlock]) -> None: ...


def check_block(block: StoredBlock, payload: memoryview) -> None:
    """Check a put.

    Raises:
        ValueError: the payload is not as long as the block says, or a number is out of bounds;
            a bug of the caller.
    """
    if len(block.key) != BLOCK_KEY_BYTES or len(block.parent) != BLOCK_KEY_BYTES:
        raise ValueError(f"a block key has {BLOCK_KEY_BYTES} bytes")
    if not 1 <= block.range_count <= limits.MAX_LAYERS:
        raise ValueError(f"a block has 1 to {limits.MAX_LAYERS} ranges, got {block.range_count}")
    if not 1 <= block.payload_bytes <= limits.MAX_SLOT_BYTES:
        raise ValueError(f"a block of {block.payload_bytes} bytes")
    if not 0 <= block.tokens < 1 << 32:
        raise ValueError(f"a block of {block.tokens} tokens")
    for name in (block.model, block.tenant):
        if len(name.encode()) > limits.MAX_NAME_CHARS or "\0" in name:
            raise ValueError(f"a name of {len(name)} characters, or with a zero byte")
    if payload.nbytes != block.payload_bytes:
        raise ValueError(f"{payload.nbytes} bytes given for a block of {block.payload_bytes}")


def block_size_checked(block: StoredBlock, destination: memoryview) -> memoryview:
    """Return the destination of a whole block as flat bytes.

    Raises:
        BlockNotFoundError: it has another size than the block.
    """
    if destination.nbytes != block.payload_bytes:
        raise BlockNotFoundError(
            f"block {block.key.hex()} has {block.payload_bytes} bytes, not {destination.nbytes}"
        )
    return destination.cast("B")


def range_span(block: StoredBlock, index: int, destination: memoryview) -> slice:
    """Return where a range lies in the payload.

    Raises:
        BlockNotFoundError: no such range, or the destination has another size.
    """
    if not 0 <= index < block.range_count or destination.nbytes != block.range_bytes:
        raise BlockNotFoundError(
            f"range {index} of {destination.nbytes} bytes is not in a block of "
            f"{block.range_count} x {block.range_bytes}"
        )
    return slice(index * block.range_bytes, (index + 1) * block.range_bytes)
