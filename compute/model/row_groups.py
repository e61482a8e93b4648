"""Which rows of a batch share one call of attention on a CPU: cohorts that decode, and short rests.

Pure: page tables and lengths in, a partition out; called while a batch is laid out
(compute/model/batch.py). A cohort is a group of decoding rows with the same leading pages, read
once for all of them; pages are compared by number, because equal findable tokens have one page.
A tile is a group of short rests of similar length, padded to the longest: one call has a fixed cost
of some tens of microseconds, and a tile must fit a processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


Int64Array = NDArray[np.int64]

LEAST_SAVED_TOKENS = 512
"""Reads of a key spared, at least, for two attentions to be cheaper than one (bench.decoding)."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows whose page tables begin with the same pages.

    Attributes:
        members: indices of the rows, ascending.
        shared_pages: leading pages that are read once; 0: nothing is shared.
    """

    members: tuple[int, ...]
    shared_pages: int

    @property
    def saved_pages(self) -> int:
        """Pages that need not be read again."""
        return self.shared_pages * (len(self.members) - 1)


def find_cohorts(table: Int64Array, full_pages: Int64Array, *, least_saved: int) -> list[Cohort]:
    """Partition rows so that the fewest pages are read; what shares too little stays together.

    O(rows x pages): each page is looked at once on the way down the tree of beginnings.

    Args:
        table: ``[rows, pages]``, page numbers, one row per sequence.
        full_pages: ``[rows]``, how many leading pages hold only what all of a row's queries see.
        least_saved: cohorts that spare fewer pages are not worth it.

    Returns:
        cohorts: those that share; then, if any rows are left, one that does not.
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
    """Keep rows that agree on ``depth`` pages together, or split them where that spares more."""
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
