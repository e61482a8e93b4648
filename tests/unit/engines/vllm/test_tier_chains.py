"""Chunks name the one before them, whatever order vLLM offers them in, and never in a circle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.integrations.vllm.tier_chains import ChainEnds, parents_of


def key(number: int, group: int = 0) -> bytes:
    return b"hash%d" % number + group.to_bytes(4, "big")


def end_of(chunk: bytes) -> int:
    return 16 * (1 + int(chunk[4:-4]))


def test_a_set_of_chunks_is_put_in_order() -> None:
    chain = ChainEnds()
    keys = [key(n) for n in range(5)]
    assert parents_of(set(keys[:3]), end_of, chain) == {keys[1]: keys[0], keys[2]: keys[1]}
    assert parents_of(keys[3:], end_of, chain) == {keys[3]: keys[2], keys[4]: keys[3]}


def test_groups_are_chains_of_their_own() -> None:
    keys = {key(n, group) for n in range(2) for group in (0, 1)}
    assert parents_of(keys, end_of, ChainEnds()) == {
        key(1, 0): key(0, 0),
        key(1, 1): key(0, 1),
    }


def test_what_is_offered_again_gets_no_parent_behind_it() -> None:
    chain = ChainEnds()
    parents_of([key(0), key(1)], end_of, chain)
    assert parents_of([key(0), key(1)], end_of, chain) == {}


def test_a_chunk_at_an_unknown_place_has_no_parent() -> None:
    assert parents_of([key(0), key(1)], lambda _: None, ChainEnds()) == {}


@given(st.lists(st.sets(st.integers(0, 12), max_size=6), max_size=8))
def test_parents_always_come_before(jobs: list[set[int]]) -> None:
    chain = ChainEnds()
    for job in jobs:
        for child, parent in parents_of({key(n) for n in job}, end_of, chain).items():
            assert end_of(parent) < end_of(child)
