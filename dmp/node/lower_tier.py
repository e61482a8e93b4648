"""What a DMP node asks of the tier below its memory (L4: disk, and an archive behind it).

``dmp`` does not know ``storage``: the composition root hands in something that fits these Protocols
structurally (storage/l4.py). Blocks go down whole and come up whole, verified on the way up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.block_event import BlockStored
from tierkv.kvcore.ids import BlockKey
from tierkv.kvcore.location import Tier
from tierkv.kvcore.node import TierStats


class LowerTier(Protocol):
    """Blocks at rest, below a node's memory. All calls block and are thread-safe.

    1. ``put`` stores a whole block; when it returns, ``get_block`` finds it. The payload is the
       slot's bytes in the segment: it begins on a page border and may be written with O_DIRECT.
       ``checksums`` are those of its writer, one xxh3_64 per range as little-endian uint64.
       A block that is there already is left as it is. PoolFullError or TransportError when the
       medium is full or broken; nothing of the block is left then.
    2. ``find`` says from memory, without I/O, what block rests there under a key; None if none.
    3. ``get_block`` fills the destination (exactly ``range_bytes * range_count`` long, beginning
       on a page border) and verifies every byte, or raises BlockNotFoundError, ChecksumError
       or TransportError. A block with bad bytes is gone from then on. It answers the checksums
       the block was put with: bytes that go bad on their way down or up never get new ones.
    4. ``blocks`` lists what rests there, oldest put first; after a restart too.
    5. ``delete`` forgets a block; an unknown one is ignored.
    6. Blocks that leave by themselves (evicted, damaged) and can't be brought back by
       ``get_block`` any more are told to the listener, from any thread, after they are gone.
    7. ``stats`` is cheap; its ``medium`` says for people what is wrong, and ``alloc_failures``
       counts failed and bad reads and writes. After ``close`` calls raise TransportError.
    """

    def put(
        self, block: BlockSpec, payload: memoryview, *, checksums: bytes | None = None
    ) -> None: ...

    def find(self, key: BlockKey) -> BlockSpec | None: ...

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes: ...

    def blocks(self) -> Sequence[BlockSpec]: ...

    def delete(self, key: BlockKey) -> None: ...

    def set_listener(self, gone: Callable[[Sequence[BlockKey]], None]) -> None: ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


def resting(block: BlockSpec) -> BlockStored:
    """Return the event that a block rests below; it has no location until it is promoted."""
    return BlockStored(block, Tier.L4)
