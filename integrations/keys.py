"""Names of the parts of a block that several processes of one engine hold.

With tensor parallelism each rank computes the KV of its own heads. A block of an engine of one rank
has the name the scheduler gives it (kvcore/block_key.py); each part of a divided one has a name of
its own, in another domain, so that engines divided in different ways never meet.
"""

from __future__ import annotations

from hashlib import blake2b

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey


def rank_key(key: BlockKey, rank: int, ranks: int) -> BlockKey:
    """Name one rank's part of a block; the block itself where there is one rank.

    Raises:
        ValueError: no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    if ranks == 1:
        return key
    mac = blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-rank")
    mac.update(rank.to_bytes(4, "little") + ranks.to_bytes(4, "little"))
    return BlockKey(mac.digest())
