"""Tiles are a partition whose padding and gathered keys are bounded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.compute.model.row_groups import CALL_PAIRS, MOST_PAIRS, TILE_KEYS, find_tiles

RESTS = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 1500)), max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rests=RESTS)
def test_tiles_are_a_partition_and_padding_costs_less_than_calls(rests) -> None:
    queries = np.array([q for q, _ in rests], dtype=np.int64)
    keys = np.array([q + before for q, before in rests], dtype=np.int64)
    tiles = find_tiles(queries, keys)
    members = [i for tile in tiles.tiles for i in tile]
    assert sorted([*members, *tiles.large]) == list(range(len(rests)))
    for tile in map(list, tiles.tiles):
        assert len(tile) == 1 or len(tile) * keys[tile].max() <= TILE_KEYS
        padded = len(tile) * queries[tile].max() * keys[tile].max()
        pairs = queries[tile] * keys[tile]
        assert padded - pairs.sum() <= (len(tile) - 1) * CALL_PAIRS
        assert pairs.max() <= MOST_PAIRS


def test_equal_rests_fill_a_tile() -> None:
    tiles = find_tiles(np.full(20, 34), np.full(20, 512))
    assert [len(tile) for tile in tiles.tiles] == [8, 8, 4]
    assert tiles.large == ()


def test_a_rest_behind_very_much_is_left_alone() -> None:
    tiles = find_tiles(np.array([34, 34, 60, 34]), np.array([100, 100, 2_000, 100]))
    assert (tiles.tiles, tiles.large) == (((0, 1, 3),), (2,))


def test_no_rest_no_tile() -> None:
    none = np.array([], dtype=np.int64)
    assert find_tiles(none, none).tiles == find_tiles(none, none).large == ()
