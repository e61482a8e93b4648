"""Names of SGLang's pages in the pool.

SGLang names a page by its own hash of all tokens up to its end, seeded with the request's salt and
extra key. That says nothing about what the bytes mean, nor whose they are: so it is hashed again
with the engine's base key (tenant, weights, form of pages) and with the part of the page that this
process has. A pool can't delete; names carry a generation, and ``clear`` begins the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey, NamespaceKey

KV: Final = "kv"
"""SGLang's name of the pool that holds keys and values."""

_PERSON: Final = b"tierkv-sglang-1"
_MARKER: Final = b"tierkv-sglanggen"


class PageNames:
    """Names pages; immutable, so threads may share one.

    Args:
        base: the engine's own key.
        part: what of a page this process has: ranks, layers, how many bytes.
        generation: how often it was cleared.
    """

    def __init__(self, base: NamespaceKey, part: Iterable[str], generation: int) -> None:
        self.base = base
        self.generation = generation
        self._mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON)
        self._mac.update(generation.to_bytes(8, "little"))
        for text in part:
            self._add(self._mac, text)

    def name(self, page_hash: str, component: str = KV) -> BlockKey:
        """Name a page by SGLang's hash of it and the host pool that it is of."""
        mac = self._mac.copy()
        self._add(mac, component)
        self._add(mac, page_hash)
        return BlockKey(mac.digest())

    @staticmethod
    def _add(mac: blake2b, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        mac.update(len(raw).to_bytes(4, "little") + raw)


def generation_marker(base: NamespaceKey, generation: int) -> BlockKey:
    """Name the small value that says that a generation has begun."""
    mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_MARKER)
    mac.update(generation.to_bytes(8, "little"))
    return BlockKey(mac.digest())
