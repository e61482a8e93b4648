"""SGLang's pages in the pool: lookup, read, write and clear, without SGLang's types.

Created by integrations/sglang/hicache.py. Calls wait for the pool, as SGLang's storage threads
expect. If the pool is away, calls return misses at once. A page that the pool can't move is False.
A call never returns while the pool still uses the host memory of the call, because SGLang would
give the memory to another request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

from tierkv.dmp.client.pool import Pool
from tierkv.dmp.client.values import PutNotes
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.sglang.host_pages import HostPages, page_memory
from tierkv.integrations.sglang.page_names import KV, Generations, PageNames
from tierkv.kvcore.block import ROOT_PARENT, Outlook, Owner
from tierkv.kvcore.ids import BlockKey


@dataclass(frozen=True, slots=True)
class Page:
    """One page and the location of its bytes.

    Attributes:
        key: name of the page in the pool.
        pieces: bytes of the page in equally long parts.
    """

    key: BlockKey
    pieces: Sequence[memoryview]

    @property
    def size(self) -> int:
        """Bytes of the whole page."""
        return sum(piece.nbytes for piece in self.pieces)


def chain_notes(
    keys: Sequence[BlockKey], before: Sequence[BlockKey], *, tokens: int, owner: Owner
) -> list[PutNotes]:
    """Return the notes for consecutive pages.

    Args:
        keys: names of the pages.
        before: names of the pages before them, as far as known.
        tokens: tokens of one page.
        owner: owner of the pages.
    """
    parents = [before[-1] if before else ROOT_PARENT, *keys]
    return [
        PutNotes(parent, tokens, owner, Outlook(depth=len(before) + i))
        for i, parent in enumerate(parents[: len(keys)])
    ]


def store(pool: Pool, pages: Sequence[Page], notes: Sequence[PutNotes]) -> list[bool]:
    """Put pages; True for each page that is now in the pool."""
    if all(len(page.pieces) == 1 for page in pages):
        return pool.put_many([(page.key, page.pieces[0]) for page in pages], notes=notes)
    sizes = [(page.key, page.size, page.pieces[0].nbytes) for page in pages]
    puts = pool.open_puts(sizes, notes=notes)
    opened = [(put, page) for put, page in zip(puts, pages, strict=True) if put is not None]
    try:
        pool.write_ranges(
            [(put, i, piece) for put, page in opened for i, piece in enumerate(page.pieces)]
        )
        sealed = pool.seal_puts([put for put, _ in opened])
    finally:
        pool.abort_puts([put for put, _ in opened])  # Sealed puts have ended already.
    stored = {page.key for (_, page), done in zip(opened, sealed, strict=True) if done}
    others = [page.key for put, page in zip(puts, pages, strict=True) if put is None]
    stored.update(_there(pool, others))
    return [page.key in stored for page in pages]


def load(pool: Pool, pages: Sequence[Page]) -> list[bool]:
    """Read pages into their places; False means the memory may hold garbage."""
    reads = [(page.key, i, piece) for page in pages for i, piece in enumerate(page.pieces)]
    numbers = [number for number, page in enumerate(pages) for _ in page.pieces]
    done = pool.get_ranges_into(reads)
    whole = {
        number: all(got for _, got in group)
        for number, group in groupby(zip(numbers, done, strict=True), key=lambda pair: pair[0])
    }
    return [whole.get(number, False) for number in range(len(pages))]


def _there(pool: Pool, keys: Sequence[BlockKey]) -> set[BlockKey]:
    """Return the keys that were stored before."""
    if not keys:
        return set()
    return {key for key, is_there in zip(keys, pool.exists_many(keys), strict=True) if is_there}


T = TypeVar("T")
_LARGE_BYTES: Final = 31 << 20
"""A node's slot has about 32 MiB at most (docs/pool.md)."""


@dataclass(frozen=True, slots=True)
class Component:
    """One of SGLang's host pools.

    Attributes:
        name: SGLang's name of the pool.
        pages: memory of the pool.
        part: this process's part of each page.
    """

    name: str
    pages: HostPages
    part: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PageNaming:
    """Current names of pages.

    Attributes:
        by_component: one namer per host pool.
        generation: the current generation.
        next_marker: key of the marker that is in the pool after a later clear.
    """

    by_component: dict[str, PageNames]
    generation: int
    next_marker: BlockKey

    def of(self, component: str, hashes: Sequence[str]) -> list[BlockKey]:
        """Return the keys of pages."""
        namer = self.by_component[component]
        return [namer.name(page_hash, component) for page_hash in hashes]


class PageStore:
    """Pages of one SGLang process; thread-safe.

    Attributes:
        components: host pools by name; filled by ``add``.
        _clearing: the pool has not yet stored a clear; until then nothing is found.
        _registered: the pool that knows the host memory, and the number of host pools registered
            there.
    """

    def __init__(self, door: PoolDoor, *, same_weights: Callable[[], bool]) -> None:
        """Create a store.

        Args:
            door: the door to the pool.
            same_weights: returns True while the weights belong to the door's identity.
        """
        self.door = door
        self._same_weights = same_weights
        self._registered: tuple[Pool | None, int] = (None, 0)
        self.components: dict[str, Component] = {}
        self._generations = Generations()
        self._lock = threading.Lock()
        self._clearing = False

    def add(self, component: Component) -> None:
        """Add a host pool."""
        with self._lock:
            self.components[component.name] = component

    def there(self, hashes: Sequence[str], components: Sequence[str]) -> dict[str, list[bool]]:
        """Look up pages of several host pools, in one round trip per node."""

        def ask(pool: Pool) -> dict[str, list[bool]]:
            names = self._names(pool)
            if names is None:
                return nothing
            asked = [names.next_marker, *(k for c in components for k in names.of(c, hashes))]
            cleared, *found = pool.exists_many(asked)
            if cleared:
                base = names.by_component[components[0]].base
                self._generations.look(pool, base, since=names.generation)
                return ask(pool)
            count = len(hashes)
            return {c: found[i * count : (i + 1) * count] for i, c in enumerate(components)}

        nothing = {component: [False] * len(hashes) for component in components}
        if not hashes or any(c not in self.components for c in components):
            return nothing
        self.door.count("query_tokens", self._tokens(len(hashes)))
        return self._run(ask, nothing, "sglang_exists")

    def read(self, component: Component, hashes: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages into host memory; False means the memory may hold garbage."""

        def fetch(pool: Pool) -> list[bool]:
            names = self._names(pool)
            if names is None:
                return nothing
            keys = names.of(component.name, hashes)
            return load(pool, [Page(k, w) for k, w in zip(keys, windows, strict=True)])

        nothing = [False] * len(hashes)
        pages = component.pages
        flat = pages.blank(len(hashes)) if pages.copied else []
        windows = (
            [[page_memory(page)] for page in flat]
            if pages.copied
            else pages.windows(host_indices, len(hashes))
        )
        done = self._run(fetch, nothing, "sglang_get")
        if pages.copied:
            kept = [page if ok else None for page, ok in zip(flat, done, strict=True)]
            pages.copy_in(host_indices, kept)
        self._count_read(component, done)
        return done

    def write(
        self, component: Component, hashes: Sequence[str], host_indices: Any, before: Sequence[str]
    ) -> list[bool]:
        """Write pages from host memory; True for each page that is now in the pool."""
        pages = component.pages
        windows = (
            [[copy] for copy in pages.copy_out(host_indices, len(hashes))]
            if pages.copied
            else pages.windows(host_indices, len(hashes))
        )
        return self._put(component, hashes, windows, before)

    def read_flat(self, hashes: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        """Read whole pages of keys and values into the caller's memory."""

        def fetch(pool: Pool) -> list[bool]:
            names = self._names(pool)
            if names is None:
                return nothing
            items = list(zip(names.of(KV, hashes), self._cut_all(targets), strict=True))
            return load(pool, [Page(key, pieces) for key, pieces in items])

        nothing = [False] * len(hashes)
        component = self.components.get(KV)
        if component is None or any(t.nbytes != component.pages.page_bytes for t in targets):
            return nothing
        done = self._run(fetch, nothing, "sglang_get")
        self._count_read(component, done)
        return done

    def write_flat(self, hashes: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        """Write whole pages of keys and values from the caller's memory."""
        component = self.components.get(KV)
        if component is None or any(p.nbytes != component.pages.page_bytes for p in pages):
            return [False] * len(hashes)
        return self._put(component, hashes, self._cut_all(pages), ())

    def clear(self) -> bool:
        """Make all stored pages unreachable, for every engine that shares them.

        Returns:
            True if the pool stored the clear. Otherwise this process finds nothing until a retry
            succeeds.
        """
        with self._lock:
            self._clearing = True
        return self._run(lambda pool: self._names(pool) is not None, False, "sglang_clear")

    def _put(
        self,
        component: Component,
        hashes: Sequence[str],
        windows: Sequence[Sequence[memoryview]],
        before: Sequence[str],
    ) -> list[bool]:
        def put(pool: Pool) -> list[bool]:
            names = self._names(pool)
            if names is None:
                return nothing
            keys = names.of(component.name, hashes)
            notes = chain_notes(
                keys,
                names.of(component.name, before),
                tokens=component.pages.page_tokens if component.name == KV else 0,
                owner=Owner(self.door.identity.label, self.door.settings.tenant),
            )
            self._generations.keep(pool, names.by_component[component.name].base, names.generation)
            return store(pool, [Page(k, w) for k, w in zip(keys, windows, strict=True)], notes)

        nothing = [False] * len(hashes)
        done = self._run(put, nothing, "sglang_set")
        stored = sum(done)
        self.door.count("write_bytes", stored * component.pages.page_bytes)
        if component.name == KV:
            self.door.count("stored_tokens", self._tokens(stored))
        if stored < len(done) and component.pages.page_bytes > _LARGE_BYTES:
            self.door.complain(
                "page_too_large",
                f"a page of {component.pages.page_bytes} bytes is larger than what a node stores",
                hint="Choose a smaller --page-size.",
            )
        return done

    def _names(self, pool: Pool) -> PageNaming | None:
        """Return the current names; None while reading and writing are not allowed."""
        base = self.door.base_key
        if base is None or not self._same_weights():
            return None
        with self._lock:
            clearing, components = self._clearing, list(self.components.values())
        if clearing:
            if not self._generations.advance(pool, base):
                self.door.complain(
                    "sglang_clear",
                    "the pool had no room to record that the cache was cleared; nothing is read or "
                    "written until it is recorded",
                )
                return None
            with self._lock:
                self._clearing = False
            self.door.settle("sglang_clear")
        self._register(pool, components)
        generation = self._generations.current(pool, base)
        namers = {c.name: PageNames(base, c.part, generation) for c in components}
        return PageNaming(namers, generation, self._generations.next_marker(base, generation))

    def _register(self, pool: Pool, components: Sequence[Component]) -> None:
        """Register with a pool, once, the memory that the pool will read and write."""
        with self._lock:
            known, self._registered = self._registered, (pool, len(components))
        if known[0] is not pool or known[1] != len(components):
            for memory in (m for c in components for m in c.pages.memory):
                pool.register(memory)

    def _run(self, work: Callable[[Pool], T], default: T, name: str) -> T:
        return self.door.submit(work, default, name=name).result()

    def _cut_all(self, pages: Sequence[memoryview]) -> list[list[memoryview]]:
        size = self.components[KV].pages.piece_bytes
        return [[page[at : at + size] for at in range(0, page.nbytes, size)] for page in pages]

    def _tokens(self, pages: int) -> int:
        kv = self.components.get(KV)
        return pages * kv.pages.page_tokens if kv is not None else 0

    def _count_read(self, component: Component, done: Sequence[bool]) -> None:
        self.door.count("read_bytes", sum(done) * component.pages.page_bytes)
        if component.name == KV:
            self.door.count("hit_tokens", self._tokens(sum(done)))
