from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.compute.l1.page_pool import PagePool
from tierkv.kvcore.block import ROOT_PARENT, BlockSpec, Expectation, Outlook
from tierkv.kvcore.block_event import BlockRemoved, HoldOrder, LeaseId
from tierkv.kvcore.ids import BlockKey
from tierkv.policies.eviction import LeafLru


class Pool(PagePool):
    """A pool on a clock that stands still until a test moves it."""

    def __init__(self, pages: int) -> None:
        self.time_s = 0.0
        super().__init__(pages, LeafLru(), now=lambda: self.time_s)


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def cache_chain(pool: PagePool, names: Sequence[str]) -> list[int]:
    """Store a chain and use it no more."""
    pages = pool.allocate(len(names))
    assert pages is not None
    parent = ROOT_PARENT
    for page, name in zip(pages, names, strict=True):
        pool.commit(page, BlockSpec(key(name), parent, 64))
        parent = key(name)
    pool.release(pages)
    return pages


def evicted(pool: PagePool) -> list[str]:
    return [event.key.decode() for event in pool.drain_events() if isinstance(event, BlockRemoved)]


def test_a_leased_chain_stays_until_the_lease_ends() -> None:
    pool = Pool(7)
    cache_chain(pool, "ab")
    cache_chain(pool, "cdef")
    pool.hold(HoldOrder(LeaseId(1), (key("a"), key("b")), 10.0))
    pool.release(pool.allocate(4, over_leases=False) or [])
    assert evicted(pool) == ["f", "e", "d", "c"]
    pool.hold(HoldOrder(LeaseId(1), (), 0.0))
    assert pool.allocate(6, over_leases=False) is not None
    assert evicted(pool) == ["b", "a"]
    pool.check_invariants()


def test_a_lease_ends_by_itself_and_may_be_prolonged() -> None:
    pool = Pool(3)
    cache_chain(pool, "a")
    pool.hold(HoldOrder(LeaseId(1), (key("a"),), 10.0))
    pool.time_s = 9.0
    pool.hold(HoldOrder(LeaseId(1), (), 5.0))
    pool.time_s = 13.9
    assert pool.allocate(2, over_leases=False) is None
    pool.time_s = 14.0
    assert pool.allocate(2, over_leases=False) is not None
    assert evicted(pool) == ["a"]


def test_requests_win_over_leases_and_the_first_to_end_gives_way() -> None:
    pool = Pool(5)
    for name in "abcd":
        cache_chain(pool, name)
    pool.hold(HoldOrder(LeaseId(1), (key("a"),), 20.0))
    pool.hold(HoldOrder(LeaseId(2), (key("b"),), 10.0))
    assert pool.allocate(3) is not None
    assert evicted(pool) == ["c", "d", "b"], "what nobody holds goes first"
    assert len(pool.holds) == 1


def test_at_most_half_of_the_pages_are_held_heads_first() -> None:
    pool = Pool(9)
    cache_chain(pool, "abcdef")
    pool.hold(HoldOrder(LeaseId(1), tuple(key(name) for name in "abcdef"), 10.0))
    assert (pool.holds.held, pool.holds.refused) == (4, 2)
    assert pool.allocate(4, over_leases=False) is not None
    assert evicted(pool) == ["f", "e"]


def test_a_page_in_use_is_held_after_its_request() -> None:
    pool = Pool(3)
    pages = pool.allocate(1)
    assert pages is not None
    pool.commit(pages[0], BlockSpec(key("a"), ROOT_PARENT, 64))
    pool.hold(HoldOrder(LeaseId(1), (key("a"),), 10.0))
    pool.release(pages)
    assert pool.allocate(2, over_leases=False) is None
    assert pool.drop_unused() == 1, "who drops the cache means all of it"


def test_too_much_is_refused_before_anything_goes() -> None:
    pool = Pool(4)
    cache_chain(pool, "ab")
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert evicted(pool) == []


def test_where_chains_part_one_callers_last_use_is_not_the_end() -> None:
    pool = Pool(6)
    head = cache_chain(pool, "a")
    for tail in "bc":
        (page,) = pool.allocate(1) or []
        pool.commit(page, BlockSpec(key(tail), key("a"), 64))
        pool.release([page])
    facts = [replace(known, outlook=Outlook(Expectation.NONE)) for known in pool.facts(head)]
    pool.use(head, facts)
    assert pool.facts(head)[0].outlook.expectation is Expectation.UNKNOWN
    tail_page = pool.lookup([key("b")])
    pool.use(tail_page, [replace(pool.facts(tail_page)[0], outlook=Outlook(Expectation.NONE))])
    assert pool.facts(tail_page)[0].outlook.expectation is Expectation.NONE
