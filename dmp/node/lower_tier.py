"""Contract of the tier below a DMP node's memory (L4: disk, and an archive behind the disk).

``dmp`` does not know ``storage``: the composition root passes an object that fits this Protocol
structurally (storage/l4.py). Blocks are copied as a whole, down and up, and verified on the way up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tierkv.kvcore.block import BlockSpec, Tier
from tierkv.kvcore.block_event import BlockStored
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.node import TierStats


class LowerTier(Protocol):
    """Blocks at rest, below a node's memory. All calls block and are thread-safe.

    1. ``put`` stores a whole block, which ``get_block`` finds as soon as ``put`` returns. The
       payload is the slot's bytes in the segment, begins on a page border and may be written with
       O_DIRECT. ``checksums`` are the checksums of the block's writer, an xxh3_64 per range as
       little-endian uint64. A block that exists already stays unchanged. ``put`` raises
       PoolFullError or TransportError if the medium is full or broken, and then leaves nothing of
       the block behind.
    2. ``find`` returns the block that rests under a key, or None, from memory and without I/O.
    3. ``get_block`` fills the destination (exactly ``range_bytes * range_count`` long, beginning on
       a page border) and verifies every byte, or raises BlockNotFoundError, ChecksumError or
       TransportError. After a ChecksumError the block is gone. ``get_block`` returns the checksums
       given to ``put``: bytes damaged on the way down or up never get new checksums.
    4. ``blocks`` lists the resting blocks, oldest put first; after a restart too.
    5. ``delete`` forgets a block; an unknown block is ignored. ``erase`` also overwrites the bytes
       and returns when no copy is left, with the number of removed copies and their bytes; it
       raises TransportError if a copy may be left.
    6. The listener is called, from any thread, with blocks that left by themselves (evicted,
       damaged) and that ``get_block`` cannot load any more. The call comes after the blocks are
       gone.
    7. ``stats`` is cheap; ``medium`` describes faults in human-readable form, and
       ``alloc_failures`` counts failed and bad reads and writes. After ``close`` calls raise
       TransportError.
    """

    def put(
        self, block: BlockSpec, payload: memoryview, *, checksums: bytes | None = None
    ) -> None: ...

    def find(self, key: BlockKey) -> BlockSpec | None: ...

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes: ...

    def blocks(self) -> Sequence[BlockSpec]: ...

    def delete(self, key: BlockKey) -> None: ...

    def erase(self, keys: Sequence[BlockKey]) -> tuple[int, int]: ...

    def set_listener(self, gone: Callable[[Sequence[BlockKey]], None]) -> None: ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


def resting(block: BlockSpec) -> BlockStored:
    """Return the event that a block rests in the lower tier, without a location until promoted."""
    return BlockStored(block, Tier.L4)
