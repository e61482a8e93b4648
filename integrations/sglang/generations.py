"""The current generation of SGLang's pages, agreed on through the pool itself.

``clear`` in one engine makes the stored pages of all engines with the same base key unreachable.
``clear`` puts a marker for the next generation, and every request for pages also asks for the next
marker. A marker may be evicted like any value; every engine that stores pages puts it again.
Engines that know different generations find no hits in each other's pages, never wrong hits.
"""

from __future__ import annotations

import threading
from typing import Final

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.sglang.page_names import generation_marker
from tierkv.kvcore.ids import BlockKey, NamespaceKey

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
