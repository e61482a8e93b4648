"""Which short rests behind cached beginnings are attended to by one call.

Pure: lengths in, a partition out. Called while a batch is laid out (compute/model/batch.py). A
call on a CPU has a fixed cost of some tens of microseconds, which counts where a sequence has few
tokens left to compute. Sequences of one call are padded to the longest of them, so only like ones
go together, and no more at a time than fit a processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

LONGEST_REST = 64
"""New tokens of a sequence, at most, to be attended to together with others."""
MOST_PAIRS = 1 << 15
"""Queries times keys of one sequence: beyond this a call's fixed cost no longer counts."""
CALL_PAIRS = 1 << 9
"""Padded pairs that cost as much as another call."""
TILE_KEYS = 1 << 12
"""Keys gathered for one call, padding included: 2 MiB with 2 heads of 32 float32."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A partition of rests.

    Attributes:
        tiles: indices of the rests of each call; of a single one that is like no other, too.
        large: indices of rests that gain nothing by company, whatever they share.
    """

    tiles: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]


def find_tiles(queries: Int64Array, keys: Int64Array) -> Tiles:
    """Put rests of like length together.

    O(n log n). Padding costs less than the calls it spares, and no tile gathers more than
    ``TILE_KEYS`` keys.

    Args:
        queries: ``[n]``, new tokens of each rest.
        keys: ``[n]``, what each attends to.
    """
    tiles: list[list[int]] = []
    pairs = most_queries = 0
    small = queries * keys <= MOST_PAIRS
    for i in np.lexsort((queries, keys)).tolist():
        if not small[i]:
            continue
        count, width = int(queries[i]), int(keys[i])  # Keys ascend: the last one has the most.
        longest = max(most_queries, count)
        members = len(tiles[-1]) + 1 if tiles else 0
        padding = members * longest * width - pairs - count * width
        if tiles and members * width <= TILE_KEYS and padding <= (members - 1) * CALL_PAIRS:
            tiles[-1].append(i)
            pairs, most_queries = pairs + count * width, longest
        else:
            tiles.append([i])
            pairs, most_queries = count * width, count
    return Tiles(tuple(map(tuple, tiles)), tuple(np.flatnonzero(~small).tolist()))
