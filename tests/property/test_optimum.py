"""Belady's rule against all that could be done, on traces small enough to try everything."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.policies.select import PRODUCTION_POLICIES
from tierkv.simulator.cache_replay import replay
from tierkv.simulator.trace import Request
from tierkv.simulator.yardsticks import BLOCK_POLICIES

Chain = tuple[int, ...]


def chain_of(path: tuple[int, ...]) -> Chain:
    """Name each prefix of a path in a binary tree: 1, then 2 or 3, then 4 to 7."""
    ids = [1]
    for step in path:
        ids.append(2 * ids[-1] + step)
    return tuple(ids[1:])


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple).map(chain_of)
TRACES = st.lists(PATHS, min_size=1, max_size=7)


def requests_of(chains: list[Chain]) -> list[Request]:
    return [Request(float(i), 512 * len(c), 1, c) for i, c in enumerate(chains)]


def most_hits(chains: list[Chain], capacity: int) -> int:
    """Try every set of blocks that could be kept after each request."""

    @cache
    def best(step: int, kept: frozenset[int]) -> int:
        if step == len(chains):
            return 0
        chain = chains[step]
        hits = next((i for i, block in enumerate(chain) if block not in kept), len(chain))
        known = kept | set(chain)
        sizes = range(min(capacity, len(known)) + 1)
        choices = (frozenset(some) for size in sizes for some in combinations(sorted(known), size))
        return hits + max(best(step + 1, choice) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=150)
@given(TRACES, st.integers(1, 4))
def test_no_way_of_keeping_blocks_hits_more(chains: list[Chain], capacity: int) -> None:
    result = replay(requests_of(chains), "belady", capacity)
    assert result.block_hits == most_hits(chains, capacity)


@settings(max_examples=60)
@given(TRACES, st.integers(1, 4))
def test_no_policy_beats_the_optimum(chains: list[Chain], capacity: int) -> None:
    requests = requests_of(chains)
    most = replay(requests, "belady", capacity).block_hits
    for name in PRODUCTION_POLICIES | BLOCK_POLICIES:
        for order in ("head", "tail", "leaves"):
            assert replay(requests, name, capacity, order=order).block_hits <= most
