"""Which L1 page holds which block: references, prefix lookup, leaf-first eviction, leases.

Pure bookkeeping over page numbers; the bytes are in compute/model/pages.py. Only the engine thread
calls the pool. The eviction policy (policies/) chooses which unused leaf goes; page 0 is the null
page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierkv.compute.l1.part_index import PartIndex
from tierkv.kvcore import limits
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Expectation, Tier
from tierkv.kvcore.block_event import BlockEvent, BlockRemoved, BlockStored, HoldOrder
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import NO_FACTS, BlockFacts, EvictionPolicy, LeafLru, whole_seconds
from tierkv.policies.holds import Holds

_NONE = 0
_PARTIAL_SHARE = 16
"""Where pages are short, unfinished blocks hold at most this part of the pages: full blocks spare
more.
"""


@dataclass(frozen=True, slots=True)
class FullBlock:
    """A block that is, or in a moment will be, full and findable; named by the batcher.

    The page keeps the block only while the maker of the value holds a reference on the page.

    Attributes:
        spec: the block, without its ranges, which depend on the codec.
        page: the page that holds the block.
        partial: the block is not full; handoffs and preemptions save such blocks.
    """

    spec: BlockSpec
    page: int
    partial: bool = False


class PagePool:
    """Pages of one node. Every page but 0 is in exactly one of three states.

    free (no reference, no key) -> used (referenced; may get a key by ``commit``) -> cached (no
    reference, but a key: evictable, never before its children, while no lease holds the page) ->
    free or used.

    Attributes:
        num_pages: pages including the null page.
        evicted_blocks: keyed pages whose content was given up, ever.
        holds: pages under lease, at most half of all; requests win over leases when pages are
            short.
        parts: content of pages token by token, for prompts ending inside a block; a page without a
            key is listed only while in use.
        _partial: pages with the key of an unfinished block, the oldest use first. Only ``parts``
            finds these pages; they have no children and cause no events.
        _erased: pages in use that go when their last request ends; ``lookup`` does not find them.
        _offered: pages the policy may name. A named page may be unable to go just then: the policy
            drops the page, and the pool offers the page again later.
    """

    def __init__(
        self,
        num_pages: int,
        policy: EvictionPolicy | None = None,
        *,
        now: Callable[[], float] = lambda: 0.0,
        wipe: Callable[[Sequence[int]], None] = lambda pages: None,
    ) -> None:
        """Begin with free pages.

        Args:
            num_pages: pages including the null page.
            policy: chooses the page to evict; None is leaf-LRU.
            now: returns the engine's time, at uses and evictions.
            wipe: overwrites the content of erased pages.
        """
        if num_pages < 2:
            raise ValueError("a page pool needs the null page and at least one more")
        self.num_pages = num_pages
        self.evicted_blocks = 0
        self.holds = Holds((num_pages - 1) // 2)
        self.parts: PartIndex[int] = PartIndex()
        self._policy = policy if policy is not None else LeafLru()
        self._now = now
        self._wipe = wipe
        self._erased: set[int] = set()
        self._references = [0] * num_pages
        self._key: list[BlockKey | None] = [None] * num_pages
        self._parent = [_NONE] * num_pages
        self._children = [0] * num_pages
        self._offered = [False] * num_pages
        self._facts = [NO_FACTS] * num_pages
        self._page_of: dict[BlockKey, int] = {}
        self._free = list(range(num_pages - 1, 0, -1))  # Popped from the end: low pages first.
        self._partial: dict[int, None] = {}
        self._cached = 0
        self._events: list[BlockEvent] = []

    @property
    def available(self) -> int:
        """Pages ``allocate`` could give, if no cached page is blocked by a used child."""
        return len(self._free) + self._cached

    @property
    def used(self) -> int:
        """Referenced pages."""
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
            if page is None or page in self._erased:
                break
            pages.append(page)
        return pages

    def key_of(self, page: int) -> BlockKey | None:
        """Return the key of a page; None for a page that is not findable by key."""
        return self._key[page]

    def unreferenced(self, pages: Sequence[int]) -> int:
        """Count pages whose acquisition would shrink ``available``."""
        return sum(1 for page in pages if self._references[page] == 0)

    def allocate(self, count: int, *, over_leases: bool = True) -> list[int] | None:
        """Take ``count`` pages, each with a reference, evicting old blocks; None: not enough pages.

        Args:
            count: number of pages.
            over_leases: leases give way, the lease with the earliest deadline first. Prefetches and
                background work can wait, and pass False.
        """
        if count > self.available:
            return None
        while len(self._free) < count:
            gone = self._evict_partial() or self._evict_one()
            if not (gone or (over_leases and self._leases_give_way())):
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
                self._cached -= 1
            self._references[page] += 1

    def facts(self, pages: Sequence[int]) -> list[BlockFacts]:
        """Return the facts about findable pages."""
        return [self._facts[page] for page in pages]

    def use(self, pages: Sequence[int], facts: Sequence[BlockFacts]) -> None:
        """Record a use of findable pages, with the request's expectation of the next use."""
        now = whole_seconds(self._now())
        for page, known in zip(pages, facts, strict=True):
            outlook = known.outlook
            if outlook.expectation is Expectation.NONE and self._children[page] > 1:
                # Chains part here: this caller's last use says nothing about the other chains.
                known = replace(known, outlook=replace(outlook, expectation=Expectation.UNKNOWN))
            self._facts[page] = known
            self._policy.used(page, known, now)
            if page in self._partial:
                self._partial[page] = self._partial.pop(page)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference from each page of a chain, from the end of the chain backwards."""
        wiped = bool(self._erased) and not self._erased.isdisjoint(pages)
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} was released twice"
            self._references[page] -= 1
            if self._references[page] > 0:
                continue
            if self._key[page] is None:
                self.parts.remove(page)
                self._free.append(page)
                if wiped:
                    self._wipe([page])
            else:
                self._cached += 1
                if page not in self._erased:
                    self._offer(page)
                elif not self._children[page]:
                    self._erase(page)

    def commit(
        self, page: int, block: BlockSpec, *, prompt_blocks: int = 0, partial: bool = False
    ) -> int:
        """Make a full, used page findable and return the page to use from now on.

        If another page has the key already, the caller's reference moves to the other page and the
        caller's own page is released: a key has one page, and holders of a child always hold the
        parent. With ``partial`` the block is not full: a partial block has no children and causes
        no events.
        """
        assert self._references[page] > 0 and self._key[page] is None
        key, parent = block.key, block.parent
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
            if self._parent[page] in self._erased:
                self._erased.add(page)
        facts = self._facts[page] = BlockFacts.of(block, prompt_blocks)
        self._policy.entered(page, facts, whole_seconds(self._now()))
        if partial:
            self._partial[page] = None
        else:
            self._events.append(BlockStored(block, Tier.L1))
        return page

    def erase(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks and all later blocks of the same prompts, and overwrite the pages.

        Pages in use are not found any more and go when their last request ends. O(pages).

        Returns:
            number of pages that are or will be erased.
        """
        after: dict[int, list[int]] = {}
        for page, parent in enumerate(self._parent):
            if parent != _NONE:
                after.setdefault(parent, []).append(page)
        named = (self._page_of.get(key) for key in keys)
        doomed = list(dict.fromkeys(page for page in named if page is not None))
        for page in doomed:  # Grows: parents before children.
            doomed += after.pop(page, ())
        doomed = list(dict.fromkeys(doomed))
        for page in reversed(doomed):
            self.parts.remove(page)
            self._erased.add(page)
            if not self._references[page] and not self._children[page]:
                self._erase(page)
        return len(doomed)

    def _erase(self, page: int) -> None:
        """Erase an unused leaf, and the unused erased pages before it that become leaves."""
        while page in self._erased and not self._references[page] and not self._children[page]:
            parent = self._parent[page]
            self._erased.remove(page)
            self.holds.gone(page)
            self._forget(page, whole_seconds(self._now()))
            self.evicted_blocks -= 1
            self._wipe([page])
            page = parent

    def is_shared(self, page: int) -> bool:
        """Return whether a used page has more than one reference."""
        return self._references[page] > 1

    def is_spare_part(self, page: int) -> bool:
        """Return whether a page is an unused, unfinished block and can go at once."""
        return page in self._partial and self._may_go(page)

    def give_up(self, page: int) -> None:
        """Forget a cached page without children, because another page has its content."""
        self._forget(page, whole_seconds(self._now()))
        self.evicted_blocks -= 1  # Nothing was lost.

    def hold(self, order: HoldOrder) -> None:
        """Carry out an order about a lease; missing blocks, and blocks beyond half of L1, are
        skipped.

        A page in use may be held as well: the page stays when its last request ends.
        """
        now = self._now()
        self._let_go(self.holds.expire(now))
        until = now + min(order.ttl_s, limits.MAX_LEASE_S)
        if order.keys:
            pages = (self._page_of.get(key) for key in order.keys)
            self.holds.hold(order.lease, [(page, 1) for page in pages if page is not None], until)
        elif order.ttl_s > 0:
            self.holds.prolong(order.lease, until)
        else:
            self._let_go(self.holds.end(order.lease))

    def drop_unused(self) -> int:
        """Forget every cached page, under lease or not; return the number of dropped pages."""
        before = self.evicted_blocks
        while self._cached and (self._evict_one() or self._leases_give_way()):
            pass
        return self.evicted_blocks - before

    def drain_events(self) -> list[BlockEvent]:
        """Return the blocks stored and evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _may_go(self, page: int) -> bool:
        return (
            self._references[page] == 0
            and self._key[page] is not None
            and not self._children[page]
            and page not in self.holds
        )

    def _offer(self, page: int) -> None:
        if not self._offered[page] and self._may_go(page):
            self._offered[page] = True
            self._policy.offer(page)

    def _evict_partial(self) -> bool:
        """Free the unfinished block with the oldest use, if there are many unfinished blocks."""
        if len(self._partial) <= self.num_pages // _PARTIAL_SHARE:
            return False
        page = next(iter(self._partial))
        if self._may_go(page):
            self._forget(page, whole_seconds(self._now()))
            return True
        return False

    def _evict_one(self) -> bool:
        """Free the unused leaf of least value; return False if no leaf is unused.

        Cost: a question to the policy per offered page, amortised.
        """
        now = self._now()
        if self.holds:
            self._let_go(self.holds.expire(now))
        now = whole_seconds(now)
        while (page := self._policy.victim(now)) is not None:
            if self._may_go(page):
                self._forget(page, now)
                return True
            self._policy.withdraw(page)
            self._offered[page] = False
        return False

    def _leases_give_way(self) -> bool:
        """End the lease with the earliest deadline; return False when there is no lease."""
        if not self.holds:
            return False
        self._let_go(self.holds.give_way())
        return True

    def _let_go(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._offer(page)

    def _forget(self, page: int, now: float) -> None:
        key = self._key[page]
        assert key is not None
        self._policy.left(page, now)
        self._offered[page] = False
        self._facts[page] = NO_FACTS
        self._cached -= 1
        del self._page_of[key]
        self._key[page] = None
        self.parts.remove(page)
        self._free.append(page)
        if page in self._partial:
            del self._partial[page]
        else:
            self._events.append(BlockRemoved(key, Tier.L1))
        self.evicted_blocks += 1
        parent, self._parent[page] = self._parent[page], _NONE
        if parent != _NONE:
            self._children[parent] -= 1
            self._offer(parent)

    def check_invariants(self) -> None:
        """Assert: every page is in exactly 1 state, and links and counts agree."""
        pages = range(1, self.num_pages)
        cached = [p for p in pages if self._references[p] == 0 and self._key[p] is not None]
        used = [p for p in pages if self._references[p] > 0]
        assert len(cached) == self._cached
        assert sorted([*cached, *used, *self._free]) == list(pages)
        assert all(self._key[p] is None and self._references[p] == 0 for p in self._free)
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._page_of
        for page in pages:
            children = sum(1 for p in self._parent if p == page)
            assert children == self._children[page]
            assert not children or self._key[page] is not None
            assert self._offered[page] or not self._may_go(page), f"page {page} is forgotten"
            assert not self._offered[page] or self._key[page] is not None
            assert page not in self.holds or self._key[page] is not None
            assert page not in self._partial or (self._key[page] and not self._children[page])
            known = self._references[page] > 0 or self._key[page] is not None
            assert known or page not in self.parts, f"page {page} is free and can be found"
        for page in self._erased:
            assert self._key[page] and (self._references[page] or self._children[page])
        self.holds.check_invariants()
        self.parts.check_invariants()
