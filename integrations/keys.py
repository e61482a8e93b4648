"""Names of the parts of a block that several processes of one engine hold.

With tensor parallelism each rank computes the KV of its own heads. A block of a one-rank engine has
the same name as in the scheduler (kvcore/block_key.py). Each part of a divided block has a separate
name in another hash domain. Engines divided in different ways therefore never share a part.
"""

from __future__ import annotations

from hashlib import blake2b

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey


def rank_key(key: BlockKey, rank: int, ranks: int) -> BlockKey:
    """Return the key of one rank's part of a block; with one rank, the key of the block.

    Raises:
        ValueError: the rank does not exist.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    if ranks == 1:
        return key
    mac = blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-rank")
    mac.update(rank.to_bytes(4, "little") + ranks.to_bytes(4, "little"))
    return BlockKey(mac.digest())
