"""Names of KV blocks: a keyed hash chained from block to block.

Called by the front (to locate the KV of a prompt) and by compute nodes (to publish KV). Equal
inputs give equal keys on every machine and in every run; ``hash()`` is never used.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, NAMESPACE_KEY_BYTES, BlockKey, NamespaceKey

ROOT_PARENT = BlockKey(bytes(BLOCK_KEY_BYTES))
"""Parent of a prompt's first block."""


def namespace_key(
    cluster_secret: bytes, *, tenant: str, model_revision: str, layout_fingerprint: bytes
) -> NamespaceKey:
    """Derive the 32-byte hash key that isolates one tenant, model revision and layout.

    Different tenants never share a block, because their blocks have different names.

    Args:
        cluster_secret: 16 to 64 bytes, the same on all meta servers of a cluster.
        tenant: isolation domain; a namespace declared shared passes its own name here.
        model_revision: digest of the weights and configuration.
        layout_fingerprint: ``BlockLayout.fingerprint()``.

    Raises:
        ValueError: the secret has an unusable length.
    """
    if not 16 <= len(cluster_secret) <= 64:
        raise ValueError("the cluster secret must have 16 to 64 bytes")
    mac = blake2b(key=cluster_secret, digest_size=NAMESPACE_KEY_BYTES, person=b"tierkv-ns-1")
    for part in (tenant.encode(), model_revision.encode(), layout_fingerprint):
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return NamespaceKey(mac.digest())


def next_block_key(key: NamespaceKey, parent: BlockKey, block_token_ids: Sequence[int]) -> BlockKey:
    """Return the key of one full block after ``parent`` (``ROOT_PARENT`` for the first block)."""
    payload = parent + _token_bytes(block_token_ids)
    return BlockKey(blake2b(payload, key=key, digest_size=BLOCK_KEY_BYTES).digest())


def block_keys(key: NamespaceKey, token_ids: Sequence[int], *, block_tokens: int) -> list[BlockKey]:
    """Name every full block of a token sequence; a trailing partial block has no name.

    Costs one hash per block; O(len(token_ids)).
    """
    raw = _token_bytes(token_ids)
    width = 4 * block_tokens
    keys: list[BlockKey] = []
    parent = ROOT_PARENT
    for start in range(0, len(raw) - width + 1, width):
        digest = blake2b(parent + raw[start : start + width], key=key, digest_size=BLOCK_KEY_BYTES)
        parent = BlockKey(digest.digest())
        keys.append(parent)
    return keys


class ChunkNamer:
    """Names the blocks of position-free chunks that were computed after one isolation prefix.

    The chunk key hashes the chunk's tokens and the isolation prefix, in a domain of its own. The
    text before the chunk in a prompt does not enter the hash. The key of block i is a hash of the
    chunk key and i. The prefix is hashed once for all chunks.
    """

    def __init__(self, key: NamespaceKey, isolation_prefix_ids: Sequence[int]) -> None:
        self._key = key
        self._mac = blake2b(key=key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-chunk")
        prefix = _token_bytes(isolation_prefix_ids)
        self._mac.update(len(prefix).to_bytes(8, "little"))
        self._mac.update(prefix)

    def block_keys(self, token_ids: Sequence[int], *, block_tokens: int) -> list[BlockKey]:
        """Name every block of a chunk; the last one may be partial. O(len(token_ids))."""
        mac = self._mac.copy()
        mac.update(_token_bytes(token_ids))
        chunk = mac.digest()
        keys: list[BlockKey] = []
        for index in range(-(-len(token_ids) // block_tokens)):
            block = blake2b(key=self._key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-chunkblk")
            block.update(chunk + index.to_bytes(4, "little"))
            keys.append(BlockKey(block.digest()))
        return keys


def tail_key(key: NamespaceKey, parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a partial last block for a handoff, in a hash domain of its own."""
    mac = blake2b(key=key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-tail")
    mac.update(parent + _token_bytes(token_ids))
    return BlockKey(mac.digest())


def coarse_key(key: BlockKey) -> BlockKey:
    """Return the key of the coarser copy of a block that is stored at two levels (``adaptive``).

    The hash has a domain of its own. The result is as secret as ``key``.
    """
    mac = blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-coarse")
    return BlockKey(mac.digest())


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian uint32."""
    numbers = array("I", token_ids)
    if numbers.itemsize != 4:  # pragma: no cover - no supported platform
        return b"".join(t.to_bytes(4, "little") for t in token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        numbers.byteswap()
    return numbers.tobytes()
