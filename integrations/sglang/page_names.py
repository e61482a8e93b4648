"""Names of SGLang's pages in the pool, and the generation that ``clear`` advances.

SGLang names a page by a hash of all tokens up to the end of the page, seeded with the request's
salt and extra key. The hash does not determine the meaning or the owner of the bytes. Names
therefore hash again, with the engine's base key (tenant, weights, form of pages) and this process's
part of the page.

A pool can't delete, so names contain a generation, and ``clear`` begins the next generation: the
stored pages of all engines with the same base key become unreachable. ``clear`` puts a marker for
the next generation, and every request for pages also asks for the next marker. A marker may be
evicted like any value; every engine that stores pages puts it again. Engines that know different
generations find no hits in each other's pages, never wrong hits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from tierkv.dmp.client.pool import Pool
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


WINDOW: Final = 64
"""Markers requested at once when an engine starts. Every 64th marker is kept, so that the search
never ends too early."""

_MARK: Final = b"tierkv: SGLang's pages were cleared"


class Generations:
    """The current generation of a base key, as far as this process knows; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[NamespaceKey, int] | None = None

    def current(self, pool: Pool, base: NamespaceKey) -> int:
        """Return the generation; the first call asks the pool."""
        with self._lock:
            if self._known is not None and self._known[0] == base:
                return self._known[1]
        return self.look(pool, base, since=0)

    def look(self, pool: Pool, base: NamespaceKey, *, since: int) -> int:
        """Ask the pool for the newest generation after the known generation ``since``."""
        newest, end = since, since
        while newest >= end:
            numbers = range(end + 1, end + WINDOW + 1)
            there = pool.exists_many([generation_marker(base, n) for n in numbers])
            end += WINDOW
            newest = max(
                [newest, *(n for n, is_there in zip(numbers, there, strict=True) if is_there)]
            )
        return self._learn(base, newest)

    def next_marker(self, base: NamespaceKey, generation: int) -> BlockKey:
        """Return the key of the marker that the next ``clear`` puts."""
        return generation_marker(base, generation + 1)

    def advance(self, pool: Pool, base: NamespaceKey) -> bool:
        """Begin the next generation; False if the pool has no room for the marker."""
        generation = self.look(pool, base, since=self.current(pool, base)) + 1
        if not self.keep(pool, base, generation):
            return False
        self._learn(base, generation)
        return True

    def keep(self, pool: Pool, base: NamespaceKey, generation: int) -> bool:
        """Put the markers of a generation again; False if the pool did not store them all."""
        if not generation:
            return True
        numbers = {generation, *range(WINDOW, generation, WINDOW)}
        return all(pool.put_many([(generation_marker(base, n), _MARK) for n in sorted(numbers)]))

    def _learn(self, base: NamespaceKey, generation: int) -> int:
        with self._lock:
            if self._known is not None and self._known[0] == base:
                generation = max(generation, self._known[1])
            self._known = (base, generation)
            return generation
