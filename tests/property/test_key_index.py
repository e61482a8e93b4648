"""The key index against a dictionary: crowded buckets, removals, growth that goes on meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.metaserver.directory.arrays import U8, FreeList, reserve
from tierkv.metaserver.directory.key_index import KeyIndex, hashes_of

CROWD = 6
"""Keys come from so few groups of equal hashes that buckets overflow into the next ones."""


class KeyIndexMachine(RuleBasedStateMachine):
    """Keys are (group, number) pairs: all of a group have one hash."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: U8 = reserve(1 << 14, 4)
        self.rows[0, :2] = np.uint64(2**64 - 1)
        self.index = KeyIndex(self.rows)
        self.numbers = FreeList(first=1, limit=1 << 14)
        self.model: dict[tuple[int, int], int] = {}

    def halves(self, keys: list[tuple[int, int]]) -> tuple[U8, U8]:
        """Solve for keys of equal hash: the low half undoes what the high half does."""
        numbers = np.array([number for _, number in keys], np.uint64)
        groups = np.array([group for group, _ in keys], np.uint64)
        return (numbers * np.uint64(0x9E3779B97F4A7C15)) ^ groups, numbers

    @rule(group=st.integers(0, CROWD), first=st.integers(0, 40), count=st.integers(1, 30))
    def insert(self, group: int, first: int, count: int) -> None:
        keys = [(group, first + n) for n in range(count) if (group, first + n) not in self.model]
        if keys:
            self.put(keys)

    @rule(first=st.integers(100, 5_000), count=st.just(400))
    def insert_many(self, first: int, count: int) -> None:
        keys = [(99, first + n) for n in range(count) if (99, first + n) not in self.model]
        keys = [(number, number) for _, number in keys if (number, number) not in self.model]
        if keys and len(self.model) < 10_000:
            self.put(keys)

    def put(self, keys: list[tuple[int, int]]) -> None:
        low, high = self.halves(keys)
        rows = self.numbers.take(len(keys))
        self.rows[rows, 0], self.rows[rows, 1] = low, high
        self.index.insert(low, high, rows)
        self.model.update(zip(keys, rows.tolist(), strict=True))

    @rule(data=st.data(), share=st.integers(2, 5))
    def remove(self, data: st.DataObject, share: int) -> None:
        keys = list(self.model)[data.draw(st.integers(0, share - 1)) :: share]
        if keys:
            rows = np.array([self.model.pop(key) for key in keys])
            self.index.remove(*self.halves(keys), rows)
            self.numbers.give_back(rows)

    @invariant()
    def every_key_is_found_and_no_other(self) -> None:
        known = list(self.model)
        asked = known + [(group, 60 + n) for group in range(CROWD) for n in range(3)]
        found, rows = self.index.find(*self.halves(asked))
        assert found.tolist() == [self.model.get(key, 0) for key in asked]
        assert np.array_equal(rows[: len(known)], self.rows[found[: len(known)]])

    @invariant()
    def entries_are_exactly_the_live_rows(self) -> None:
        self.index.check_invariants(np.array(list(self.model.values()), np.int64))
        assert len(self.index) == len(self.model)


TestKeyIndex = KeyIndexMachine.TestCase
TestKeyIndex.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)


@pytest.mark.parametrize("step", [300, 5_000])
def test_an_index_that_grows_bucket_by_bucket_keeps_all_keys(step: int) -> None:
    rows = reserve(1 << 18, 4)
    rows[0, :2] = np.uint64(2**64 - 1)
    index = KeyIndex(rows)
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**63, (100_000, 2), dtype=np.uint64)
    rows[1:100_001, :2] = keys
    for start in range(0, len(keys), step):
        part = keys[start : start + step]
        index.insert(part[:, 0], part[:, 1], np.arange(start + 1, start + 1 + len(part)))
    found, _ = index.find(keys[:, 0].copy(), keys[:, 1].copy())
    assert np.array_equal(found, np.arange(1, len(keys) + 1))
    index.check_invariants(np.arange(1, len(keys) + 1))


def test_the_key_that_cant_be_is_not_found_even_where_its_bucket_is_full() -> None:
    rows = reserve(1 << 16, 4)
    nobody = np.array([2**64 - 1], np.uint64)
    rows[0, :2] = nobody
    index = KeyIndex(rows)
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**63, (200_000, 2), dtype=np.uint64)
    near = (hashes_of(keys[:, 0], keys[:, 1]) >> np.uint64(27)) == (
        hashes_of(nobody, nobody) >> np.uint64(27)
    )
    some = keys[near][:64]
    rows[1 : len(some) + 1, :2] = some
    index.insert(some[:, 0].copy(), some[:, 1].copy(), np.arange(1, len(some) + 1))
    asked = np.concatenate((some[:1], nobody.repeat(2)[None], some[1:2]))
    found, _ = index.find(asked[:, 0].copy(), asked[:, 1].copy())
    assert found.tolist() == [1, 0, 2]
