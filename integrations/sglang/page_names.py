"""Names of SGLang's pages in the pool.

SGLang names a page by a hash of all tokens up to the end of the page, seeded with the request's
salt and extra key. The hash does not determine the meaning or the owner of the bytes. Names
therefore hash again, with the engine's base key (tenant, weights, form of pages) and this process's
part of the page. A pool can't delete, so names contain a generation, and ``clear`` begins the next
generation.
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
    """Names pages; immutable, so threads may share an instance.

    Args:
        base: the engine's own key.
        part: this process's part of a page: ranks, layers, number of bytes.
        generation: number of clears so far.
    """

    def __init__(self, base: NamespaceKey, part: Iterable[str], generation: int) -> None:
        self.base = base
        self.generation = generation
        self._mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_PERSON)
        self._mac.update(generation.to_bytes(8, "little"))
        for text in part:
            self._add(self._mac, text)

    def name(self, page_hash: str, component: str = KV) -> BlockKey:
        """Return the key of a page, from SGLang's hash and the name of the host pool."""
        mac = self._mac.copy()
        self._add(mac, component)
        self._add(mac, page_hash)
        return BlockKey(mac.digest())

    @staticmethod
    def _add(mac: blake2b, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        mac.update(len(raw).to_bytes(4, "little") + raw)


def generation_marker(base: NamespaceKey, generation: int) -> BlockKey:
    """Return the key of the small value that marks the beginning of a generation."""
    mac = blake2b(key=base, digest_size=BLOCK_KEY_BYTES, person=_MARKER)
    mac.update(generation.to_bytes(8, "little"))
    return BlockKey(mac.digest())
