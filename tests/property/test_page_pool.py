"""The page pool against a naive model: states, prefixes, leaf-first eviction, no page lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compute.page_pool import PagePool
from kvcore.block_key import ROOT_PARENT
from kvcore.ids import BlockKey


def key_of(path: tuple[int, ...]) -> BlockKey:
    return BlockKey(repr(path).encode())


class PagePoolMachine(RuleBasedStateMachine):
    """Chains are paths in a small tree; a holder has a path and the pages of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.holders: list[tuple[tuple[int, ...], list[int]]] = []
        self.pins: list[int] = []
        self.content: dict[BlockKey, int] = {}

    def _watch(self) -> None:
        """Follow the event log; a parent may only go after its children."""
        for event in self.pool.drain_events():
            if event.stored:
                assert event.key not in self.content
                assert event.parent == ROOT_PARENT or event.parent in self.content
                self.content[event.key] = 1
            else:
                del self.content[event.key]
                inner = event.key[:-1].rstrip(b",")
                assert not any(k != event.key and k.startswith(inner + b",") for k in self.content)

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def take_chain(self, path: tuple[int, ...]) -> None:
        keys = [key_of(path[: i + 1]) for i in range(len(path))]
        pages = self.pool.lookup(keys)
        assert len(pages) == next(
            (i for i, k in enumerate(keys) if k not in self.content), len(keys)
        )
        self.pool.acquire(pages)
        fresh = self.pool.allocate(len(path) - len(pages))
        self._watch()
        if fresh is None:
            self.pool.release(pages)
            return
        for page in fresh:
            block = len(pages)
            parent = keys[block - 1] if block else ROOT_PARENT
            pages.append(self.pool.commit(page, keys[block], parent))
        self.holders.append((path, pages))

    @rule(count=st.integers(1, 5))
    def take_private(self, count: int) -> None:
        before = self.pool.available
        pages = self.pool.allocate(count)
        if pages is None:
            assert before < count or self.pins
        else:
            self.holders.append(((), pages))

    @rule()
    def commit_known_key_moves_to_the_known_page(self) -> None:
        known = [(path, pages) for path, pages in self.holders if path]
        page = self.pool.allocate(1) if known else None
        if page is None:
            return
        path, pages = known[0]
        parent = key_of(path[:-1]) if len(path) > 1 else ROOT_PARENT
        assert self.pool.commit(page[0], key_of(path), parent) == pages[-1]
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

    @rule()
    def drop_unused(self) -> None:
        self.pool.drop_unused()
        self._watch()
        if not self.holders and not self.pins:
            assert self.pool.keyed == 0 and self.pool.available == 11

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        self._watch()
        held = {page for _, pages in self.holders for page in pages} | set(self.pins)
        assert self.pool.used == len(held)
        assert self.pool.keyed == len(self.content)


PagePoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestPagePool = PagePoolMachine.TestCase


def test_eviction_takes_the_oldest_leaf_first() -> None:
    pool = PagePool(5)
    chain = pool.allocate(3)
    parent = ROOT_PARENT
    for i, page in enumerate(chain):
        pool.commit(page, BlockKey(b"%d" % i), parent)
        parent = BlockKey(b"%d" % i)
    pool.release(chain)
    pool.drain_events()
    pool.allocate(3)
    assert [event.key for event in pool.drain_events()] == [b"2", b"1"]
    assert pool.lookup([BlockKey(b"0")]) == [chain[0]]
