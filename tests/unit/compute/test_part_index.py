"""The index of parts against a naive search, under additions, replacements and removals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv.compute.l1.part_index import PartIndex, scope_of
from tierkv.kvcore.block import ROOT_PARENT
from tierkv.kvcore.ids import BlockKey, NamespaceKey

TOKENS = st.lists(st.sampled_from([0, 1, 256, 70_000]), max_size=5)
STEP = st.tuples(st.integers(0, 6), st.integers(0, 1), st.none() | TOKENS)


def raw(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(steps=st.lists(STEP, max_size=20), asked=TOKENS)
def test_finds_what_shares_most(steps, asked) -> None:
    index: PartIndex[str] = PartIndex()
    known: dict[str, tuple[int, list[int]]] = {}
    for number, scope, tokens in steps:
        item = f"item {number}"
        if tokens is None:
            index.remove(item)
            known.pop(item, None)
        else:
            index.add(bytes([scope]), raw(tokens), item)
            known[item] = scope, tokens
        index.check_invariants()
    shared = {item: common(tokens, asked) for item, (scope, tokens) in known.items() if scope == 0}
    found = index.find(b"\0", raw(asked))
    best = max(shared.values(), default=0)
    assert (found.tokens if found else 0) == best
    assert found is None or shared[found.item] == best
    shorter = index.shortened(b"\0", raw(asked))
    assert shorter is None or known[shorter][1] == asked[: len(known[shorter][1])] != asked
    assert len(index) == len(known)


def test_first_blocks_of_two_namespaces_do_not_meet() -> None:
    one, other = NamespaceKey(b"1" * 32), NamespaceKey(b"2" * 32)
    assert scope_of(one, ROOT_PARENT) != scope_of(other, ROOT_PARENT)
    parent = BlockKey(b"p" * 16)
    assert scope_of(one, parent) == scope_of(other, parent) == parent
