"""Rows of a batch that share one attention call on a CPU: cohorts that decode, and short rests.

Pure: page tables and lengths in, a partition out; called while compute/model/batch.py lays out a
batch. A cohort is a group of decoding rows with the same leading pages, which are read once for the
whole cohort. Pages are compared by number, because equal findable tokens share one page. A tile is
a group of short rests of similar length, padded to the longest: each call has a fixed cost of some
tens of microseconds, and a tile must fit a processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST_REST = 64
"""Most new tokens of a sequence that may share an attention call."""
MOST_PAIRS = 1 << 15
"""Queries times keys of one sequence; above this bound the fixed cost of a call is negligible."""
CALL_PAIRS = 1 << 9
"""Number of padded pairs that cost as much as another call."""
TILE_KEYS = 1 << 12
"""Keys gathered for one call, padding included: 2 MiB with 2 heads of 32 float32."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A partition of rests.

    Attributes:
        tiles: indices of the rests of each call; a call may have a single rest.
        large: indices of rests too large to gain from a shared call, whatever pages they share.
    """

    tiles: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]


def find_tiles(queries: Int64Array, keys: Int64Array) -> Tiles:
    """Group rests of similar length.

    O(n log n). Padding costs less than the saved calls, and no tile of several rests gathers more
    than ``TILE_KEYS`` keys.

    Args:
        queries: ``[n]``, new tokens of each rest.
        keys: ``[n]``, keys that each rest attends to.
    """
    tiles: list[list[int]] = []
    pairs = most_queries = 0
    small = queries * keys <= MOST_PAIRS
    for i in np.lexsort((queries, keys)).tolist():
        if not small[i]:
            continue
        count, width = int(queries[i]), int(keys[i])  # Keys ascend: the last rest has the most.
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


Int64Array = NDArray[np.int64]

LEAST_SAVED_TOKENS = 512
"""Fewest saved key reads for which two attention calls are cheaper than one (bench.decoding)."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows with the same leading pages in their page tables.

    Attributes:
        members: indices of the rows, ascending.
        shared_pages: leading pages that are read once; 0: no pages are shared.
    """

    members: tuple[int, ...]
    shared_pages: int

    @property
    def saved_pages(self) -> int:
        """Page reads saved by sharing."""
        return self.shared_pages * (len(self.members) - 1)


def find_cohorts(table: Int64Array, full_pages: Int64Array, *, least_saved: int) -> list[Cohort]:
    """Partition rows to read the fewest pages; rows that share too little stay together.

    O(rows x pages): each page is read once on the way down the tree of beginnings.

    Args:
        table: ``[rows, pages]``, page numbers, one row per sequence.
        full_pages: ``[rows]``, number of leading pages that all queries of a row see in full.
        least_saved: fewest saved pages for which a cohort is worthwhile.

    Returns:
        cohorts: the sharing cohorts; then, if any rows are left, one cohort without sharing.
    """
    sharing = [
        cohort
        for cohort in _best(table, full_pages, np.arange(len(table)), 0)
        if cohort.saved_pages >= max(1, least_saved)
    ]
    taken = {row for cohort in sharing for row in cohort.members}
    rest = tuple(row for row in range(len(table)) if row not in taken)
    return [*sharing, Cohort(rest, 0)] if rest else sharing


def _best(table: Int64Array, full: Int64Array, rows: Int64Array, depth: int) -> Sequence[Cohort]:
    """Keep rows that agree on ``depth`` pages together, or split them to save more reads."""
    if len(rows) < 2:
        return ()
    most = int(full[rows].min())
    window = table[rows, depth:most]
    differs = (window != window[0]).any(axis=0)
    common = depth + int(differs.argmax() if differs.any() else max(0, most - depth))
    whole = Cohort(tuple(rows.tolist()), common)
    deeper = rows[full[rows] > common]
    if len(deeper) < 2:
        return (whole,)
    pages = table[deeper, common]
    parts = [
        cohort
        for page in np.unique(pages)
        for cohort in _best(table, full, deeper[pages == page], common + 1)
    ]
    return parts if sum(part.saved_pages for part in parts) > whole.saved_pages else (whole,)
