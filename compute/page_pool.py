"""Which L1 page holds what: references, prefix lookup and leaf-first eviction.

Pure bookkeeping over page numbers; the bytes are in compute/pages.py. Only the engine thread calls
it. Page 0 is the null page and doubles as the sentinel of the eviction list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.block_key import ROOT_PARENT
from kvcore.ids import BlockKey

_NONE = 0


@dataclass(frozen=True, slots=True)
class PageEvent:
    """A block became findable here, or (``stored`` False) was given up."""

    key: BlockKey
    stored: bool
    parent: BlockKey = ROOT_PARENT
    tenant: str = ""


class PagePool:
    """Pages of one node. Every page but 0 is in exactly one of three states.

    free (no reference, no key) -> used (referenced; may get a key by ``commit``) -> cached (no
    reference, but a key: evictable, oldest first, never before its children) -> free or used.

    Attributes:
        num_pages: pages including the null page.
        evicted_blocks: keyed pages whose content was given up, ever.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError("a page pool needs the null page and at least one more")
        self.num_pages = num_pages
        self.evicted_blocks = 0
        self._references = [0] * num_pages
        self._key: list[BlockKey | None] = [None] * num_pages
        self._parent = [_NONE] * num_pages
        self._children = [0] * num_pages
        self._page_of: dict[BlockKey, int] = {}
        self._free = list(range(num_pages - 1, 0, -1))  # Popped from the end: low pages first.
        self._next = [_NONE] * num_pages  # Circular list of cached pages, oldest after page 0.
        self._previous = [_NONE] * num_pages
        self._cached = 0
        self._events: list[PageEvent] = []

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could give, if no cached page is held up by a used child."""
        return len(self._free) + self._cached

    @property
    def used(self) -> int:
        """Pages somebody holds."""
        return self.num_pages - 1 - self.available

    @property
    def keyed(self) -> int:
        """Pages that can be found by key."""
        return len(self._page_of)

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pages of the longest known prefix of a chain; takes no reference."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def unreferenced(self, pages: Sequence[int]) -> int:
        """Count pages whose acquisition would shrink ``available``."""
        return sum(1 for page in pages if self._references[page] == 0)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages with one reference each, evicting old blocks; None: not enough."""
        while len(self._free) < count:
            if not self._evict_oldest():
                return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            if self._references[page] == 0:
                assert self._key[page] is not None, f"page {page} is free"
                self._unlink(page)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference from each page of a chain, its end first."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} was released twice"
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            if self._key[page] is None:
                self._free.append(page)
            else:
                self._link_newest(page)

    def commit(self, page: int, key: BlockKey, parent: BlockKey, *, tenant: str = "") -> int:
        """Make a full, used page findable and return the page to use from now on.

        If another page has the key already, the caller's reference moves to that page and its own
        page is released: one key, one page, and holders of a child always hold its parent.
        """
        assert self._references[page] > 0 and self._key[page] is None
        known = self._page_of.get(key)
        if known is not None:
            self.acquire([known])
            self.release([page])
            return known
        self._key[page] = key
        self._page_of[key] = page
        if parent != ROOT_PARENT:
            self._parent[page] = self._page_of[parent]
            self._children[self._parent[page]] += 1
        self._events.append(PageEvent(key, True, parent, tenant))
        return page

    def drop_unused(self) -> int:
        """Forget every cached page nobody uses; returns how many."""
        before = self.evicted_blocks
        while self._cached and self._evict_oldest():
            pass
        return self.evicted_blocks - before

    def drain_events(self) -> list[PageEvent]:
        """Return what was stored and evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict_oldest(self) -> bool:
        """Free the oldest cached page without children; False if there is none.

        A parent is released after its children, so the oldest is nearly always a leaf; only pages
        pinned by a publisher or loader can hold a parent up, which then counts as new again.
        """
        for _ in range(self._cached):
            page = self._next[_NONE]
            self._unlink(page)
            if self._children[page] == 0:
                self._forget(page)
                return True
            self._link_newest(page)
        return False

    def _forget(self, page: int) -> None:
        key = self._key[page]
        assert key is not None
        if self._parent[page] != _NONE:
            self._children[self._parent[page]] -= 1
            self._parent[page] = _NONE
        del self._page_of[key]
        self._key[page] = None
        self._free.append(page)
        self._events.append(PageEvent(key, False))
        self.evicted_blocks += 1

    def _link_newest(self, page: int) -> None:
        last = self._previous[_NONE]
        self._next[last], self._previous[page] = page, last
        self._next[page], self._previous[_NONE] = _NONE, page
        self._cached += 1

    def _unlink(self, page: int) -> None:
        before, after = self._previous[page], self._next[page]
        self._next[before], self._previous[after] = after, before
        self._cached -= 1

    def check_invariants(self) -> None:
        """Assert that every page is in exactly one state and that links and counts agree."""
        cached, page = [], self._next[_NONE]
        while page != _NONE:
            assert self._previous[self._next[page]] == page
            cached.append(page)
            page = self._next[page]
        used = [p for p in range(1, self.num_pages) if self._references[p] > 0]
        assert len(cached) == self._cached
        assert sorted([*cached, *used, *self._free]) == list(range(1, self.num_pages))
        assert all(self._key[p] is None and self._references[p] == 0 for p in self._free)
        assert all(self._key[p] is not None for p in cached)
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._page_of
        for page in range(1, self.num_pages):
            children = sum(1 for p in self._parent if p == page)
            assert children == self._children[page]
            assert not children or self._key[page] is not None
