"""Names of vLLM's offloaded chunks in the pool.

vLLM names a chunk by its own hash of everything before it, the salt included, and the number of a
cache group. That name says nothing about what the bytes mean, nor whose they are: so it is hashed
again with the engine's base key (tenant, weights and the format of chunks) and with the seed of
vLLM's hashes. Engines that differ in any of it never find each other's chunks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceKey

_PERSON: Final = b"tierkv-vllmtier1"


class ChunkNames:
    """Names chunks; immutable, so threads may share one.

    Args:
        base: the engine's own key, of its tenant, its weights and what its chunks consist of.
        seed: vLLM's ``NONE_HASH``, which follows from the algorithm of its hashes and their seed.
        epoch: empty, or what makes the names of an engine that reset its cache its own.
    """

    def __init__(self, base: NamespaceKey, *, seed: bytes, epoch: bytes = b"") -> None:
        self._mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON)
        for part in (seed, epoch):
            self._mac.update(len(part).to_bytes(4, "little") + part)

    def name(self, key: bytes) -> BlockKey:
        """Name the chunk with vLLM's ``OffloadKey``."""
        mac = self._mac.copy()
        mac.update(key)
        return BlockKey(mac.digest())
