"""The page pool against a naive model: states, prefixes, leaf-first eviction, leases, no page lost.

Under every policy there is: which leaf goes is its choice, that only leaves go is the pool's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tierkv.compute.l1.page_pool import PagePool
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Expectation, Outlook
from tierkv.kvcore.block_event import BlockStored, HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import BlockFacts
from tierkv.policies.select import PRODUCTION_POLICIES, make_policy


def key_of(path: tuple[int, ...]) -> BlockKey:
    return BlockKey(repr(path).encode())


class PagePoolMachine(RuleBasedStateMachine):
    """Chains are paths in a small tree; a holder has a path and the pages of its blocks."""

    policy = "leaf_lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wiped: list[int] = []
        self.pool = PagePool(
            12, make_policy(self.policy, 11), now=lambda: self.now, wipe=self.wiped.extend
        )
        self.erased: set[BlockKey] = set()
        self.leases: dict[int, tuple[set[BlockKey], float]] = {}
        self.over_leases = True
        self.holders: list[tuple[tuple[int, ...], list[int]]] = []
        self.pins: list[int] = []
        self.content: dict[BlockKey, int] = {}

    def _watch(self) -> None:
        """Follow the event log; a parent may only go after its children."""
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                assert event.key not in self.content
                parent = event.block.parent
                assert parent == ROOT_PARENT or parent in self.content
                self.content[event.key] = 1
            else:
                del self.content[event.key]
                self.erased.discard(event.key)
                assert self.over_leases or not self._is_held(event.key), "a lease was broken"
                inner = event.key[:-1].rstrip(b",")
                assert not any(k != event.key and k.startswith(inner + b",") for k in self.content)

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def take_chain(self, path: tuple[int, ...]) -> None:
        keys = [key_of(path[: i + 1]) for i in range(len(path))]
        pages = self.pool.lookup(keys)
        assert len(pages) == next(
            (i for i, k in enumerate(keys) if k not in self.content or k in self.erased),
            len(keys),
        )
        self.pool.acquire(pages)
        self.pool.use(pages, self._facts(pages))
        fresh = self._allocate(len(path) - len(pages))
        if fresh is None:
            self.pool.release(pages)
            return
        for page in fresh:
            block = len(pages)
            parent = keys[block - 1] if block else ROOT_PARENT
            pages.append(self.pool.commit(page, BlockSpec(keys[block], parent, 64)))
            if parent in self.erased:
                self.erased.add(keys[block])
        self.holders.append((path, pages))

    def _facts(self, pages: list[int]) -> list[BlockFacts]:
        """What some request may say: anything, by turns."""
        says = Expectation(int(self.now) % len(Expectation))
        outlook = Outlook(expectation=says)
        return [replace(known, outlook=outlook) for known in self.pool.facts(pages)]

    def _allocate(self, count: int, *, over_leases: bool = True) -> list[int] | None:
        self._watch()
        self.over_leases = over_leases
        pages = self.pool.allocate(count, over_leases=over_leases)
        self._watch()
        self.over_leases = True
        if over_leases and self.pool.holds.held < len(self._held()):
            self.leases.clear()  # Some gave way, which is checked where there are no others.
            for lease in range(3):
                self.pool.hold(HoldOrder(LeaseId(lease + 1), (), 0.0))
        return pages

    @rule(count=st.integers(1, 5), over_leases=st.booleans())
    def take_private(self, count: int, over_leases: bool) -> None:
        before, held = self.pool.available, self._held()
        pages = self._allocate(count, over_leases=over_leases)
        if pages is None:
            assert before < count or self.pins or (held and not over_leases)
        else:
            self.holders.append(((), pages))

    def _is_held(self, key: BlockKey) -> bool:
        return any(key in keys and until > self.now for keys, until in self.leases.values())

    def _held(self) -> set[BlockKey]:
        return {key for key in self.content if self._is_held(key)}

    @rule(
        lease=st.integers(1, 3),
        path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
        ttl_s=st.sampled_from([2.0, 8.0]),
    )
    def lease_a_chain(self, lease: int, path: tuple[int, ...], ttl_s: float) -> None:
        keys = tuple(key_of(path[: i + 1]) for i in range(len(path)))
        self.pool.hold(HoldOrder(LeaseId(lease), keys, ttl_s))
        kept, until = self.leases.get(lease, (set(), 0.0))
        kept = kept if until > self.now else set()
        room = 5 - len(self._held() - kept)
        for key in keys:
            if key in self.content and (self._is_held(key) or key in kept or room > len(kept)):
                kept = kept | {key}
        if kept:
            self.leases[lease] = (kept, self.now + ttl_s)
        assert self.pool.holds.held <= 5

    @rule(lease=st.integers(1, 3))
    def end_a_lease(self, lease: int) -> None:
        self.pool.hold(HoldOrder(LeaseId(lease), (), 0.0))
        self.leases.pop(lease, None)

    @rule(step=st.sampled_from([0.25, 1.0, 5.0]))
    def wait(self, step: float) -> None:
        self.now += step

    @rule()
    def commit_known_key_moves_to_the_known_page(self) -> None:
        known = [(path, pages) for path, pages in self.holders if path]
        page = self._allocate(1) if known else None
        if page is None:
            return
        path, pages = known[0]
        parent = key_of(path[:-1]) if len(path) > 1 else ROOT_PARENT
        assert self.pool.commit(page[0], BlockSpec(key_of(path), parent, 64)) == pages[-1]
        self.pool.release([pages[-1]])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        _, pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)

    @precondition(lambda self: any(path for path, _ in self.holders))
    @rule(data=st.data())
    def pin_one_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([p for path, ps in self.holders if path for p in ps]))
        self.pool.acquire([page])
        self.pins.append(page)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.pool.release([self.pins.pop()])

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple))
    def erase(self, path: tuple[int, ...]) -> None:
        self._watch()
        inner = key_of(path)[:-1].rstrip(b",")
        doomed = {k for k in self.content if k == key_of(path) or k.startswith(inner + b",")}
        if key_of(path) not in self.content:
            doomed = set()
        for keys, _ in self.leases.values():
            keys.difference_update(doomed)
        self.wiped.clear()
        before = set(self.content)
        assert self.pool.erase([key_of(path)]) == len(doomed)
        self.erased |= doomed
        self._watch()
        assert len(self.wiped) == len(before) - len(self.content)
        if not self.pins and not self.holders:
            assert not doomed & set(self.content)

    @rule()
    def drop_unused(self) -> None:
        self.pool.drop_unused()
        self._watch()
        self.leases.clear()
        for lease in range(3):
            self.pool.hold(HoldOrder(LeaseId(lease + 1), (), 0.0))
        if not self.holders and not self.pins:
            assert self.pool.keyed == 0 and self.pool.available == 11

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        self._watch()
        held = {page for _, pages in self.holders for page in pages} | set(self.pins)
        assert self.pool.used == len(held)
        assert self.pool.keyed == len(self.content)


@pytest.mark.parametrize("policy", sorted(PRODUCTION_POLICIES))
def test_pages_under_any_policy(policy: str) -> None:
    machine = type("Machine", (PagePoolMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True),
    )


def test_eviction_takes_the_oldest_leaf_first() -> None:
    pool = PagePool(5)
    chain = pool.allocate(3)
    parent = ROOT_PARENT
    for i, page in enumerate(chain):
        pool.commit(page, BlockSpec(BlockKey(b"%d" % i), parent, 64))
        parent = BlockKey(b"%d" % i)
    pool.release(chain)
    pool.drain_events()
    pool.allocate(3)
    assert [event.key for event in pool.drain_events()] == [b"2", b"1"]
    assert pool.lookup([BlockKey(b"0")]) == [chain[0]]
